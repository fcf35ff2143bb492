"""Directories of `make-model` -> what other engines read, so that all of them run the same weights.

    python convert.py gguf     MODEL_DIR OUT.gguf --type f32|bf16|int8|int4     (needs: gguf, numpy)
    python convert.py openvino MODEL_DIR OUT_DIR  --type f32|bf16               (needs: optimum-intel, torch, openvino-tokenizers)
    python convert.py openvino BF16_OUT_DIR OUT_DIR --type int8|int4            (needs: nncf)

bf16 in OpenVINO is a file with 16-bit floats (every bf16 weight of this size is an fp16, too), computed as the driver asks.
int8 and int4 are Q8_0 and Q4_0 in GGUF, all matrices; in OpenVINO int8 by output channel, and int4 by groups of 32 with embedding and head in int8,
both symmetric. Matrices have the type, norms, biases and positions stay f32 in GGUF, as llama.cpp's own converter does. Llama, GPT-2, BERT.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("form", choices=["gguf", "openvino"])
    p.add_argument("model")
    p.add_argument("out")
    p.add_argument("--type", default="bf16", choices=["f32", "bf16", "int8", "int4"])
    a = p.parse_args()
    if a.form == "openvino":
        openvino(a.model, a.out, a.type)
    else:
        gguf_file(a.model, a.out, a.type)
    print(a.out)


def openvino(model, out, kind):
    if kind in ("int8", "int4"):
        return openvino_codes(model, out, kind)
    bert = config_of(model)["model_type"] == "bert"
    task = "feature-extraction" if bert else "text-generation-with-past"
    cli = os.path.join(os.path.dirname(sys.executable), "optimum-cli")
    form = {"f32": "fp32", "bf16": "fp16"}[kind]
    env = dict(os.environ, HF_HUB_OFFLINE="1")
    subprocess.run([cli, "export", "openvino", "--model", model, "--task", task, "--weight-format", form, out], check=True, env=env)


def openvino_codes(model, out, kind):
    import nncf
    import openvino as ov

    shutil.copytree(model, out, ignore=shutil.ignore_patterns("openvino_model.*"))
    how = {
        "int8": dict(mode=nncf.CompressWeightsMode.INT8_SYM),
        "int4": dict(mode=nncf.CompressWeightsMode.INT4_SYM, group_size=32, ratio=1.0),
    }[kind]
    compressed = nncf.compress_weights(ov.Core().read_model(os.path.join(model, "openvino_model.xml")), **how)
    ov.save_model(compressed, os.path.join(out, "openvino_model.xml"), compress_to_fp16=False)


def config_of(model):
    return json.load(open(os.path.join(model, "config.json")))


# --- GGUF


def gguf_file(model, out, kind):
    import gguf

    c = config_of(model)
    family = {"llama": llama, "gpt2": gpt2, "bert": bert}[c["model_type"]]
    writer = gguf.GGUFWriter(out, c["model_type"])
    writer.add_name(os.path.basename(os.path.normpath(model)))
    quantized = getattr(gguf.GGMLQuantizationType, {"int8": "Q8_0", "int4": "Q4_0"}.get(kind, kind.upper()))
    files = {"f32": "ALL_F32", "bf16": "MOSTLY_BF16", "int8": "MOSTLY_Q8_0", "int4": "MOSTLY_Q4_0"}
    writer.add_file_type(getattr(gguf.LlamaFileType, files[kind]))
    writer.add_vocab_size(c["vocab_size"])
    rename = family(writer, c, model)
    for name, x in tensors(os.path.join(model, "model.safetensors")):
        renamed = rename(name, x)
        if renamed is None:
            continue
        name, x = renamed
        if x.ndim == 2 and not name.startswith(("position", "token_types")):
            writer.add_tensor(name, gguf.quants.quantize(contiguous(x), quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, contiguous(x))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def contiguous(x):
    import numpy as np

    return np.ascontiguousarray(x, dtype=np.float32)


def tensors(path):
    """Name and f32 values of each tensor, read from the bytes of the file."""
    import numpy as np

    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(length))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        raw = data[slice(*entry["data_offsets"])]
        if entry["dtype"] == "BF16":
            x = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            x = raw.view({"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
        yield name, x.reshape(entry["shape"])


def vocabulary(writer, c, model, kind, shown=lambda token: token):
    t = json.load(open(os.path.join(model, "tokenizer.json")))
    plain = {i: s for s, i in t["model"]["vocab"].items()}
    special = {x["id"]: x["content"] for x in t["added_tokens"]}
    writer.add_tokenizer_model(kind)
    writer.add_token_list([special.get(i) or shown(plain.get(i, f"[unused {i}]")) for i in range(c["vocab_size"])])
    writer.add_token_types([3 if i in special else 1 for i in range(c["vocab_size"])])
    return t


def byte_vocabulary(writer, c, model, pre):
    t = vocabulary(writer, c, model, "gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_merges([" ".join(m) for m in t["model"]["merges"]])
    writer.add_bos_token_id(c["bos_token_id"])
    writer.add_eos_token_id(c["eos_token_id"])


def llama(writer, c, model):
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_dimension_count(c["hidden_size"] // heads)
    writer.add_rope_freq_base(c["rope_theta"])
    byte_vocabulary(writer, c, model, "llama-bpe")
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }

    def interleaved(w, count):  # halves side by side (Hugging Face) -> pairs (ggml)
        return w.reshape(count, 2, w.shape[0] // count // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)

    def rename(name, x):
        if not name.startswith("model.layers."):
            return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name], x
        _, _, layer, rest = name.split(".", 3)
        base = rest.removesuffix(".weight")
        if base.endswith(("q_proj", "k_proj")):
            x = interleaved(x, heads if base.endswith("q_proj") else kv_heads)
        return f"blk.{layer}.{names[base]}.weight", x

    return rename


def gpt2(writer, c, model):
    writer.add_context_length(c["n_positions"])
    writer.add_embedding_length(c["n_embd"])
    writer.add_block_count(c["n_layer"])
    writer.add_feed_forward_length(c["n_inner"])
    writer.add_head_count(c["n_head"])
    writer.add_layer_norm_eps(c["layer_norm_epsilon"])
    byte_vocabulary(writer, c, model, "gpt-2")
    names = {
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    }

    def rename(name, x):
        if not name.startswith("h."):
            base, kind = name.split(".")
            return f"{dict(wte='token_embd', wpe='position_embd', ln_f='output_norm')[base]}.{kind}", x
        _, layer, rest = name.split(".", 2)
        base, kind = rest.rsplit(".", 1)
        return f"blk.{layer}.{names[base]}.{kind}", x.T if x.ndim == 2 else x  # Conv1D is [in, out]

    return rename


def bert(writer, c, model):
    import gguf

    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_layer_norm_eps(c["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    # ggml marks beginnings of words where WordPiece marks continuations.
    vocabulary(writer, c, model, "bert", lambda s: s[2:] if s.startswith("##") else "\u2581" + s)
    writer.add_token_type_count(c["type_vocab_size"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_unk_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_mask_token_id(4)
    top = {
        "embeddings.word_embeddings": "token_embd",
        "embeddings.position_embeddings": "position_embd",
        "embeddings.token_type_embeddings": "token_types",
        "embeddings.LayerNorm": "token_embd_norm",
    }
    names = {
        "attention.self.query": "attn_q",
        "attention.self.key": "attn_k",
        "attention.self.value": "attn_v",
        "attention.output.dense": "attn_output",
        "attention.output.LayerNorm": "attn_output_norm",
        "intermediate.dense": "ffn_up",
        "output.dense": "ffn_down",
        "output.LayerNorm": "layer_output_norm",
    }

    def rename(name, x):
        if name.startswith("pooler."):
            return None
        base, kind = name.rsplit(".", 1)
        if base in top:
            return f"{top[base]}.{kind}", x
        _, _, layer, rest = base.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{kind}", x

    return rename


if __name__ == "__main__":
    main()
