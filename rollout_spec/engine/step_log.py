"""What each engine step did, from vLLM's own statistics: the same for every scheduler, ours or stock."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from vllm.v1.metrics.loggers import StatLoggerBase


class Step(NamedTuple):
    """One engine step. Positions count from the first draft token."""

    ended: float  # seconds, perf_counter
    remaining: int  # sequences running or waiting after it
    output_tokens: int
    drafts: int  # sequences that had draft tokens verified
    drafted: tuple[int, ...]  # sequences with a draft at each position
    accepted: tuple[int, ...]  # sequences with the draft at each position accepted

    @property
    def k(self) -> int:
        """The longest draft verified in the step: K as the engine saw it."""
        return sum(1 for count in self.drafted if count)


class StepLog:
    """Collects steps; give `factory` to the engine as a stat logger."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        log = self

        class Logger(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                if scheduler_stats is not None and iteration_stats is not None:
                    log.steps.append(_step(scheduler_stats, iteration_stats))

            def log_engine_initialized(self) -> None:
                pass

        self.factory = Logger

    def take(self) -> list[Step]:
        """The steps since the last call."""
        steps, self.steps = self.steps, []
        return steps


def _step(scheduler: Any, iteration: Any) -> Step:
    spec = scheduler.spec_decoding_stats
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    if spec is not None:
        accepted = tuple(spec.num_accepted_tokens_per_pos)
        # Before vLLM 0.31 only totals are counted; then each draft is taken as of mean length.
        drafted = tuple(
            getattr(spec, "num_draft_tokens_per_pos", None)
            or [spec.num_drafts] * round(spec.num_draft_tokens / spec.num_drafts)
        )
    return Step(
        ended=time.perf_counter(),
        remaining=scheduler.num_running_reqs + scheduler.num_waiting_reqs,
        output_tokens=iteration.num_generation_tokens,
        drafts=0 if spec is None else spec.num_drafts,
        drafted=drafted,
        accepted=accepted,
    )
