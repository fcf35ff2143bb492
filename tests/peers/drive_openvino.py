"""OpenVINO: decoders through OpenVINO GenAI (paged attention), encoders through the CPU plugin with static shapes.

In: a directory of convert.py and the flags of common.py; `--precision` is the plugin's INFERENCE_PRECISION_HINT, `default` leaves it alone. Out: common.py's
line. GenAI drives its own greedy loop, so its argmax is inside; its tokens are those that it generates. Prefill is the time to its
first token, decode the time between its tokens.
"""

import json
import os
import time

import common

a = common.arguments(__doc__)
import numpy as np
import openvino as ov

hints = {"INFERENCE_NUM_THREADS": str(a.threads), "PERFORMANCE_HINT": "LATENCY"}
if a.precision != "default":
    hints["INFERENCE_PRECISION_HINT"] = a.precision


def decoder():
    import openvino_genai as G

    scheduler = G.SchedulerConfig()
    scheduler.max_num_batched_tokens = 8192
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = False
    pipe = G.LLMPipeline(a.model, "CPU", ATTENTION_BACKEND="PA", scheduler_config=scheduler, **hints)
    engine = f"OpenVINO GenAI {ov.__version__.split('-')[0]}"

    def generate(prompts, new):
        c = G.GenerationConfig()
        c.max_new_tokens = c.min_new_tokens = new
        c.ignore_eos, c.do_sample = True, False
        x = np.array(prompts, dtype=np.int64)
        return pipe.generate(G.TokenizedInputs(ov.Tensor(x), ov.Tensor(np.ones_like(x))), c)

    if a.first_token:
        print(generate([list(range(1, a.first_token + 1))], 1).tokens[0][0], flush=True)
        return
    ids = common.Ids(config["vocab_size"])
    assert not (a.n_prompt and (a.depth or a.batch > 1)), "not driven: a prompt behind others"

    def repetition():
        if a.n_prompt:
            metrics = generate([ids.take(a.n_prompt)], 1).perf_metrics
            return a.n_prompt / metrics.get_ttft().mean * 1e3
        # The time per token of GenAI is that of a step over its sequences.
        metrics = generate([ids.take(max(a.depth, 1)) for _ in range(a.batch)], a.n_gen + 1).perf_metrics
        return 1e3 / metrics.get_tpot().mean

    common.measure(a, engine, repetition)


def encoder():
    core = ov.Core()
    model = core.read_model(os.path.join(a.model, "openvino_model.xml"))
    shape = [a.batch, a.n_prompt]
    model.reshape({name: shape for name in [i.get_any_name() for i in model.inputs]})
    request = core.compile_model(model, "CPU", hints).create_infer_request()
    names = [i.get_any_name() for i in model.inputs]
    ids = common.Ids(config["vocab_size"])

    def repetition():
        x = np.array(ids.take(a.batch * a.n_prompt), dtype=np.int64).reshape(shape)
        feeds = {n: x if n == "input_ids" else np.ones_like(x) if n == "attention_mask" else np.zeros_like(x) for n in names}
        begin = time.perf_counter()
        request.infer(feeds)
        return a.batch * a.n_prompt / (time.perf_counter() - begin)

    common.measure(a, f"OpenVINO {ov.__version__.split('-')[0]}", repetition)


config = json.load(open(os.path.join(a.model, "config.json")))
if config["model_type"] == "bert":
    encoder()
else:
    decoder()
