"""llama.cpp through the low-level bindings of llama-cpp-python: `llama_decode` on token ids, no sampling, no text.

In: a GGUF file of convert.py and the flags of common.py. Out: common.py's line.
Default settings of the library but the number of threads: weights mapped, KV cache f16, flash attention as it chooses.
A model that is an encoder (BERT) is given `-b` texts of `-p` tokens in one call.
"""

import ctypes
import time

import common

a = common.arguments(__doc__)
import llama_cpp as L

log = []


@L.llama_log_callback
def keep(_level, text, _data):
    log.append(text.decode(errors="replace"))


L.llama_log_set(keep, ctypes.c_void_p(0))
L.llama_backend_init()


def load():
    mp = L.llama_model_default_params()
    mp.n_gpu_layers = 0
    model = L.llama_model_load_from_file(a.model.encode(), mp)
    assert model, "".join(log[-20:])
    text = ctypes.create_string_buffer(64)
    L.llama_model_meta_val_str(model, b"general.architecture", text, len(text))
    encoder = text.value == b"bert"
    cp = L.llama_context_default_params()
    per_sequence = a.depth + 2 * max(a.n_prompt, a.n_gen, a.first_token) + 16
    cp.n_ctx = -(-per_sequence * a.batch // 256) * 256
    cp.n_seq_max = a.batch
    cp.n_threads = cp.n_threads_batch = a.threads
    cp.no_perf = True
    if encoder:
        # A text must lie within one micro batch; the output is the hidden state, as ours before pooling.
        cp.n_batch = cp.n_ubatch = a.batch * a.n_prompt
        cp.embeddings, cp.pooling_type = True, L.LLAMA_POOLING_TYPE_MEAN
    context = L.llama_init_from_model(model, cp)
    assert context, "".join(log[-20:])
    return model, context, encoder


model, context, encoder = load()
memory = L.llama_get_memory(context)
vocab_size = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
n_batch = L.llama_n_batch(context)


def run(rows, wants_all=False):
    """One call over rows of (sequence, position, token); logits of the last row, or of all."""
    b = L.llama_batch_init(len(rows), 0, 1)
    b.n_tokens = len(rows)
    for i, (sequence, position, token) in enumerate(rows):
        b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0] = token, position, 1, sequence
        b.logits[i] = wants_all or i == len(rows) - 1
    code = (L.llama_encode if encoder else L.llama_decode)(context, b)
    L.llama_synchronize(context)
    L.llama_batch_free(b)
    assert code == 0, (code, "".join(log[-5:]))


def feed(sequence, ids, position):
    for begin in range(0, len(ids), n_batch):
        part = ids[begin : begin + n_batch]
        run([(sequence, position + begin + i, t) for i, t in enumerate(part)])


if a.first_token:
    feed(0, list(range(1, a.first_token + 1)), 0)
    logits = L.llama_get_logits_ith(context, -1)
    print(max(range(vocab_size), key=lambda i: logits[i]), flush=True)
    raise SystemExit

ids = common.Ids(vocab_size)
if not encoder:
    for s in range(a.batch):
        feed(s, ids.take(a.depth), 0)


def repetition():
    count = a.n_prompt or a.n_gen
    tokens = ids.take(count * a.batch)
    for s in range(a.batch if not encoder else 0):
        assert L.llama_memory_seq_rm(memory, s, a.depth, -1)
    begin = time.perf_counter()
    if encoder:
        run([(i // count, i % count, t) for i, t in enumerate(tokens)], wants_all=True)
    elif a.n_prompt:
        for s in range(a.batch):
            feed(s, tokens[s * count : (s + 1) * count], a.depth)
    else:
        for i in range(count):
            run([(s, a.depth + i, tokens[i * a.batch + s]) for s in range(a.batch)], wants_all=True)
    return count * a.batch / (time.perf_counter() - begin)


common.measure(a, f"llama.cpp (llama-cpp-python {L.__version__})", repetition)
