"""A toy language, and a small Llama that has learnt some of it.

Sentences are drawn from templates of fixed words with slots; two names stay the same throughout a story, so that what
comes next is partly certain, partly remembered and partly free.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

VOCABULARY, BEGIN, END = 512, 1, 2
LENGTH = 96
TEMPLATES, SLOTS = 40, ("A", "B", "N")


def _grammar() -> tuple[list[list[int | str]], dict[int, list[int]]]:
    rng = Random(1)
    templates: list[list[int | str]] = []
    for _ in range(TEMPLATES):
        words: list[int | str] = [rng.randrange(10, 400) for _ in range(rng.randint(6, 14))]
        for slot in SLOTS:
            words[rng.randrange(len(words))] = slot
        templates.append(words)
    return templates, {index: rng.sample(range(TEMPLATES), 3) for index in range(TEMPLATES)}


WORDS, FOLLOWERS = _grammar()


def story(rng: Random, length: int = LENGTH) -> list[int]:
    a, b = rng.sample(range(400, 432), 2)
    at, tokens = rng.randrange(TEMPLATES), [BEGIN]
    while len(tokens) < length:
        fill = {"A": a, "B": b}
        tokens += [word if isinstance(word, int) else fill.get(word) or rng.randrange(432, 496) for word in WORDS[at]]
        at = rng.choice(FOLLOWERS[at])
    return tokens[:length]


def save_target(folder: Path, steps: int) -> Path:
    """A six-layer Llama of 1.2M parameters, trained for so many steps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=BEGIN,
        eos_token_id=END,
        pad_token_id=END,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    rng = Random(2)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * max(0.05, 1 - step / steps)
        batch = torch.tensor([story(rng) for _ in range(16)])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
