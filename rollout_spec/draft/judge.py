"""What a head is worth on prompts that it has not seen: predicted, and measured in vLLM at a fixed K."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollout_spec import provenance
from rollout_spec.config import Config, ConfigError
from rollout_spec.draft.acceptance import judge_samples
from rollout_spec.draft.checkpoint import HELD_OUT, SEEN, SavedHead
from rollout_spec.draft.features import Target
from rollout_spec.draft.loss import Shared
from rollout_spec.draft.prompts import split_prompts
from rollout_spec.draft.samples import Sample, read_samples
from rollout_spec.draft.target import read_target

if TYPE_CHECKING:
    from rollout_spec.rollout.recording import Job, Measured

FORWARD_TOKENS = 4096


def judge(config: Config, folder: Path, saved: SavedHead, ks: Sequence[int]) -> dict[str, Any]:
    """Predictions on the recorded held-out responses; with `ks` also what an engine with each of these K accepts.

    The prediction beside a measurement is made on the responses of that very engine: speculation leaves the law of the
    text alone, and the noise of other samples drops out of the comparison.
    """
    shape = saved.head.shape
    target_folder = read_target(config.model)
    if (
        target_folder.config["hidden_size"] != shape.hidden_size
        or target_folder.config["vocab_size"] != shape.vocab_size
    ):
        raise ConfigError(f"--head {folder}: is not a head for the model {config.model!r}: their sizes differ")
    torch.set_num_threads(config.draft.threads or len(os.sched_getaffinity(0)))
    recorded = read_samples(folder / HELD_OUT)
    jobs = _jobs(config, folder) if ks or not recorded else []
    if not recorded:
        recorded = _record(config, folder, jobs)
    measured = _measure(config, folder, ks, jobs)  # before the target is loaded here: memory
    target = Target(target_folder.folder, shape.aux_layers)
    shared = Shared.of(target.embedding, target.output, saved.ids)
    head = saved.rounded()
    compared = []
    for counts, samples in measured:
        k = counts[0].k
        predicted = judge_samples(head, shared, target, samples, FORWARD_TOKENS, k)
        lengths = {row["temperature"]: row["acceptance_length"] for row in predicted if row["k"] == k}
        compared += [_compared(count, lengths[count.temperature]) for count in counts]
    return {
        "schema": 1,
        "head": str(folder),
        "predicted": judge_samples(head, shared, target, recorded, FORWARD_TOKENS),
        "measured": compared,
        **provenance.collect(),
    }


def _jobs(config: Config, folder: Path) -> list[Job]:
    """The held-out prompts at each temperature, without any that the head's list of training prompts has."""
    from rollout_spec.rollout.recording import Job

    seen = folder / SEEN
    trained = set(seen.read_text("utf-8").split()) if seen.exists() else set()
    prompts = [prompt for prompt in split_prompts(config).held_out if prompt.prompt_id not in trained]
    if not prompts:
        raise ConfigError(f"--head {folder}: was trained on every held-out prompt; set another draft.seed")
    return [Job(p.prompt_id, p.prompt, t) for p in prompts for t in dict.fromkeys(config.draft.temperatures)]


def _record(config: Config, folder: Path, jobs: list[Job]) -> list[Sample]:
    from rollout_spec.rollout.recording import in_process, record

    in_process(record, config, jobs, folder / HELD_OUT, float("inf"), "held-out responses")
    return read_samples(folder / HELD_OUT)


def _measure(
    config: Config, folder: Path, ks: Sequence[int], jobs: list[Job]
) -> list[tuple[list[Measured], list[Sample]]]:
    from rollout_spec.rollout.recording import in_process, measure

    return [in_process(measure, config, folder, k, jobs) for k in ks]


def _compared(measured: Measured, predicted: float) -> dict[str, Any]:
    length = measured.acceptance_length
    return {
        **asdict(measured),
        "acceptance_length": round(length, 4),
        "predicted": predicted,
        "difference": round(predicted / length - 1, 4),
    }
