"""A policy that moves: a tiny Llama that has learnt a chain of tokens, and the same one trained on to another chain.

After token t comes chain[t] in nine of ten cases, else any token: a head can learn it in seconds, and one that learnt
another chain is almost always wrong.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import NamedTuple

import tiny
import torch
from tiny import BEGIN, END

from rollout_spec.draft.checkpoint import save_head
from rollout_spec.draft.features import Target, channel_scale, extract
from rollout_spec.draft.loss import Shared
from rollout_spec.draft.model import Eagle3Head
from rollout_spec.draft.samples import Sample
from rollout_spec.draft.shape import HeadShape
from rollout_spec.draft.target import read_target

VOCABULARY, PROMPT, LENGTH = 64, 6, 40
WORDS = range(END + 1, VOCABULARY)


class Moved(NamedTuple):
    """Folders of the two policies and of a head for the first, untrained, and responses of each."""

    before: Path
    after: Path
    untrained: Path
    samples_before: list[Sample]
    samples_after: list[Sample]


def make_moved(folder: Path) -> Moved:
    before = train_target(1, folder / "before")
    after = train_target(2, folder / "after", start=before, steps=80)
    first, second = responses(before, 128, 1000), responses(after, 128, 2000)
    return Moved(before, after, untrained_head(before, first, folder / "untrained"), first, second)


def story(chain: int, rng: Random, length: int = LENGTH) -> list[int]:
    following = Random(chain).sample(WORDS, len(WORDS))
    tokens = [BEGIN, rng.choice(WORDS)]
    while len(tokens) < length:
        usual = rng.random() < 0.9
        tokens.append(following[tokens[-1] - WORDS.start] if usual else rng.choice(WORDS))
    return tokens


def train_target(chain: int, out: Path, start: Path | None = None, steps: int = 150) -> Path:
    """A target that has learnt the chain, from nothing or from another target; 0.2M parameters."""
    from transformers import AutoModelForCausalLM

    if start is None:
        model = tiny.llama(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, head_dim=32)
    else:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    rng = Random(chain)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * max(0.05, 1 - step / steps)
        batch = torch.tensor([story(chain, rng) for _ in range(16)])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(out)
    return out


@torch.inference_mode()
def responses(target: Path, count: int, seed: int) -> list[Sample]:
    """Sampled by the target itself at temperature 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    rng = Random(seed)
    prompts = torch.tensor([[BEGIN, *rng.choices(WORDS, k=PROMPT - 1)] for _ in range(count)])
    torch.manual_seed(seed)
    made = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=LENGTH,
        min_new_tokens=LENGTH,
    )
    rows = made.tolist()
    return [Sample(f"{seed}-{i}", row[:PROMPT], row[PROMPT:], 1.0, False) for i, row in enumerate(rows)]


def untrained_head(folder: Path, samples: list[Sample], out: Path) -> Path:
    """What training starts from, made to fit the target's features."""
    shape = HeadShape.for_target(read_target(str(folder)).config, len(WORDS) + 1, None, None)
    target, ids = Target(folder, shape.aux_layers), torch.arange(END, VOCABULARY)
    torch.manual_seed(0)
    head = Eagle3Head(shape)
    head.initialise(target.norm, Shared.of(target.embedding, target.output, ids).rows)
    head.scale_features(1 / channel_scale(extract(target, samples[:16], 4096)))
    save_head(out, head, ids, {})
    return out
