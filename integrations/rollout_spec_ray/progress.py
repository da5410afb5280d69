"""How a job goes, in a line now and then, and as metrics of Ray's own exporter."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ray.util.metrics import Gauge

from rollout_spec_ray.pool import Pool
from rollout_spec_ray.work import Work

# Tokens a second are those of so many lines back.
WINDOW = 3
# Fewer than this share of the sequences live, and none waits: the tail.
TAIL = 0.1


class Progress:
    """Speaks every `every` seconds when it is told that time goes by."""

    def __init__(self, total: int, before: int, every: float, say: Callable[[str], object]) -> None:
        """total: sequences asked for; before: of those, done by earlier attempts."""
        self._total, self._before, self._every, self._say = total, before, every, say
        self._began = self._last = time.monotonic()
        self._seen = deque([(self._began, 0.0)], maxlen=WINDOW)
        names = ("finished_sequences", "live_sequences", "waiting_sequences", "tokens_per_second", "k", "engines")
        self._gauges = {name: Gauge(f"rollout_spec_{name}", f"Of the rollout job: {name}") for name in names}

    def look(self, work: Work, pool: Pool) -> None:
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        then, tokens = self._seen[0]
        rate = (pool.generated - tokens) / (now - then)
        self._seen.append((now, pool.generated))
        values = {
            "finished_sequences": self._before + work.finished,
            "live_sequences": work.live,
            "waiting_sequences": work.waiting,
            "tokens_per_second": rate,
            "k": pool.k,
            "engines": pool.up,
        }
        for name, value in values.items():
            if value is not None:
                self._gauges[name].set(value)
        k = "" if pool.k is None else f", K {pool.k:.1f}"
        tail = ", tail" if not work.waiting and work.live < TAIL * self._total else ""
        self._say(
            f"[{now - self._began:6.0f} s] {self._before + work.finished} of {self._total} done, {work.live} live, "
            f"{work.waiting} wait, {pool.up} engines, {rate:.0f} tokens/s{k}{tail}"
        )
