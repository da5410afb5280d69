"""An arm's engine in a process of its own. It starts once; between its runs it idles while others are measured."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.bench.arms import ArmSpec
from rollout_spec.bench.results import LiveBatch, Run, Timeline, live_batch_bounds
from rollout_spec.config import Config
from rollout_spec.workload import Group

if TYPE_CHECKING:
    from rollout_spec.engine.step_log import Step, StepLog
    from rollout_spec.rollout.worker import RolloutWorker


class EngineFailed(RuntimeError):  # noqa: N818 - an event, as a caller reads it
    """The engine process died or raised; the message names its log."""


class EngineProcess:
    """The parent's handle. Not thread-safe."""

    def __init__(self, config: Config, arm: ArmSpec, log: Path, trace: Path | None = None) -> None:
        """Start the process; `wait_ready` says when the engine is up. Its output goes to the file `log`.

        `trace`: a file for the steps of an engine that runs our scheduler (see `engine.step_trace`).
        """
        self.arm = arm
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        # vLLM and OpenMP do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config, arm, str(log), trace), daemon=True)
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        self._receive("ready", None)

    def warm_up(self, groups: Sequence[Group]) -> None:
        self._send("warm_up", groups)
        self._receive("done", None)

    def run(self, groups: Sequence[Group], repeat: int, on_finished: Callable[[int], object]) -> Run:
        """Generate the workload; `on_finished` gets the number of sequences finished since its last call."""
        self._send("run", groups, repeat)
        run = self._receive("run", on_finished)
        assert isinstance(run, Run)
        return run

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(worker, step log, *arguments)` in the process; a function of a module, and plain values."""
        self._send("call", function, arguments)
        return self._receive("result", None)

    def close(self) -> None:
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._connection.send(("close",))
            self._process.join(20)
            self._process.kill()
        self._process.join()

    def _send(self, *message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:  # it died while it idled
            raise self._ended() from error

    def _receive(self, wanted: str, on_finished: Callable[[int], object] | None) -> Any:
        while True:
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError) as error:
                raise self._ended() from error
            if kind == wanted:
                return value
            if kind == "error":
                raise EngineFailed(f"the engine of arm {self.arm.name!r} failed: {value}; see {self._log}")
            if kind == "finished" and on_finished is not None:
                on_finished(value)

    def _ended(self) -> EngineFailed:
        self._process.join(5)
        return EngineFailed(
            f"the engine of arm {self.arm.name!r} ended with exit code {self._process.exitcode}; see {self._log}"
        )


def _serve(connection: Connection, config: Config, arm: ArmSpec, log: str, trace: Path | None) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    try:
        worker, steps = _start(config, arm, trace)
        connection.send(("ready", None))
        while True:
            command, *arguments = connection.recv()
            if command == "close":
                worker.close()
                return
            if command == "warm_up":
                generate(worker, arguments[0])
                worker.forget_drafts()
                connection.send(("done", None))
            elif command == "call":
                function, values = arguments
                connection.send(("result", function(worker, steps, *values)))
            else:
                groups, repeat = arguments
                connection.send(("run", _measure(worker, steps, groups, repeat, connection)))
    except Exception as error:  # the parent must hear of it, whatever it is
        traceback.print_exc()
        connection.send(("error", f"{type(error).__name__}: {error}"))


def _start(config: Config, arm: ArmSpec, trace: Path | None) -> tuple[RolloutWorker, StepLog]:
    from rollout_spec.engine.control_loop import SETTINGS_KEY
    from rollout_spec.engine.launch import engine_arguments
    from rollout_spec.engine.step_log import StepLog
    from rollout_spec.rollout.worker import RolloutWorker

    steps = StepLog()
    arguments = engine_arguments(config, drafter=arm.drafter, policy=arm.policy, vllm_table=arm.vllm_table)
    if trace is not None:
        arguments["additional_config"][SETTINGS_KEY]["trace_file"] = str(trace)
    return RolloutWorker(config, arguments=arguments, stat_loggers=[steps.factory]), steps


def generate(worker: RolloutWorker, groups: Sequence[Group], connection: Connection | None = None) -> int:
    """Run all samples to their end; returns their number. RuntimeError if any failed."""
    sampling = worker.config.sampling.model_copy(update={"max_tokens": worker.config.workload.max_tokens})
    ids: list[str] = []
    for group in groups:
        lengths = None if group.output_tokens is None else [group.output_tokens]
        ids += worker.submit([group.prompt], group.n, sampling, lengths)
    unfinished = len(ids)
    while worker.num_unfinished:
        worker.step()
        if connection is not None and worker.num_unfinished < unfinished:
            connection.send(("finished", unfinished - worker.num_unfinished))
            unfinished = worker.num_unfinished
    rollouts = [rollout for request_id in ids if (rollout := worker.take(request_id)) is not None]
    errors = [rollout.error for rollout in rollouts if rollout.finish_reason == "error"]
    errors += ["vLLM lost it"] * (len(ids) - len(rollouts))
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(ids)} sequences failed, the first with: {errors[0]}")
    return len(ids)


def _measure(worker: RolloutWorker, log: StepLog, groups: Sequence[Group], repeat: int, connection: Connection) -> Run:
    # Responses of another repeat are no history that a user of this prompt would have.
    worker.forget_drafts()
    log.take()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    started = time.perf_counter()
    count = generate(worker, groups, connection)
    makespan = time.perf_counter() - started
    if worker.metrics().get("rollout_spec/controller_failed"):
        raise RuntimeError("the controller failed and speculation stayed off")
    return as_run(log.take(), count, started, makespan, repeat, started_at)


def as_run(steps: Sequence[Step], count: int, started: float, makespan: float, repeat: int, started_at: str) -> Run:
    """The record of a run from its steps. Times are perf_counter seconds; `count` sequences were submitted."""
    buckets: dict[tuple[int, int], tuple[float, int]] = {}
    times: list[float] = []
    lives: list[int] = []
    before, live = started, count
    for step in steps:
        if live > 0:
            seconds, tokens = buckets.get(live_batch_bounds(live), (0.0, 0))
            buckets[live_batch_bounds(live)] = (seconds + step.ended - before, tokens + step.output_tokens)
        times.append(round(step.ended - started, 4))
        lives.append(live)
        before, live = step.ended, step.remaining
    width = max((len(step.drafted) for step in steps), default=0)
    drafted, accepted = [0] * width, [0] * width
    for step in steps:
        for position, number in enumerate(step.drafted):
            drafted[position] += number
            accepted[position] += step.accepted[position]
    drafts = sum(step.drafts for step in steps)
    return Run(
        repeat=repeat,
        started_at=started_at,
        makespan_s=makespan,
        output_tokens=sum(step.output_tokens for step in steps),
        steps=len(steps),
        draft_tokens=sum(drafted),
        accepted_tokens=sum(accepted),
        acceptance_length=1 + sum(accepted) / drafts if drafts else None,
        acceptance_per_position=[a / d if d else None for a, d in zip(accepted, drafted, strict=True)],
        k_histogram=dict(sorted(Counter(step.k for step in steps).items())),
        by_live_batch=[
            LiveBatch(lo=lo, hi=hi, seconds=seconds, output_tokens=tokens)
            for (lo, hi), (seconds, tokens) in sorted(buckets.items())
        ],
        timeline=Timeline(t_s=times, live=lives, k=[step.k for step in steps]),
    )
