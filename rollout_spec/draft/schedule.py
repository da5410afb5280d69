"""Where a training run stands on disk: which configuration it belongs to, and the seconds that each phase took."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout_spec.config import ConfigError
from rollout_spec.files import write_json

FILE = "progress.json"
PHASES = ("generate", "features", "train", "evaluate")
# Of the budget, kept for judging the head at the end.
RESERVE = 0.04


class Clock:
    """Seconds used by phase over all sessions of a run in `folder`. A phase is kept as it goes, by `keep`."""

    def __init__(self, folder: Path, fingerprint: str, minutes: float) -> None:
        """Raises ConfigError where the folder holds a run of another configuration."""
        self._file = folder / FILE
        self._fingerprint = fingerprint
        self.budget = 60 * minutes
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.finished: list[str] = []
        self._running: tuple[str, float] | None = None
        if self._file.exists():
            try:
                found: dict[str, Any] = json.loads(self._file.read_text("utf-8"))
            except ValueError as error:
                raise ConfigError(f"--out: {self._file} is damaged ({error}); delete the folder {folder}") from error
            if found["fingerprint"] != fingerprint:
                raise ConfigError(
                    f"--out: {folder} holds a training run of another configuration; choose another --out, or delete it"
                )
            self.seconds |= found["seconds"]
            self.finished = found["finished"]

    @property
    def left(self) -> float:
        """Seconds of the budget, the reserve for the evaluation taken off; never negative."""
        return max(0.0, self.budget * (1 - RESERVE) - self.used)

    @property
    def used(self) -> float:
        running = time.monotonic() - self._running[1] if self._running else 0.0
        return sum(self.seconds.values()) + running

    @contextmanager
    def phase(self, name: str, finishes: bool = True) -> Iterator[None]:
        """Times the block; kept also where it is interrupted."""
        self._running = (name, time.monotonic())
        try:
            yield
            if finishes:
                self.finished.append(name)
        finally:
            self.keep()
            self._running = None

    def keep(self) -> None:
        """Write down what the running phase has taken so far."""
        if self._running:
            name, since = self._running
            now = time.monotonic()
            self.seconds[name] += now - since
            self._running = (name, now)
        tree = {"fingerprint": self._fingerprint, "seconds": self.seconds, "finished": self.finished}
        write_json(self._file, tree)
