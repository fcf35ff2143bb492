"""What the drivers of other engines share: the flags of an executable's `bench` verb, its token ids, its JSON line.

A driver takes one test and measures it as `OUT bench` does: one repetition that is not counted, then `-r` that are, each on
new ids; with `--turns` anew for every line on stdin, so that engines can take turns without being loaded again.
In: the flags below. Out: a line of JSON on stdout for each (and an empty line behind it with `--turns`), with the fields that the Rust side reads from `bench -o jsonl`:

    {"test": "tg64@d128", "batch": 1, "threads": 2, "samples_ts": [11.2], "rss_bytes": 2600000000, "engine": "llama.cpp 0.3.16"}

Cores are pinned from outside (`taskset`); a driver only sets the number of threads.
"""

import argparse
import json
import os
import sys


class Ids:
    """The token ids of `OUT bench` (runtime-lib/src/cli/bench.rs): SplitMix64 from seed 1, modulo the vocabulary."""

    def __init__(self, vocab):
        self.state, self.vocab = 1, vocab

    def take(self, count):
        mask = (1 << 64) - 1
        ids = []
        for _ in range(count):
            self.state = (self.state + 0x9E3779B97F4A7C15) & mask
            z = self.state
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            ids.append((z ^ (z >> 31)) % self.vocab)
        return ids


def arguments(description):
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--model", required=True, help="converted model (convert.py)")
    p.add_argument("--precision", default="f32", choices=["f32", "bf16", "default"], help="arithmetic, where the engine lets one choose")
    p.add_argument("-p", "--n-prompt", type=int, default=0, help="prefill so many tokens")
    p.add_argument("-n", "--n-gen", type=int, default=0, help="decode so many tokens")
    p.add_argument("-d", "--depth", type=int, default=0, help="tokens in the cache before")
    p.add_argument("-b", "--batch", type=int, default=1, help="sequences side by side")
    p.add_argument("-r", "--repetitions", type=int, default=1)
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--turns", action="store_true", help="measure once for every line on stdin, until it ends")
    p.add_argument("--first-token", type=int, default=0, help="only: load, read so many ids, print the first token")
    a = p.parse_args()
    if bool(a.n_prompt) + bool(a.n_gen) + bool(a.first_token) != 1:
        p.error("exactly one of -p, -n and --first-token")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(a.threads)
    return a


def measure(a, engine, repetition):
    """Measures once or in turns; `repetition` runs the test once and returns tokens of all sequences per second."""
    for _turn in sys.stdin if a.turns else [None]:
        repetition()
        emit(a, engine, [repetition() for _ in range(a.repetitions)])
        if a.turns:
            print(flush=True)


def emit(a, engine, samples_ts):
    test = f"pp{a.n_prompt}" if a.n_prompt else f"tg{a.n_gen}"
    if a.depth:
        test += f"@d{a.depth}"
    print(json.dumps(dict(test=test, batch=a.batch, threads=a.threads, samples_ts=samples_ts, rss_bytes=peak_rss_bytes(), engine=engine)), flush=True)


def peak_rss_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
