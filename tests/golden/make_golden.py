#!/usr/bin/env python3
"""Makes the tiny random models of the golden tests and what Hugging Face transformers computes with them.

In:  nothing but this file (every model is a row of `CASES`; all numbers come from its seed).
Out: `<name>/` beside this file: `config.json`, `generation_config.json`, the weights in 16 bit,
     and `reference.json` (README.md describes it).

The order that makes the references exact: draw the weights, round them to 16 bit, write the
directory, load the directory again with `from_pretrained` in float32 with eager attention, compute.
So the reference sees the same bytes as the program under test, through transformers' own reading
of both forms of `config.json`.

Each model is also shown to be a good test. For a list of planted faults (no RoPE, wrongly paired
RoPE, window off by one, a norm omitted, kv heads swapped, a bias ignored, ...) the script computes the
logits of the faulty model and asserts that they move. The changes are stored under `faults`.

Usage:
    python make_golden.py [NAME ...]             write all models, or the named ones
    python make_golden.py --check [NAME ...]     write to a temporary place and compare
    python make_golden.py --search [NAME ...]    print the first usable seed of each
"""

import argparse
import copy
import dataclasses
import json
import pathlib
import shutil
import sys
import tempfile
from contextlib import contextmanager

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

HERE = pathlib.Path(__file__).resolve().parent

GREEDY_COUNT = 24
PROMPT_LENGTHS = (1, 13, 37)
"""The longest is longer than every window below, and all stay inside the 64 learned positions of GPT-2."""

MARGIN_MIN = 0.01
"""Smallest gap between the two best logits wherever a token is compared, so that rounding never decides it."""

PROMPT_ATTEMPTS = 120
DISTINCT_MIN = 4
"""A greedy run that repeats fewer different tokens says too little."""

FAULT_MIN = 1e-2
"""Smallest change a planted fault must make, relative to the largest logit (or embedding element)."""

SUBTLE_MIN = 1e-4
"""The same for faults that are small by nature: GELU tanh for erf, another epsilon."""

SIZE_MAX_BYTES = 200_000

# Ids below this are special (pad 0, bos 1, eos 2, and 3 as a second eos); no prompt and no greedy run has them.
SPECIAL_COUNT = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One model: `config` are the arguments of the family's config class, the rest says how it is stored."""

    name: str
    why: str
    family: str
    seed: int
    config: dict
    dtype: str = "bfloat16"
    form: int = 5
    """Form of `config.json`: 5 is what the installed transformers writes, 4 is converted back from it."""
    eos: object = 2
    weight_std: float = 0.25
    shard_count: int = 1
    strip_prefix: str = ""
    """Removed from the start of tensor names, as in checkpoints saved from the bare model."""

    @property
    def is_encoder(self) -> bool:
        return self.family == "bert"


def rope(rope_type: str, theta: float, **more) -> dict:
    return {"rope_type": rope_type, "rope_theta": theta, **more}


CASES = [
    Case(
        name="llama-gqa-tied",
        why="plain Llama: 3 kv heads for 6 heads, tied head, own RoPE base, epsilon large enough to matter",
        family="llama", form=4, seed=1,
        config=dict(vocab_size=131, hidden_size=60, intermediate_size=70, num_hidden_layers=3, num_attention_heads=6,
                    num_key_value_heads=3, max_position_embeddings=128, rms_norm_eps=1e-2, tie_word_embeddings=True,
                    rope_parameters=rope("default", 500.0)),
    ),
    Case(
        name="llama-llama3-bias",
        why="Llama 3.1 scaling, wavelengths in all three ranges; untied; attention and MLP biases; two eos ids",
        family="llama", dtype="float16", seed=2, eos=[2, 3],
        config=dict(vocab_size=257, hidden_size=52, intermediate_size=70, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False,
                    attention_bias=True, mlp_bias=True,
                    rope_parameters=rope("llama3", 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                         original_max_position_embeddings=32)),
    ),
    Case(
        name="llama-linear",
        why="linear scaling under the old key `type`; no grouping (kv heads = heads); own head_dim",
        family="llama", form=4, seed=1,
        config=dict(vocab_size=127, hidden_size=44, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=4, head_dim=12, max_position_embeddings=128, rms_norm_eps=1e-6,
                    tie_word_embeddings=False, rope_parameters=rope("linear", 10000.0, factor=4.0)),
    ),
    Case(
        name="llama-yarn",
        why="YaRN with a ramp that starts above 0 and its attention factor; head_dim 80; 1 kv head",
        family="llama", dtype="float16", seed=1,
        config=dict(vocab_size=131, hidden_size=52, intermediate_size=70, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=80, max_position_embeddings=2048, rms_norm_eps=1e-5,
                    tie_word_embeddings=True,
                    rope_parameters=rope("yarn", 1000.0, factor=4.0, original_max_position_embeddings=512)),
    ),
    Case(
        name="llama-dynamic",
        why="dynamic NTK up to max_position_embeddings, where it equals plain RoPE",
        family="llama", form=4, seed=1,
        config=dict(vocab_size=199, hidden_size=54, intermediate_size=70, num_hidden_layers=2, num_attention_heads=6,
                    num_key_value_heads=2, head_dim=18, max_position_embeddings=64, rms_norm_eps=1e-5,
                    tie_word_embeddings=False, rope_parameters=rope("dynamic", 10000.0, factor=2.0)),
    ),
    Case(
        name="mistral-window",
        why="sliding window shorter than the prompt, in every layer; own head_dim; two shards with an index",
        family="mistral", form=4, seed=1, shard_count=2,
        config=dict(vocab_size=127, hidden_size=60, intermediate_size=70, num_hidden_layers=2, num_attention_heads=6,
                    num_key_value_heads=2, head_dim=14, max_position_embeddings=128, rms_norm_eps=1e-5,
                    tie_word_embeddings=False, sliding_window=8, rope_parameters=rope("default", 10000.0)),
    ),
    Case(
        name="qwen2",
        why="QKV bias; `sliding_window` is given but switched off",
        family="qwen2", form=4, seed=1,
        config=dict(vocab_size=131, hidden_size=60, intermediate_size=74, num_hidden_layers=2, num_attention_heads=6,
                    num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-6, tie_word_embeddings=True,
                    use_sliding_window=False, sliding_window=8, max_window_layers=1,
                    rope_parameters=rope("default", 1000000.0)),
    ),
    Case(
        name="qwen2-window",
        why="window in the second and third layer only (`layer_types`); 1 kv head; untied",
        family="qwen2", dtype="float16", seed=1,
        config=dict(vocab_size=101, hidden_size=52, intermediate_size=70, num_hidden_layers=3, num_attention_heads=2,
                    num_key_value_heads=1, max_position_embeddings=128, rms_norm_eps=1e-6, tie_word_embeddings=False,
                    use_sliding_window=True, sliding_window=9, max_window_layers=1,
                    rope_parameters=rope("default", 10000.0)),
    ),
    Case(
        name="qwen3",
        why="norms on q and k; heads * head_dim (160) is not hidden (52); head_dim 80; 1 kv head",
        family="qwen3", seed=1,
        config=dict(vocab_size=131, hidden_size=52, intermediate_size=70, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=80, max_position_embeddings=128, rms_norm_eps=1e-6,
                    tie_word_embeddings=True, rope_parameters=rope("default", 1000000.0)),
    ),
    Case(
        name="qwen3-gqa",
        why="norms on q and k with several kv heads; attention biases; untied",
        family="qwen3", form=4, dtype="float16", seed=1,
        config=dict(vocab_size=109, hidden_size=44, intermediate_size=70, num_hidden_layers=2, num_attention_heads=6,
                    num_key_value_heads=3, head_dim=18, max_position_embeddings=128, rms_norm_eps=1e-6,
                    tie_word_embeddings=False, attention_bias=True, rope_parameters=rope("default", 5000.0)),
    ),
    Case(
        name="granite",
        why="all four multipliers differ from 1 (and from 1/sqrt(head_dim))",
        family="granite", form=4, seed=1,
        config=dict(vocab_size=131, hidden_size=60, intermediate_size=70, num_hidden_layers=3, num_attention_heads=6,
                    num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=True,
                    embedding_multiplier=3.5, attention_multiplier=0.21, residual_multiplier=0.55, logits_scaling=0.7,
                    rope_parameters=rope("default", 10000.0)),
    ),
    Case(
        name="phi3-partial",
        why="fused qkv and gate_up; RoPE on the first half of head_dim 20; 1 kv head",
        family="phi3", seed=1,
        config=dict(vocab_size=113, hidden_size=60, intermediate_size=70, num_hidden_layers=2, num_attention_heads=3,
                    num_key_value_heads=1, max_position_embeddings=128, original_max_position_embeddings=128,
                    rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=None, pad_token_id=0,
                    rope_parameters=rope("default", 10000.0, partial_rotary_factor=0.5)),
    ),
    Case(
        name="phi3-window",
        why="fused qkv and gate_up with several kv heads; sliding window; three quarters of RoPE, config form 4",
        family="phi3", form=4, dtype="float16", seed=1,
        config=dict(vocab_size=131, hidden_size=64, intermediate_size=70, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=128, original_max_position_embeddings=128,
                    rms_norm_eps=1e-5, tie_word_embeddings=True, sliding_window=8, pad_token_id=0,
                    rope_parameters=rope("default", 10000.0, partial_rotary_factor=0.75)),
    ),
    Case(
        name="gpt2-gelu-new",
        why="as published: tanh GELU, n_inner null, names without `transformer.`, causal masks as `attn.bias`",
        family="gpt2", form=4, seed=1, strip_prefix="transformer.", dtype="float16",
        config=dict(vocab_size=131, n_embd=44, n_layer=2, n_head=2, n_inner=None, n_positions=64,
                    activation_function="gelu_new", layer_norm_epsilon=1e-5),
    ),
    Case(
        name="gpt2-gelu",
        why="erf GELU; own n_inner",
        family="gpt2", seed=2,
        config=dict(vocab_size=257, n_embd=60, n_layer=2, n_head=3, n_inner=70, n_positions=64,
                    activation_function="gelu", layer_norm_epsilon=1e-5),
    ),
    Case(
        name="bert",
        why="sentence encoder: bidirectional, segments, `modules.json` with mean pooling and normalisation",
        family="bert", form=4, seed=1,
        config=dict(vocab_size=131, hidden_size=60, intermediate_size=70, num_hidden_layers=2, num_attention_heads=3,
                    max_position_embeddings=64, type_vocab_size=2, hidden_act="gelu", layer_norm_eps=1e-12,
                    pad_token_id=0),
    ),
]


# --- Making a model -------------------------------------------------------------------------------------------------


def config_of(case: Case) -> dict:
    """The case as a transformers 5 `config.json`, with every default spelled out."""
    ids = {} if case.is_encoder else {"bos_token_id": 1, "eos_token_id": case.eos}
    config_class = type(AutoConfig.for_model(case.family))
    config = config_class(**case.config, **ids)
    config.architectures = ["BertModel" if case.is_encoder else type(causal_model(config)).__name__]
    config.dtype = case.dtype
    return json.loads(config.to_json_string(use_diff=False))


def causal_model(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def form_4(config: dict, dtype: str, use_old_rope_key: bool, window: int | None) -> dict:
    """`config` as transformers 4 wrote it: `rope_theta`, `rope_scaling`, `torch_dtype`; no `layer_types`.

    Nor a `head_dim` that only repeats hidden / heads.
    """
    config = {key: value for key, value in config.items() if key not in ("layer_types", "dtype")}
    if "head_dim" in config and config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    parameters = config.pop("rope_parameters", None)
    if parameters is not None:
        parameters = dict(parameters)
        config["rope_theta"] = parameters.pop("rope_theta")
        if "partial_rotary_factor" in parameters and config["model_type"] == "phi3":
            config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
        rope_type = parameters.pop("rope_type")
        if rope_type == "default":
            config["rope_scaling"] = None
        else:
            config["rope_scaling"] = {"type" if use_old_rope_key else "rope_type": rope_type, **parameters}
    if window is not None:
        # The config class of Qwen2 forgets a window that is switched off; published files keep it.
        config["sliding_window"] = window
    config["torch_dtype"] = dtype
    config["transformers_version"] = "4.46.3"
    return dict(sorted(config.items()))


def draw(case: Case, config: dict) -> dict[str, torch.Tensor]:
    """All tensors of the model, rounded to the case's 16-bit type; tied copies are left out."""
    model = build(case, config)
    random = np.random.default_rng([case.seed, *case.name.encode()])
    dtype = getattr(torch, case.dtype)
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    tensors = {}
    for name, shape in sorted((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()):
        if name in tied:
            continue
        values = random.standard_normal(shape)
        if is_norm_weight(name):
            values = 1 + 0.2 * values
        elif name.endswith("bias"):
            values = 0.2 * values
        else:
            values = case.weight_std * values
        tensors[name] = torch.from_numpy(values).to(dtype)
    return tensors


def is_norm_weight(name: str) -> bool:
    return name.endswith(".weight") and any(part in name for part in ("norm", "LayerNorm", "ln_"))


def build(case: Case, config: dict, tensors: dict[str, torch.Tensor] | None = None):
    """The float32 model of `config`, with `tensors` where given."""
    config = copy.deepcopy(config)
    config.pop("dtype", None)
    auto = AutoModel if case.is_encoder else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(**config), attn_implementation="eager", dtype=torch.float32)
    if tensors is not None:
        missing, unexpected = model.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= set(getattr(model, "all_tied_weights_keys", {}) or {}), missing
        model.tie_weights()
    return model.eval()


def write_model(case: Case, directory: pathlib.Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    config = json.loads(AutoConfig.for_model(**config).to_json_string(use_diff=True))
    if case.form == 4:
        config = form_4(config, case.dtype, case.name == "llama-linear", case.config.get("sliding_window"))
    write_json(directory / "config.json", config)
    if not case.is_encoder:
        write_json(directory / "generation_config.json",
                   {"bos_token_id": 1, "eos_token_id": case.eos, "do_sample": False})
    else:
        write_pooling(directory, config["hidden_size"])

    stored = {name.removeprefix(case.strip_prefix): tensor.contiguous() for name, tensor in tensors.items()}
    if case.strip_prefix:
        count = config["n_positions"]
        mask = torch.tril(torch.ones(count, count)).reshape(1, 1, count, count)
        for layer in range(config["n_layer"]):
            stored[f"h.{layer}.attn.bias"] = mask.clone()
    write_weights(case, directory, stored)


def write_weights(case: Case, directory: pathlib.Path, stored: dict[str, torch.Tensor]) -> None:
    metadata = {"format": "pt"}
    if case.shard_count == 1:
        save_file(stored, directory / "model.safetensors", metadata=metadata)
        return
    names = sorted(stored)
    weight_map = {}
    for shard in range(case.shard_count):
        file = f"model-{shard + 1:05}-of-{case.shard_count:05}.safetensors"
        chosen = names[shard::case.shard_count]
        save_file({name: stored[name] for name in chosen}, directory / file, metadata=metadata)
        weight_map |= {name: file for name in chosen}
    total_size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    write_json(directory / "model.safetensors.index.json",
               {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))})


def write_pooling(directory: pathlib.Path, hidden_size: int) -> None:
    module = "sentence_transformers.models."
    write_json(directory / "modules.json", [
        {"idx": 0, "name": "0", "path": "", "type": module + "Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": module + "Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": module + "Normalize"},
    ])
    (directory / "1_Pooling").mkdir()
    write_json(directory / "1_Pooling" / "config.json", {
        "word_embedding_dimension": hidden_size,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    })


def write_json(path: pathlib.Path, value: object) -> None:
    """Indented down to lists of numbers, which stay on one line."""
    path.write_text(json_text(value, 0) + "\n")


def json_text(value: object, depth: int) -> str:
    indent, outdent = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value:
        items = [f"{indent}{json.dumps(key)}: {json_text(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{outdent}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        items = [f"{indent}{json_text(item, depth + 1)}" for item in value]
        return "[\n" + ",\n".join(items) + f"\n{outdent}]"
    return json.dumps(value)


# --- What transformers computes -------------------------------------------------------------------------------------


@torch.no_grad()
def logits_of(model, ids: list[int], **more) -> torch.Tensor:
    """Logits at every position: `f32[t, vocab]`. Without a KV cache, so that nothing depends on its window."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False, **more).logits[0]
    assert torch.isfinite(logits).all()
    return logits


def margin_of(logits: torch.Tensor) -> float:
    """Smallest gap between the best and the second logit over the rows of `logits`."""
    best = logits.topk(2, dim=-1).values
    return float((best[:, 0] - best[:, 1]).min())


def prompts_of(case: Case, length: int):
    """Endless random prompts of `length` tokens."""
    random = np.random.default_rng([case.seed, length, *case.name.encode()])
    while True:
        yield random.integers(SPECIAL_COUNT, case.config["vocab_size"], length).tolist()


def causal_case(case: Case, model, length: int) -> dict:
    """The first prompt of `length` tokens whose every token, read or generated, is decided by a clear margin."""
    for _, ids in zip(range(PROMPT_ATTEMPTS), prompts_of(case, length)):
        logits = logits_of(model, ids)
        margin = margin_of(logits)
        greedy = []
        last = logits[-1]
        while margin > MARGIN_MIN and len(greedy) < GREEDY_COUNT and int(last.argmax()) >= SPECIAL_COUNT:
            greedy.append(int(last.argmax()))
            last = logits_of(model, ids + greedy)[-1]
            margin = min(margin, margin_of(last[None]))
        if margin > MARGIN_MIN and len(greedy) == GREEDY_COUNT and len(set(greedy)) >= DISTINCT_MIN:
            return {
                "input_ids": ids,
                "all_top1": logits.argmax(-1).tolist(),
                "greedy_ids": greedy,
                "smallest_top1_top2_margin": rounded(margin),
                "logits": rounded_list(logits[-1]),
            }
    raise AssertionError(f"no clear prompt of {length} tokens")


@torch.no_grad()
def encoder_case(model, ids: list[int], segments: list[int]) -> dict:
    states = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([segments])).last_hidden_state[0]
    pooled = {"mean": states.mean(0), "cls": states[0], "max": states.max(0).values}
    result = {"input_ids": ids, "token_type_ids": segments}
    for name, vector in pooled.items():
        result[name] = rounded_list(vector)
        result[name + "_normalised"] = rounded_list(vector / vector.norm())
    return result


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def rounded_list(vector: torch.Tensor) -> list[float]:
    return [rounded(value) for value in vector.tolist()]


# --- Planted faults -------------------------------------------------------------------------------------------------


class Faults:
    """Runs the model with one thing wrong at a time and collects how much the result moves.

    The result is the logits at the last position of the longest prompt (the mean of the states for an encoder); its
    change is max |faulty - right| / max |right|.
    """

    def __init__(self, case: Case, config: dict, tensors: dict[str, torch.Tensor], ids: list[int]):
        self.case, self.config, self.tensors, self.ids = case, config, tensors, ids
        self.changes: dict[str, float] = {}
        self.weak: list[str] = []
        self.right = self.run(build(case, config, tensors))

    @torch.no_grad()
    def run(self, model, **more) -> torch.Tensor:
        if self.case.is_encoder:
            return model(input_ids=torch.tensor([self.ids]), **more).last_hidden_state[0].mean(0)
        return logits_of(model, self.ids, **more)[-1]

    def change(self, result: torch.Tensor) -> float:
        return float((result - self.right).abs().max() / self.right.abs().max())

    def expect(self, name: str, result: torch.Tensor, at_least: float = FAULT_MIN) -> None:
        change = self.change(result)
        self.changes[name] = float(f"{change:.2g}")
        if not change >= at_least:
            self.weak.append(f"{name}: {change:.2g}")

    def expect_same(self, name: str, result: torch.Tensor) -> None:
        change = self.change(result)
        if not change < 1e-5:
            self.weak.append(f"{name} should not matter: {change:.2g}")

    def with_config(self, name: str, at_least: float = FAULT_MIN, **values) -> None:
        self.expect(name, self.run(build(self.case, {**self.config, **values}, self.tensors)), at_least)

    def with_tensors(self, name: str, **values) -> None:
        self.expect(name, self.run(build(self.case, self.config, {**self.tensors, **values})))

    def all(self) -> dict[str, float]:
        self.positions()
        self.rope()
        self.window()
        self.heads()
        self.biases()
        self.norms()
        self.scalars()
        assert not self.weak, f"{self.case.name} does not notice: {'; '.join(self.weak)}"
        return self.changes

    def positions(self) -> None:
        zeros = torch.zeros(1, len(self.ids), dtype=torch.long)
        model = build(self.case, self.config, self.tensors)
        self.expect("positions all 0", self.run(model, position_ids=zeros))
        if "rope_parameters" not in self.config:
            shifted = torch.arange(1, len(self.ids) + 1)[None]
            self.expect("positions off by one", self.run(model, position_ids=shifted))

    def rope(self) -> None:
        parameters = self.config.get("rope_parameters")
        if parameters is None:
            return
        model = build(self.case, self.config, self.tensors)
        with wrong_pairs(model, self.rotary_dim()):
            self.expect("rope pairs neighbours", self.run(model))
        factor = parameters.get("partial_rotary_factor", 1.0)
        if factor != 1.0:
            self.with_config("rope on the whole head", rope_parameters={**parameters, "partial_rotary_factor": 1.0})
        theta = parameters["rope_theta"]
        self.with_config("rope_theta of another model",
                         rope_parameters={**parameters, "rope_theta": 10000.0 if theta != 10000.0 else 500000.0})
        kind = parameters["rope_type"]
        plain = {"rope_type": "default", "rope_theta": theta}
        if kind == "dynamic":
            self.expect_same("dynamic scaling inside max_position_embeddings",
                             self.run(build(self.case, {**self.config, "rope_parameters": plain}, self.tensors)))
        elif kind != "default":
            self.with_config("rope scaling ignored", rope_parameters=plain)
            self.with_config("rope scaling linear or not", rope_parameters={
                **plain, "rope_type": "linear", "factor": parameters["factor"] if kind != "linear" else 2.0})
        if kind == "yarn":
            self.with_config("yarn attention factor ignored", rope_parameters={**parameters, "attention_factor": 1.0})
            self.with_config("yarn ramp ignored",
                             rope_parameters={**parameters, "beta_fast": 1e9, "beta_slow": 1e-9})
        if kind == "llama3":
            self.with_config("llama3 without the middle range",
                             rope_parameters={**parameters, "high_freq_factor": parameters["low_freq_factor"] + 1e-6})

    def rotary_dim(self) -> int:
        return int(self.head_dim() * self.config["rope_parameters"].get("partial_rotary_factor", 1.0))

    def head_dim(self) -> int:
        config = self.config
        if self.case.family == "gpt2":
            return config["n_embd"] // config["n_head"]
        return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def window(self) -> None:
        window = self.config.get("sliding_window")
        if window is not None:
            self.with_config("window one shorter", sliding_window=window - 1)
            self.with_config("window one longer", sliding_window=window + 1)
            self.with_config("window ignored", sliding_window=4096)
        elif self.case.config.get("sliding_window") is not None:
            self.with_config("window used though switched off", use_sliding_window=True,
                             sliding_window=self.case.config["sliding_window"], layer_types=None)
        kinds = self.config.get("layer_types")
        if kinds is not None and len(set(kinds)) > 1:
            self.with_config("window in the wrong layers", layer_types=kinds[::-1])

    def heads(self) -> None:
        """kv heads in reverse order, and the wrong grouping of query heads (head h reads kv head h % count)."""
        config = self.config
        head_count = config.get("num_attention_heads") or config["n_head"]
        kv_head_count = config.get("num_key_value_heads") or head_count
        if kv_head_count == 1:
            return
        swapped = {}
        for name, tensor in self.tensors.items():
            rows = self.kv_rows(name, tensor, head_count, kv_head_count)
            for start in rows:
                out = swapped.get(name, tensor).clone()
                length = kv_head_count * self.head_dim()
                axis = 1 if self.case.family == "gpt2" and tensor.dim() == 2 else 0
                part = out.narrow(axis, start, length)
                shape = (*part.shape[:axis], kv_head_count, self.head_dim(), *part.shape[axis + 1:])
                part.copy_(part.clone().reshape(shape).flip(axis).reshape(part.shape))
                swapped[name] = out
        assert swapped
        self.with_tensors("kv heads swapped", **swapped)
        if kv_head_count < head_count:
            model = build(self.case, config, self.tensors)
            module = modelling(model)
            with replaced(module, "repeat_kv", lambda x, count: x.repeat(1, count, 1, 1)):
                self.expect("kv heads grouped the wrong way", self.run(model))

    def kv_rows(self, name: str, tensor: torch.Tensor, head_count: int, kv_head_count: int) -> list[int]:
        """Where in `name` the rows of k and of v begin; none for other tensors."""
        q_rows, kv_rows = head_count * self.head_dim(), kv_head_count * self.head_dim()
        if any(part in name for part in ("k_proj", "v_proj", "self.key", "self.value")):
            return [0]
        if "qkv_proj" in name or "c_attn" in name:
            return [q_rows, q_rows + kv_rows]
        return []

    def biases(self) -> None:
        for name, tensor in self.tensors.items():
            if not name.endswith("bias") or name.startswith("pooler"):
                continue
            if "c_attn" in name:
                for part, letter in enumerate("qkv"):
                    zeroed = tensor.clone()
                    zeroed[part * len(tensor) // 3:(part + 1) * len(tensor) // 3] = 0
                    self.without_bias(f"{name} ({letter})", name, zeroed, letter == "k")
            else:
                self.without_bias(name, name, torch.zeros_like(tensor), "self.key" in name)

    def without_bias(self, label: str, name: str, value: torch.Tensor, is_unrotated_key: bool) -> None:
        # Without RoPE a key bias adds the same to every score of a row, and softmax removes it.
        if is_unrotated_key:
            self.expect_same(f"{label} ignored", self.run(build(self.case, self.config, {**self.tensors, name: value})))
        else:
            self.with_tensors(f"{label} ignored", **{name: value})

    def norms(self) -> None:
        for name, tensor in self.tensors.items():
            if is_norm_weight(name):
                self.with_tensors(f"{name} ignored", **{name: torch.ones_like(tensor)})
        model = build(self.case, self.config, self.tensors)
        for name, module in model.named_modules():
            if type(module).__name__.endswith("Norm"):
                with replaced(module, "forward", lambda x: x):
                    self.expect(f"{name} omitted", self.run(model))

    def scalars(self) -> None:
        config, family = self.config, self.case.family
        eps_key = next(key for key in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps") if key in config)
        if config[eps_key] >= 1e-3:
            self.with_config("epsilon of another model", SUBTLE_MIN, **{eps_key: 1e-6})
        if family == "granite":
            for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
                self.with_config(f"{key} ignored", **{key: 1.0})
            self.with_config("attention_multiplier ignored", attention_multiplier=self.head_dim() ** -0.5)
        act_key = "activation_function" if family == "gpt2" else "hidden_act"
        other = {"gelu": "gelu_new", "gelu_new": "gelu", "silu": "gelu"}[config[act_key]]
        self.with_config(f"{other} for {config[act_key]}", SUBTLE_MIN if config[act_key] != "silu" else FAULT_MIN,
                         **{act_key: other})
        if family == "bert":
            name = "embeddings.token_type_embeddings.weight"
            self.with_tensors("segment embedding ignored", **{name: torch.zeros_like(self.tensors[name])})


def modelling(model):
    """The transformers module that the model's code is in."""
    return sys.modules[type(model).__module__]


@contextmanager
def replaced(owner, name: str, value):
    # A module's `forward` is found on its class, so putting it back means removing it from the instance.
    had, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if had else delattr(owner, name)


@contextmanager
def wrong_pairs(model, rotary_dim: int):
    """RoPE on the pairs (0,1), (2,3), ... (as GPT-J) where these families rotate (0, d/2), (1, d/2 + 1), ...

    Reordering q and k alike leaves their product as it is, so it is enough to reorder before the rotation.
    """
    module = modelling(model)
    right = module.apply_rotary_pos_emb
    order = torch.cat([torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2)])

    def wrong(q, k, cos, sin, *rest, **more):
        full = torch.cat([order, torch.arange(rotary_dim, q.shape[-1])])
        return right(q[..., full], k[..., full], cos, sin, *rest, **more)

    with replaced(module, "apply_rotary_pos_emb", wrong):
        yield


# --- One case, all cases --------------------------------------------------------------------------------------------


def make(case: Case, directory: pathlib.Path) -> None:
    """Writes `directory` or fails: the seed's margins must be wide enough and every planted fault must show."""
    config = config_of(case)
    tensors = draw(case, config)
    write_model(case, directory, config, tensors)

    auto = AutoModel if case.is_encoder else AutoModelForCausalLM
    model, report = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager",
                                         local_files_only=True, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    model.eval()

    if case.is_encoder:
        prompts = [next(prompts_of(case, length)) for length in PROMPT_LENGTHS]
        cases = [encoder_case(model, ids, [0] * len(ids)) for ids in prompts]
        first, second = prompts[1], prompts[2][:10]
        cases.append(encoder_case(model, first + second, [0] * len(first) + [1] * len(second)))
    else:
        cases = [causal_case(case, model, length) for length in PROMPT_LENGTHS]

    faults = Faults(case, config, tensors, cases[PROMPT_LENGTHS.index(max(PROMPT_LENGTHS))]["input_ids"])
    assert faults.change(faults.run(model)) == 0, "config.json as written does not mean the model that was drawn"
    reference = {
        "model": case.why,
        "made_with": f"make_golden.py, transformers {transformers.__version__}, torch {torch.__version__}, "
                     "float32 from the stored 16-bit weights, CPU, eager attention",
        "seed": case.seed,
        "faults": faults.all(),
    }
    if not case.is_encoder:
        reference["decoding"] = f"greedy, {GREEDY_COUNT} tokens, argmax of all positions recomputed each step"
    reference["cases"] = cases
    write_json(directory / "reference.json", reference)
    size_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    assert size_bytes < SIZE_MAX_BYTES, f"{size_bytes} bytes"


def search(case: Case) -> int:
    """First seed with which `make` succeeds."""
    for seed in range(1, 30):
        with tempfile.TemporaryDirectory() as directory:
            try:
                make(dataclasses.replace(case, seed=seed), pathlib.Path(directory) / case.name)
                return seed
            except AssertionError as error:
                print(f"  {case.name} seed {seed}: {error}", file=sys.stderr)
    sys.exit(f"{case.name}: no seed found")


def check(case: Case) -> None:
    """Makes the case again elsewhere: same tensors and settings, same tokens, logits within 1e-4."""
    with tempfile.TemporaryDirectory() as directory:
        made, kept = pathlib.Path(directory) / case.name, HERE / case.name
        make(case, made)
        files = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
        assert files == sorted(path.relative_to(kept) for path in kept.rglob("*") if path.is_file())
        for file in files:
            if file.suffix == ".safetensors":
                ours, theirs = load_file(made / file), load_file(kept / file)
                assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours), file
            elif file.name != "reference.json":
                assert (made / file).read_text() == (kept / file).read_text(), file
        ours, theirs = (json.loads((place / "reference.json").read_text())["cases"] for place in (made, kept))
        for a, b in zip(ours, theirs, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                if key == "smallest_top1_top2_margin" or isinstance(a[key][0], float):
                    np.testing.assert_allclose(a[key], b[key], atol=1e-4)
                else:
                    assert a[key] == b[key], key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare with the committed models, write nothing")
    mode.add_argument("--search", action="store_true", help="print the first usable seed of each")
    options = parser.parse_args()
    unknown = set(options.names) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for case in CASES:
        if options.names and case.name not in options.names:
            continue
        if options.search:
            print(case.name, search(case), flush=True)
        elif options.check:
            check(case)
            print("same", case.name, flush=True)
        else:
            make(case, HERE / case.name)
            print("made", case.name, flush=True)


if __name__ == "__main__":
    main()
