"""Every step of an engine as a JSON line: what a profile is made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from rollout_spec.control.policy import StepResult

FIELDS = (
    "seconds", "decode", "prefill_tokens", "k", "k_next", "drafted", "accepted", "speculated", "context_tokens",
    "model_seconds",
)  # fmt: skip


class StepTrace:
    """Appends steps to a file, each written through at once: about 20 microseconds a step."""

    def __init__(self, path: str | Path) -> None:
        self._file: TextIO = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 - as long as the engine

    def write(self, result: StepResult) -> None:
        self._file.write(json.dumps([getattr(result, name) for name in FIELDS]) + "\n")


def read_steps(path: str | Path, offset: int = 0) -> tuple[list[StepResult], int]:
    """The steps written after byte `offset`, and the offset behind them."""
    with Path(path).open("rb") as file:
        file.seek(offset)
        lines = file.read().split(b"\n")
    whole = lines[:-1]  # the last one is empty, or being written
    steps = [StepResult(**dict(zip(FIELDS, json.loads(line), strict=True))) for line in whole]
    return steps, offset + sum(len(line) + 1 for line in whole)
