"""`results.json`: every run of every arm, and the figures derived from them.

The runs are the record; medians and ratios are recomputed from them whenever they change or are read.
Arms are compared in pairs by repeat number, since what disturbs a machine disturbs runs close in time alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollout_spec.config import ConfigError
from rollout_spec.files import write_json

SCHEMA = "rollout-spec/bench/1"

# Runs on another machine or another engine cannot be paired with those in the file.
SAME_ON_RESUME = ("config_fingerprint", "versions.vllm", "versions.torch", "device.cpu", "device.gpus")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LiveBatch(_Record):
    """Engine steps with `lo` to `hi` live sequences, both inclusive."""

    lo: int
    hi: int
    seconds: float
    output_tokens: int


class Timeline(_Record):
    """One entry an engine step: when it ended, the sequences live during it, the K it verified."""

    t_s: list[float] = Field(default_factory=list)
    live: list[int] = Field(default_factory=list)
    k: list[int] = Field(default_factory=list)

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        if not len(self.t_s) == len(self.live) == len(self.k):
            raise ValueError(f"timeline lists differ: {len(self.t_s)} t_s, {len(self.live)} live, {len(self.k)} k")
        return self


class Run(_Record):
    """One rollout under one arm. A draft is one sequence in one step that verified at least one draft token."""

    repeat: int = Field(ge=0)
    """From 0; runs of two arms with the same number are a pair."""
    started_at: str
    makespan_s: float = Field(gt=0)
    output_tokens: int = Field(ge=0)
    steps: int = Field(ge=0)
    draft_tokens: int = Field(ge=0)
    accepted_tokens: int = Field(ge=0)
    acceptance_length: float | None = None
    """1 + accepted tokens / drafts, as vLLM defines it; None without drafts."""
    acceptance_per_position: list[float | None] = Field(default_factory=list)
    """[j]: accepted at position j+1 / drafts that had a token there; None where there was none."""
    k_histogram: dict[int, int] = Field(default_factory=dict)
    """Engine steps by the K they verified."""
    by_live_batch: list[LiveBatch] = Field(default_factory=list)
    timeline: Timeline = Timeline()


class Spread(_Record):
    median: float
    min: float
    max: float


class Ratio(_Record):
    """Of paired runs: median, smallest and largest."""

    median: float
    low: float
    high: float


class Arm(_Record):
    name: str
    policy: str
    drafter: str | None = None
    runs: list[Run] = Field(default_factory=list)
    makespan_s: Spread | None = None
    speedup_over_off: Ratio | None = None

    def run(self, repeat: int) -> Run | None:
        return next((run for run in self.runs if run.repeat == repeat), None)


class BatchSpeedup(NamedTuple):
    lo: int
    hi: int
    speedup: float


def live_batch_bounds(live: int) -> tuple[int, int]:
    """The bucket of a number of live sequences: 1, 2, 3-4, 5-8, 9-16, ..."""
    if live < 1:
        raise ValueError(f"a step has at least one live sequence, not {live}")
    hi = 1 << (live - 1).bit_length()
    return hi // 2 + 1, hi


def paired(arm: Arm, base: Arm) -> list[tuple[Run, Run]]:
    """Runs of both arms that share a repeat number, in its order."""
    others = {run.repeat: run for run in base.runs}
    return [(run, others[run.repeat]) for run in arm.runs if run.repeat in others]


def speedup(arm: Arm, base: Arm) -> Ratio | None:
    """Makespan of `base` / makespan of `arm`, pair by pair; None without a pair."""
    ratios = [other.makespan_s / run.makespan_s for run, other in paired(arm, base)]
    return Ratio(median=median(ratios), low=min(ratios), high=max(ratios)) if ratios else None


def speedup_by_live_batch(arm: Arm, off: Arm) -> list[BatchSpeedup]:
    """Ratio of tokens per second in each bucket, pooled over pairs; buckets that both arms spent time in."""
    pairs = paired(arm, off)
    ours, theirs = _pool(run for run, _ in pairs), _pool(run for _, run in pairs)
    return [
        BatchSpeedup(*bounds, ours[bounds] / theirs[bounds])
        for bounds in sorted(ours.keys() & theirs.keys())
        if theirs[bounds] > 0
    ]


def summarise(arm: Arm, off: Arm | None) -> Arm:
    """The arm with its runs in order and the figures derived from them."""
    runs = sorted(arm.runs, key=lambda run: run.repeat)
    times = [run.makespan_s for run in runs]
    makespan = Spread(median=median(times), min=min(times), max=max(times)) if times else None
    ratio = None if off is None else speedup(arm, off)
    return arm.model_copy(update={"runs": runs, "makespan_s": makespan, "speedup_over_off": ratio})


class Results:
    """The content of one `results.json`; save it after each run, so that an interruption costs one run.

    The report's text uses these keys of `workload` if they are there: model, name, num_prompts, n, max_num_seqs,
    temperature. `provenance` is that of `provenance.collect`, with
    `config_fingerprint` added and, for the report's appendix, `config`.
    """

    def __init__(self, provenance: Mapping[str, Any], workload: Mapping[str, Any], arms: Iterable[Arm] = ()) -> None:
        self.provenance = dict(provenance)
        self.workload = dict(workload)
        self.arms = list(arms)
        self._summarise()

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Raises ConfigError on a file that is unreadable, damaged or of another schema."""
        try:
            tree = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON ({error}); move it away to start afresh") from error
        found = tree.get("schema") if isinstance(tree, dict) else None
        if found != SCHEMA:
            raise ConfigError(f"{path}: has schema {found!r}, this version reads {SCHEMA!r}; use another directory")
        try:
            return cls(tree["provenance"], tree["workload"], [Arm.model_validate(arm) for arm in tree["arms"]])
        except (KeyError, TypeError, ValidationError) as error:
            raise ConfigError(f"{path}: not a complete results file: {error}") from error

    @classmethod
    def resume(cls, path: str | Path, provenance: Mapping[str, Any], workload: Mapping[str, Any]) -> Self:
        """Those at `path` if there are any, else new; raises ConfigError if they came from another set-up."""
        if not Path(path).exists():
            return cls(provenance, workload)
        results = cls.load(path)
        for key in SAME_ON_RESUME:
            before, now = _at(results.provenance, key), _at(provenance, key)
            if before != now:
                what = "another configuration" if key == "config_fingerprint" else f"other {key}"
                raise ConfigError(
                    f"{path}: holds results of {what} ({before}, now {now}); "
                    "give another output directory, or move the file away to start afresh"
                )
        results.provenance.setdefault("resumed_at", []).append(provenance.get("time"))
        return results

    def arm(self, name: str) -> Arm:
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise KeyError(f"no arm {name!r}; there are {[arm.name for arm in self.arms]}")

    @property
    def off(self) -> Arm | None:
        return next((arm for arm in self.arms if arm.policy == "off"), None)

    def add_arm(self, name: str, policy: str, drafter: str | None = None) -> None:
        """Declare an arm; one that is already there must be the same."""
        new = Arm(name=name, policy=policy, drafter=drafter)
        known = next((arm for arm in self.arms if arm.name == name), None)
        if known is None:
            self.arms.append(new)
        elif (known.policy, known.drafter) != (policy, drafter):
            raise ValueError(f"arm {name!r} is already {known.policy} with {known.drafter}, not {policy}, {drafter}")

    def add_run(self, arm_name: str, run: Run) -> None:
        arm = self.arm(arm_name)
        if arm.run(run.repeat):
            raise ValueError(f"arm {arm_name!r} already has repeat {run.repeat}")
        self.arms[self.arms.index(arm)] = arm.model_copy(update={"runs": [*arm.runs, run]})
        self._summarise()

    def missing(self, arm_name: str, repeats: int) -> list[int]:
        """Repeat numbers below `repeats` that the arm has no run for; all of them for an unknown arm."""
        done = {run.repeat for arm in self.arms if arm.name == arm_name for run in arm.runs}
        return [repeat for repeat in range(repeats) if repeat not in done]

    def to_dict(self) -> dict[str, Any]:
        arms = [arm.model_dump(mode="json") for arm in self.arms]
        return {"schema": SCHEMA, "provenance": self.provenance, "workload": self.workload, "arms": arms}

    def save(self, path: str | Path) -> None:
        """Atomic: a reader, or a crash, finds the old file or the new one, whole."""
        write_json(path, self.to_dict())

    def _summarise(self) -> None:
        self.arms = [summarise(arm, self.off) for arm in self.arms]


def _pool(runs: Iterable[Run]) -> dict[tuple[int, int], float]:
    """Tokens per second of each bucket."""
    totals: dict[tuple[int, int], tuple[float, int]] = {}
    for run in runs:
        for bucket in run.by_live_batch:
            seconds, tokens = totals.get((bucket.lo, bucket.hi), (0.0, 0))
            totals[bucket.lo, bucket.hi] = (seconds + bucket.seconds, tokens + bucket.output_tokens)
    return {bounds: tokens / seconds for bounds, (seconds, tokens) in totals.items() if seconds > 0}


def _at(tree: Mapping[str, Any], key: str) -> Any:
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
