"""The profile: what was measured on which engine, and what follows from it. One JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from rollout_spec.config import ConfigError
from rollout_spec.control.step_times import StepTimes
from rollout_spec.files import write_json
from rollout_spec.profile.acceptance import Acceptance
from rollout_spec.profile.cell import Cell

SCHEMA = "rollout-spec/profile/1"
# Step times of other requests differ by about this from those measured, to which comes what rounds differed by. (Of
# another day by more, but all alike: the controller takes the level from its first steps.) More would be no profile.
SPREAD, SPREAD_MOST = 0.06, 0.3


@dataclass(frozen=True, slots=True)
class Profile:
    provenance: dict[str, Any]
    engine: dict[str, str]
    k_max: int
    max_num_seqs: int
    cells: list[Cell]
    off: dict[int, float]
    """Seconds of a step without a drafter, by batch."""
    prefill_token_seconds: float
    acceptance: Acceptance
    config: dict[str, Any] = field(default_factory=dict)
    rollout_level: float | None = None
    """Mean step of a held-out rollout over what the cells say of it (`profile.level`); None: not measured."""
    off_level: float | None = None
    """The same without a drafter."""

    def step_times(self) -> StepTimes:
        """What the controller and the simulator start from."""
        times = as_step_times(self.cells, self.off, self.acceptance)
        return replace(
            times,
            prefill_token_seconds=self.prefill_token_seconds,
            hiccups=self.rollout_level or times.hiccups,
            off_hiccups=self.off_level,
        )

    def table(self) -> list[tuple[int, int, int]]:
        """The K with the most tokens a second for each batch, as vLLM's `num_speculative_tokens_per_batch_size`."""
        times = self.step_times()
        length, drafts = self.acceptance.length(), self.acceptance.drafts()
        context = times.context[0]
        best = [best_k(times, length, drafts, batch, context) for batch in range(1, self.max_num_seqs + 1)]
        starts = [1, *(i + 1 for i, (a, b) in enumerate(pairwise(best), start=1) if a != b), self.max_num_seqs + 1]
        return [(lo, hi - 1, best[lo - 1]) for lo, hi in pairwise(starts)]

    def draft_len_schedule(self) -> dict[int, int]:
        """The same as TensorRT-LLM's `draft_len_schedule`: the largest batch for each K; beyond the last, none.

        It takes one K a batch size, K = 0 in the middle included.
        """
        rows = self.table()
        while rows and rows[-1][2] == 0:
            rows.pop()
        return {hi: k for _, hi, k in rows}

    def to_mapping(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "provenance": self.provenance,
            "engine": self.engine,
            "k_max": self.k_max,
            "max_num_seqs": self.max_num_seqs,
            "cells": [cell.to_mapping() for cell in self.cells],
            "off": {str(batch): seconds for batch, seconds in self.off.items()},
            "prefill_token_seconds": self.prefill_token_seconds,
            "acceptance": asdict(self.acceptance),
            "rollout_level": self.rollout_level,
            "off_level": self.off_level,
            "step_times": self.step_times().to_mapping(),
            "exports": {
                "num_speculative_tokens_per_batch_size": self.table(),
                "draft_len_schedule": self.draft_len_schedule(),
            },
            "config": self.config,
        }

    def save(self, path: Path) -> None:
        """Atomic."""
        write_json(path, self.to_mapping())

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Raises ConfigError on a file that is unreadable, damaged or of another schema."""
        try:
            tree = json.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"profile {path}: cannot be read ({error.strerror or error})") from error
        except ValueError as error:
            raise ConfigError(f"profile {path}: not valid JSON ({error}); measure it again") from error
        found = tree.get("schema") if isinstance(tree, dict) else None
        if found != SCHEMA:
            raise ConfigError(f"profile {path}: has schema {found!r}, this version reads {SCHEMA!r}; measure it again")
        try:
            return cls(
                provenance=tree["provenance"],
                engine=tree["engine"],
                k_max=tree["k_max"],
                max_num_seqs=tree["max_num_seqs"],
                cells=[Cell(**cell) for cell in tree["cells"]],
                off={int(batch): seconds for batch, seconds in tree["off"].items()},
                prefill_token_seconds=tree["prefill_token_seconds"],
                acceptance=acceptance_of(tree["acceptance"]),
                config=tree["config"],
                rollout_level=tree.get("rollout_level"),
                off_level=tree.get("off_level"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"profile {path}: incomplete ({error!r}); measure it again") from error


def acceptance_of(tree: dict[str, Any]) -> Acceptance:
    """From plain JSON values, as `dataclasses.asdict` gives them; raises pydantic's ValidationError."""
    return TypeAdapter(Acceptance).validate_python(tree)


def best_k(times: StepTimes, length: Sequence[float], drafts: Sequence[float], batch: float, context: float) -> int:
    """The K with the most expected tokens a second; the smallest of equals."""
    seconds = times.expected(batch, drafts, context)
    return int(np.argmax([tokens / time for tokens, time in zip(length, seconds, strict=True)]))


def as_step_times(cells: Sequence[Cell], off: dict[int, float], acceptance: Acceptance) -> StepTimes:
    """The measured cells as a full grid; raises ValueError without a K = 0 cell at some batch.

    The shortest context of each batch is the grid's first; what a token of context costs was measured at some batches
    and is interpolated between them. A K that too few drafts were found for takes the line through its neighbours, or
    goes on by the last slope; a batch that has no other K than 0 is left out, unless none has.
    """
    near, far = by_context(cells)
    ks = sorted({k for _, k in near})
    batches = sorted({b for b, k in near if k}) or sorted({b for b, _ in near})
    slopes = {k: _slopes(batches, k, near, far) for k in ks}
    contexts = [min(near[b, 0].context for b in batches)] + ([max(c.context for c in far.values())] if far else [])
    seconds: list[tuple[tuple[float, ...], ...]] = []
    for index, batch in enumerate(batches):
        known = [near[batch, k] for k in ks if (batch, k) in near]
        one = StepTimes((batch,), tuple(c.k for c in known), (tuple((c.seconds,) for c in known),))
        times = one.by_k(batch, ks[-1])
        plane = []
        for k in ks:
            at = near.get((batch, k), near[batch, 0]).context
            slope = slopes[k][index] * batch
            plane.append(tuple(max(times[k] + slope * (c - at), 0.1 * times[k]) for c in contexts))
        seconds.append(tuple(plane))
    shares = [share for cell in near.values() if (share := _draft_share(cell)) is not None]
    return StepTimes(
        batch=tuple(batches),
        k=tuple(ks),
        seconds=tuple(seconds),
        context=tuple(round(c) for c in contexts),
        draft_share=float(np.clip(np.median(shares), 0.0, 1.0)) if shares else 0.1,
        off_seconds=tuple(off[b] for b in batches) if all(b in off for b in batches) else (),
        spread=spread(near.values()),
        hiccups=_hiccups(cells),
        acceptance=acceptance.accepted,
        drafted=acceptance.drafted,
        by_position=acceptance.by_position,
    )


def spread(cells: Iterable[Cell]) -> float:
    """Relative deviation to expect of the cells' times."""
    errors = [cell.error for cell in cells]
    return min(math.hypot(SPREAD, float(np.median(errors)) if errors else 0.0), SPREAD_MOST)


def _hiccups(cells: Sequence[Cell]) -> float:
    known = [cell for cell in cells if cell.mean_seconds is not None]
    return sum(c.mean_seconds or 0.0 for c in known) / sum(c.seconds for c in known) if known else 1.0


def by_context(cells: Sequence[Cell]) -> tuple[dict[tuple[int, int], Cell], dict[tuple[int, int], Cell]]:
    """Cells by (batch, K): those at the shortest context of their batch, and those at a far longer one."""
    shortest = {cell.batch: cell.context for cell in sorted(cells, key=lambda c: -c.context) if cell.k == 0}
    near: dict[tuple[int, int], Cell] = {}
    far: dict[tuple[int, int], Cell] = {}
    for cell in cells:
        # Within a round the context of a batch grows by tens of tokens.
        (near if cell.context < 1.5 * shortest[cell.batch] + 64 else far)[cell.batch, cell.k] = cell
    return near, far


def _draft_share(cell: Cell) -> float | None:
    """Drafting over drafting and verifying; None where noise hides it."""
    draft, verify = cell.draft_seconds, cell.verify_seconds
    if draft is None or verify is None or draft < 0 or verify < 0 or draft + verify <= 0:
        return None
    return draft / (draft + verify)


def _slopes(batches: list[int], k: int, near: dict[Any, Cell], far: dict[Any, Cell]) -> list[float]:
    """Seconds a token of context for each batch, at least 0; [len(batches)]."""
    at = [b for b in batches if (b, k) in near and (b, k) in far]
    found = []
    for b in at:
        low, high = near[b, k], far[b, k]
        found.append(max(high.seconds - low.seconds, 0.0) / (b * (high.context - low.context)))
    return np.interp(np.log(batches), np.log(at), found).tolist() if at else [0.0] * len(batches)
