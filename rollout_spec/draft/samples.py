"""Responses of the policy, kept as they come: one JSON line each, so that an interrupted run loses at most one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Sample:
    """One response, as token ids, sampled at `temperature`. `ended`: it stopped by itself."""

    prompt_id: str
    prompt: list[int]
    response: list[int]
    temperature: float
    ended: bool

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.response


def append_sample(file: TextIO, sample: Sample) -> None:
    """At once, for who reads after a crash."""
    file.write(json.dumps(asdict(sample)) + "\n")
    file.flush()


def read_samples(path: Path) -> list[Sample]:
    """Those that are whole; none if there is no file."""
    if not path.exists():
        return []
    samples = []
    for line in path.read_text("utf-8").splitlines():
        try:
            samples.append(Sample(**json.loads(line)))
        except (ValueError, TypeError):  # torn by a crash
            continue
    return samples
