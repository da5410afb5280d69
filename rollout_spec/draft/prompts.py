"""Which prompts a head is trained on, and which never: the benchmark's, the profiler's and those it is judged by.

A prompt is known by its id, the hash of its question, so that none comes back with other words around it; those of a
file by their words. The ids that a head was trained on are kept with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import NamedTuple

from rollout_spec.config import Config, ConfigError, WorkloadConfig
from rollout_spec.workload import Group, Prompt, build_workload, generate_prompts, read_groups

# Prompts of a benchmark run, and its repeats, that are kept out; a run asks for fewer of both.
BENCH_PROMPTS, BENCH_REPEATS = 256, 32
# The profiler's held-out repeat (`rollout_spec.profile.run.HELD_OUT_REPEAT`).
PROFILE_REPEAT = 2_000_000
# Far from the seeds of the training prompts.
HELD_OUT_SEED = 7_919


class Split(NamedTuple):
    training: list[Group]
    held_out: list[Group]


def split_prompts(config: Config) -> Split:
    """As many as `config.draft` asks for; no question is in both, or in the benchmark's of this configuration.

    Raises ConfigError for a file `draft.prompts` that is bad or has no more prompts than `draft.held_out`.
    """
    options = config.draft
    if options.prompts is not None:
        return _split_file(options.prompts, options.held_out, options.responses, options.seed)
    avoid = benchmark_ids(config)
    held_out = unseen_prompts(options.held_out, HELD_OUT_SEED + options.seed, avoid)
    avoid |= {prompt.id for prompt in held_out}
    training = unseen_prompts(options.responses, options.seed, avoid)
    return Split(*([Group(p.id, p.messages, 1, None) for p in some] for some in (training, held_out)))


def _split_file(path: str, held_out: int, responses: int, seed: int) -> Split:
    """At random, for a file may be in order of difficulty. A prompt that comes twice is taken once."""
    groups = list({repr(group.prompt): group for group in read_prompts(path)[0]}.values())
    if len(groups) <= held_out:
        raise ConfigError(
            f"draft.prompts {path}: has {len(groups)} different prompts, and draft.held_out {held_out} of them are not "
            "trained on; give more prompts or hold fewer out"
        )
    Random(seed).shuffle(groups)
    return Split(groups[held_out:][:responses], groups[:held_out])


def read_prompts(path: str) -> tuple[tuple[Group, ...], str]:
    """Those of the file `draft.prompts`, and its SHA-256. Raises ConfigError for a bad one."""
    return read_groups(Path(path).expanduser(), 1, f"draft.prompts {path}")


def benchmark_ids(config: Config) -> set[str]:
    """Questions of the benchmark and the profiler at the seeds of this configuration, reasoning and copying."""
    ids: set[str] = set()
    runs = [(config.bench.seed, repeat) for repeat in range(BENCH_REPEATS)] + [(config.profile.seed, PROFILE_REPEAT)]
    for name in ("natural", "mixed"):
        load = WorkloadConfig(name=name, num_prompts=BENCH_PROMPTS, n=1)
        for seed, repeat in runs:
            ids |= {group.prompt_id for group in build_workload(load, seed, repeat).groups}
    return ids


def unseen_prompts(count: int, seed: int, avoid: Iterable[str]) -> list[Prompt]:
    """`count` prompts of the benchmark's kind, without those of the ids in `avoid`."""
    forbidden = set(avoid)
    wanted = count
    while True:
        fresh = [prompt for prompt in generate_prompts(wanted, seed) if prompt.id not in forbidden]
        if len(fresh) >= count:
            return fresh[:count]
        wanted += count - len(fresh) + 16
