#!/usr/bin/env python3
"""Trains the demo model on the text of `make_text.py` and writes the model directory `model/`.

In:  nothing but `make_text.py`. Out: `config.json`, `generation_config.json`, `model.safetensors` (bf16),
     `tokenizer.json`, `tokenizer_config.json` (with a chat template).

A text is `<|bos|> text <|eos|>`. Training begins with rhymes, where little but the names has to be guessed; after 500
steps without them the model had not found out that names come back. Then most steps see texts one by one. The last
quarter sees rows of 512 tokens with whole texts one after another, so that all positions of the context are trained.
The held-out texts come from another seed of the grammar, without those that training has seen; the loss printed for
them is that of the rounded weights.

    pip install torch transformers tokenizers safetensors numpy
    python train.py --minutes 20        # as many steps as fit; says how many that were
    python train.py --steps 1000        # exactly so many

Everything random is seeded; another torch version, CPU or thread count still gives another model. Use one thread on a
busy machine: two wait for each other in every small operation.
"""

import argparse
import itertools
import json
import math
import pathlib
import shutil
import time

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

import make_text

HERE = pathlib.Path(__file__).resolve().parent
BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
VOCAB_SIZE = 1024
CONTEXT = 512

TRAIN_SEED, HELD_OUT_SEED = 1, 2
HELD_OUT_COUNT = 300

WARM_UP_STEPS = 150
"""Steps with rhymes only; after that, until the last quarter, every eighth step."""

RHYME_COUNT = 6000

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Storyteller: ' + message['content'] | trim + eos_token + '\\n' }}"
    "{% else %}{{ raise_exception('The storyteller knows only the roles user and assistant.') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Storyteller:' }}{% endif %}"
)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE, so that any text can be encoded; puts `<|bos|>` in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[BOS, EOS], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((text.replace(EOS, "") for text in texts), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert (tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)) == (BOS_ID, EOS_ID)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def packed_rows(encoded: list[list[int]]) -> list[list[int]]:
    """Texts one after another in rows of `CONTEXT` tokens; what does not fit at the end of a row is left out."""
    packed, row = [], []
    for ids in encoded:
        row += ids
        if len(row) >= CONTEXT:
            packed.append(row[:CONTEXT])
            row = []
    return packed


def batches(rows: list[list[int]], token_count: int, random: np.random.Generator):
    """Endless batches `i64[row, t]` of rows of similar length, about `token_count` tokens each, padded with -100."""
    while True:
        order = random.permutation(len(rows))
        # Rows are sorted by length inside pools of 256 only, so that batches stay random.
        made = []
        for start in range(0, len(order), 256):
            pool = sorted(order[start:start + 256], key=lambda row: len(rows[row]))
            row_count = max(1, round(token_count / (sum(len(rows[row]) for row in pool) / len(pool))))
            made += [pool[first:first + row_count] for first in range(0, len(pool), row_count)]
        for index in random.permutation(len(made)):
            chosen = [rows[row] for row in made[index]]
            longest = max(map(len, chosen))
            yield torch.tensor([row + [-100] * (longest - len(row)) for row in chosen])


def new_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, attn_implementation="sdpa",
    ))


class Schedule:
    """Learning rate as a share of the peak: up over 40 steps, level, and down to 0 over the last quarter.

    With a time limit instead of a step count, the way down begins when 70 % of the time is over, and the steps done by
    then are three quarters of all.
    """

    def __init__(self, step_count: int | None, minutes: float | None):
        self.step_count, self.minutes = step_count, minutes
        self.start_s = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self.start_s

    def is_last_part(self, step: int) -> bool:
        return self.step_count is not None and step >= 0.75 * self.step_count

    def share(self, step: int) -> float | None:
        """None when training is over."""
        if self.step_count is None and self.elapsed_s() > 0.70 * 60 * self.minutes:
            self.step_count = math.ceil(step / 0.75)
        if self.step_count is None:
            return min(1.0, (step + 1) / 40)
        if step >= self.step_count:
            return None
        return min(1.0, (step + 1) / 40, (self.step_count - step) / (0.25 * self.step_count))


def loss_of(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of `batch: i64[row, t]` that are not padding (-100)."""
    logits = model(input_ids=batch[:, :-1].clamp(min=0), use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train(model: LlamaForCausalLM, encoded: list[list[int]], encoded_rhymes: list[list[int]],
          options: argparse.Namespace, check) -> None:
    # Muon for the matrices inside the layers needs fewer tokens than AdamW; embedding and norms stay with AdamW.
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=options.peak_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=options.peak_rate, weight_decay=0.0, betas=(0.9, 0.97)),
    ]
    random = np.random.default_rng(TRAIN_SEED)
    single = batches(encoded, options.tokens, random)
    rhymes = batches(encoded_rhymes, options.tokens, random)
    packed = batches(packed_rows(encoded), options.tokens, random)
    schedule, sum_loss = Schedule(options.steps, options.minutes), 0.0
    model.train()
    for step in itertools.count():
        share = schedule.share(step)
        if share is None:
            break
        if step < WARM_UP_STEPS or (step % 8 == 0 and not schedule.is_last_part(step)):
            batch = next(rhymes)
        else:
            batch = next(packed if schedule.is_last_part(step) else single)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = options.peak_rate * share * (0.5 if optimizer is optimizers[1] else 1.0)
            optimizer.step()
            optimizer.zero_grad()
        sum_loss += loss.item()
        if (step + 1) % 25 == 0:
            print(f"step {step + 1}, loss {sum_loss / 25:.4f}, {schedule.elapsed_s():.0f} s", flush=True)
            sum_loss = 0.0
        if (step + 1) % 50 == 0:
            print(f"  names kept: {check():.2f}", flush=True)
    print(f"{step} steps of about {options.tokens} tokens in {schedule.elapsed_s():.0f} s")


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: list[str]) -> tuple[float, float]:
    """Mean loss in nats per token, every text alone, `<|eos|>` included, `<|bos|>` given; and bits per byte of text."""
    model.eval()
    nats, token_count = 0.0, 0
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text).ids + [EOS_ID]])
        nats += loss_of(model, ids).item() * (ids.shape[1] - 1)
        token_count += ids.shape[1] - 1
    return nats / token_count, nats / math.log(2) / sum(len(text.encode()) for text in texts)


@torch.no_grad()
def kept_names(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: list[str]) -> float:
    """How often the best guess is right where the text has a name that it has had before: 0 to 1."""
    names = {tokenizer.encode(" " + name, add_special_tokens=False).ids[0]
             for name in make_text.HE_NAMES + make_text.SHE_NAMES}
    right, count = 0, 0
    model.eval()
    for text in texts:
        ids = tokenizer.encode(text).ids
        guesses = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).tolist()
        for position in range(1, len(ids)):
            if ids[position] in names and ids[position] in ids[:position]:
                right += guesses[position - 1] == ids[position]
                count += 1
    model.train()
    return right / count


def round_weights(model: LlamaForCausalLM) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()


def write(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: pathlib.Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    tensors = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string())
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in {
        "config.json": dict(sorted(config.items())),
        "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": True, "temperature": 0.8,
                                   "max_length": CONTEXT},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
                                  "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False,
                                  "chat_template": CHAT_TEMPLATE},
    }.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=int, default=24000, help="number of training texts")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--minutes", type=float)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per step, about")
    parser.add_argument("--peak-rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "model")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(TRAIN_SEED)

    texts = list(make_text.texts(TRAIN_SEED, options.texts))
    seen = set(texts)
    held_out = [text for text in make_text.texts(HELD_OUT_SEED, HELD_OUT_COUNT) if text not in seen]
    tokenizer = train_tokenizer(texts)
    random = make_text.random.Random(TRAIN_SEED)
    rhymes = [make_text.rhyme(random) for _ in range(RHYME_COUNT)]
    encoded, encoded_rhymes = (
        [encoding.ids + [EOS_ID] for encoding in tokenizer.encode_batch(some)] for some in (texts, rhymes)
    )
    model = new_model()
    size_bytes = sum(len(text.encode()) for text in texts)
    print(f"{size_bytes} bytes of text, {sum(map(len, encoded))} tokens, {len(held_out)} held-out texts, "
          f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)

    train(model, encoded, encoded_rhymes, options, lambda: kept_names(model, tokenizer, held_out[:20]))
    round_weights(model)
    loss, bits = held_out_loss(model, tokenizer, held_out)
    print(f"held-out: {loss:.4f} nats per token, perplexity {math.exp(loss):.3f}, {bits:.4f} bits per byte, "
          f"names kept: {kept_names(model, tokenizer, held_out):.3f}")
    write(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
