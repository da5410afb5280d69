"""One draft refresh at a time, in a process of its own; asked how it stands, it never waits and never raises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_spec.config import DraftConfig, RefreshConfig
from rollout_spec.draft.refresh_job import RESULT, RefreshJob
from rollout_spec.draft.replay import Kept
from rollout_spec.draft.samples import append_sample

# Threads that spin would take from the engine what `nice` leaves it.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}
PREFIX = "refresh-"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a refresh that has ended. `head`: the folder of the new head; None where there is none, or no better one."""

    head: Path | None
    problem: str
    """Why there is no head."""
    seconds: float
    cost: float
    """Seconds in which it would have kept all cores of the engine busy; where some were idle it cost less."""
    policy_version: int
    before: float | None = None
    after: float | None = None
    """Predicted acceptance lengths of the old head and the new on held-out responses."""


class Refresher:
    """Heads and logs are in `folder`, by number of the refresh; older ones than the head in use are removed."""

    def __init__(self, folder: Path, options: RefreshConfig, draft: DraftConfig) -> None:
        self.folder, self._options = folder, options
        rates = {name: getattr(draft, name) * options.rate_share for name in ("rate", "matrix_rate")}
        # A head that is trained on has no first share with one draft step.
        self._draft = draft.model_copy(update={**rates, "single_share": 0.0})
        self._process: subprocess.Popen[bytes] | None = None
        self._job: RefreshJob | None = None
        self._began = 0.0
        self._cores = process_cores()

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self, target: Path, head: Path, samples: Sequence[Kept], k: int, policy_version: int) -> None:
        """Begin. target, head: folders of the policy's weights and of the head to go on from. Not while one runs."""
        assert self._process is None
        number = 1 + max((int(path.name.removeprefix(PREFIX)) for path in self.folder.glob(PREFIX + "*")), default=0)
        work = self.folder / f"{PREFIX}{number}"
        for old in self.folder.glob(PREFIX + "*"):
            if old not in head.parents:
                shutil.rmtree(old, ignore_errors=True)
        work.mkdir(parents=True)
        with (work / "samples.jsonl").open("w", encoding="utf-8") as file:
            for kept in samples:
                append_sample(file, kept.sample)
        self._job = RefreshJob(
            target=str(target),
            head=str(head),
            samples=str(work / "samples.jsonl"),
            out=str(work / "head"),
            k=k,
            policy_version=policy_version,
            seconds=self._options.seconds,
            threads=self._options.threads,
            nice=self._options.nice,
            cores=tuple(sorted(self._cores)),
            draft=self._draft.model_dump(mode="json"),
        )
        self._job.write(work / "job.json")
        self._began = time.monotonic()
        with (work / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rollout_spec.draft.refresh_job", str(work / "job.json")],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(self._options.threads)},
            )

    def poll(self) -> Outcome | None:
        """The outcome, once; None while it runs, or if none does. Ends one that is over its time."""
        if self._process is None or self._job is None:
            return None
        seconds = time.monotonic() - self._began
        code = self._process.poll()
        if code is None and (self._work / RESULT).exists():
            code = 0  # it is written last, and a process that is nice to busy others takes seconds to leave
        if code is None and seconds <= self._options.timeout:
            return None
        if code is None:
            self.close()
            return self._failed(seconds, f"over its time of {self._options.timeout:g} s (refresh.timeout)")
        self.close()
        if code:
            return self._failed(seconds, f"{_said(code)}: {self._last_words()}")
        try:
            result = json.loads((self._work / RESULT).read_text("utf-8"))
        except (OSError, ValueError) as error:
            return self._failed(seconds, f"its result cannot be read: {error}")
        return self._judge(result, seconds)

    def close(self) -> None:
        """End the process if one runs. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process = None

    @property
    def _work(self) -> Path:
        assert self._job is not None
        return Path(self._job.out).parent

    def _judge(self, result: dict[str, Any], seconds: float) -> Outcome:
        assert self._job is not None
        before, after = float(result["before"]), float(result["after"])
        better = after > before
        return Outcome(
            head=Path(self._job.out) if better else None,
            problem="" if better else f"no better than the old head: acceptance length {after:.3f} after {before:.3f}",
            seconds=seconds,
            cost=float(result["cpu_seconds"]) / len(self._cores),
            policy_version=self._job.policy_version,
            before=before,
            after=after,
        )

    def _failed(self, seconds: float, problem: str) -> Outcome:
        assert self._job is not None
        cost = seconds * min(self._options.threads / len(self._cores), 1.0)
        return Outcome(None, problem, seconds, cost, self._job.policy_version)

    def _last_words(self) -> str:
        lines = (self._work / "log.txt").read_text("utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def process_cores() -> frozenset[int]:
    """Of all threads of this process: one that vLLM has bound to a core must not bind its children there too."""
    tasks = Path("/proc/self/task")
    found: set[int] = set(os.sched_getaffinity(0))
    for task in tasks.iterdir() if tasks.is_dir() else ():
        try:
            found |= os.sched_getaffinity(int(task.name))
        except ProcessLookupError:  # a thread that has ended meanwhile
            continue
    return frozenset(found)


def _said(code: int) -> str:
    return f"the process was ended by signal {-code}" if code < 0 else f"the process ended with {code}"
