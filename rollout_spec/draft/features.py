"""What the target thought at each token of its responses: a teacher-forced forward pass, kept in memory in bfloat16."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout_spec.draft.samples import Sample
from rollout_spec.precision import cpu_dtype

BYTES = 2  # of a bfloat16
# Rows whose logits over the whole vocabulary are held at once.
ROWS = 512


@dataclass(frozen=True, slots=True)
class Features:
    """Of one sample of L tokens, the first `start` of which are its prompt."""

    tokens: Tensor
    """[L] int64"""
    start: int
    aux: Tensor
    """[L, features]: inputs of the chosen layers, side by side."""
    last: Tensor
    """[L, hidden]: after the last norm; the output layer makes the target's logits of it."""
    log_norm: Tensor
    """[L] float32: log-sum-exp of those logits / `divisor` over the whole vocabulary; 0 within the prompt."""
    temperature: float

    @property
    def divisor(self) -> float:
        return _divisor(self.temperature)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples padded to T tokens, [B, T] each; `counts`: positions whose next token the target chose in a response."""

    tokens: Tensor
    aux: Tensor
    last: Tensor
    log_norm: Tensor
    counts: Tensor
    """bool: the law at position t counts, for t from the first response token to the last but one."""
    divisor: Tensor
    """Logits are divided by it: the temperature, and 1 at temperature 0, whose law says no more than one token."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


class Target:
    """The policy as Hugging Face runs it, and what a head shares with it."""

    def __init__(self, folder: Path, aux_layers: Sequence[int]) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=cpu_dtype(), local_files_only=True).eval()
        self.model.requires_grad_(False)
        self.aux_layers = tuple(aux_layers)
        self.embedding: Tensor = self.model.get_input_embeddings().weight
        self.output: Tensor = self.model.get_output_embeddings().weight
        self.norm: Tensor = self.model.model.norm.weight

    def token_bytes(self) -> int:
        """Memory that the features of one token take."""
        return BYTES * self.embedding.shape[1] * (len(self.aux_layers) + 1)

    @torch.no_grad()
    def features(self, samples: Sequence[Sample]) -> list[Features]:
        """One forward pass for all of them, padded to the longest."""
        longest = max(len(sample.tokens) for sample in samples)
        ids = torch.zeros(len(samples), longest, dtype=torch.long)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.tokens)] = torch.tensor(sample.tokens)
        # Causal attention: what is padded at the end changes nothing before it.
        inputs: dict[int, Tensor] = {}
        hooks = [self._keep(layer, inputs) for layer in self.aux_layers]
        try:
            last = self.model.model(ids, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        aux = torch.cat([inputs[layer] for layer in self.aux_layers], -1)
        return [self._cut(sample, ids[row], aux[row], last[row]) for row, sample in enumerate(samples)]

    def _keep(self, layer: int, inputs: dict[int, Tensor]) -> Any:
        def hook(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            inputs[layer] = args[0] if args else kwargs["hidden_states"]

        return self.model.model.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)

    def _cut(self, sample: Sample, ids: Tensor, aux: Tensor, last: Tensor) -> Features:
        length, start = len(sample.tokens), len(sample.prompt)
        log_norm, divisor = torch.zeros(length), _divisor(sample.temperature)
        aux, last = (tensor[:length].to(torch.bfloat16, copy=True) for tensor in (aux, last))
        for at in range(start, length, ROWS):
            rows = last[at : min(at + ROWS, length)].to(self.output.dtype)
            log_norm[at : at + len(rows)] = (rows @ self.output.T).float().div_(divisor).logsumexp(-1)
        return Features(ids[:length].clone(), start, aux, last, log_norm, sample.temperature)


def extract(
    target: Target,
    samples: Sequence[Sample],
    batch_tokens: int,
    most_bytes: float = float("inf"),
    on_batch: Callable[[int], object] = lambda tokens: None,
    in_time: Callable[[], bool] = lambda: True,
) -> list[Features]:
    """Features of the samples, in batches of like length in random order, while memory and time allow.

    `on_batch` gets the tokens done. What is left out is a random share, not the long ones.
    """
    done: list[Features] = []
    used = 0
    for group in batches([len(sample.tokens) for sample in samples], batch_tokens, random.Random(0)):
        chosen = [samples[index] for index in group]
        tokens = sum(len(sample.tokens) for sample in chosen)
        used += tokens * target.token_bytes()
        if used > most_bytes or not in_time():
            break
        done += target.features(chosen)
        on_batch(tokens)
    return done


def batches(lengths: Sequence[int], batch_tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """Indices in groups of like length, at most `batch_tokens` with padding (one longer than that goes alone)."""
    # The jitter makes other neighbours in each pass.
    order = sorted(range(len(lengths)), key=lambda index: lengths[index] * (1 + 0.1 * rng.random()))
    groups: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if not groups or longest * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
            longest = lengths[index]
        groups[-1].append(index)
    rng.shuffle(groups)
    yield from groups


def collate(features: Sequence[Features]) -> Batch:
    """Pad to the longest."""
    from torch.nn.utils.rnn import pad_sequence

    tokens = pad_sequence([each.tokens for each in features], batch_first=True)
    counts = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, each in enumerate(features):
        counts[row, each.start : len(each.tokens) - 1] = True
    return Batch(
        tokens=tokens,
        aux=pad_sequence([each.aux for each in features], batch_first=True),
        last=pad_sequence([each.last for each in features], batch_first=True),
        log_norm=pad_sequence([each.log_norm for each in features], batch_first=True),
        counts=counts,
        divisor=torch.tensor([each.divisor for each in features])[:, None].expand(tokens.shape),
    )


def _divisor(temperature: float) -> float:
    return temperature or 1.0


def channel_scale(features: Sequence[Features]) -> Tensor:
    """[features] root mean square of each channel over responses; activations of a target reach tens of thousands."""
    squares = torch.stack([each.aux[each.start :].float().square().mean(0) for each in features])
    return squares.mean(0).sqrt().clamp_min(1e-3)
