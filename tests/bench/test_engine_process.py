from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import stand_ins
from synthetic import make_run

from rollout_spec.bench import engine_process
from rollout_spec.bench.arms import parse_arm
from rollout_spec.bench.engine_process import EngineFailed, EngineProcess, as_run, generate
from rollout_spec.config import Config, parse_config
from rollout_spec.engine.step_log import Step
from rollout_spec.rollout.types import Rollout
from rollout_spec.workload import Group

START = 100.0


def step(
    ended: float, remaining: int, tokens: int, drafted: tuple[int, ...] = (), accepted: tuple[int, ...] = ()
) -> Step:
    return Step(START + ended, remaining, tokens, max(drafted, default=0), drafted, accepted)


# Five sequences; positions count from the first draft token.
STEPS = [
    step(0.5, 5, 5),
    step(1.0, 3, 5),  # 5 live
    step(1.2, 3, 4, (3, 2, 0), (2, 1, 0)),  # 3 live, up to K=2
    step(1.5, 1, 6, (3, 3, 3), (3, 1, 0)),  # 3 live, K=3
    step(1.75, 1, 1, (0, 0, 0), (0, 0, 0)),  # 1 live: drafts were asked for and none came
    step(2.0, 0, 2, (1, 0, 0), (1, 0, 0)),
]


def test_a_run_is_the_sum_of_its_steps() -> None:
    run = as_run(STEPS, 5, START, 2.01, 7, "now")
    assert (run.repeat, run.started_at, run.makespan_s, run.steps) == (7, "now", 2.01, 6)
    assert run.output_tokens == 5 + 5 + 4 + 6 + 1 + 2
    assert run.draft_tokens == 5 + 9 + 1
    assert run.accepted_tokens == 3 + 4 + 1
    # 3 + 3 + 1 sequences had a draft verified.
    assert run.acceptance_length == pytest.approx(1 + 8 / 7)
    assert run.acceptance_per_position == [pytest.approx(6 / 7), pytest.approx(2 / 5), pytest.approx(0 / 3)]
    assert run.k_histogram == {0: 3, 1: 1, 2: 1, 3: 1}
    assert list(run.k_histogram) == [0, 1, 2, 3]


def test_time_and_tokens_go_to_the_sequences_that_were_live_during_the_step() -> None:
    run = as_run(STEPS, 5, START, 2.01, 0, "now")
    buckets = {(batch.lo, batch.hi): (batch.seconds, batch.output_tokens) for batch in run.by_live_batch}
    assert buckets == {
        (5, 8): (pytest.approx(1.0), 10),
        (3, 4): (pytest.approx(0.5), 10),
        (1, 1): (pytest.approx(0.5), 3),
    }
    assert [batch.lo for batch in run.by_live_batch] == [1, 3, 5]
    # All of the time up to the last step is somewhere.
    assert sum(batch.seconds for batch in run.by_live_batch) == pytest.approx(2.0)
    assert sum(batch.output_tokens for batch in run.by_live_batch) == run.output_tokens


def test_the_timeline_has_an_entry_for_each_step() -> None:
    timeline = as_run(STEPS, 5, START, 2.01, 0, "now").timeline
    assert timeline.t_s == [0.5, 1.0, 1.2, 1.5, 1.75, 2.0]
    assert timeline.live == [5, 5, 3, 3, 1, 1]
    assert timeline.k == [0, 0, 2, 3, 0, 1]


def test_steps_after_the_last_sequence_are_in_no_bucket() -> None:
    run = as_run([step(1.0, 0, 3), step(1.5, 0, 0)], 3, START, 1.6, 0, "now")
    assert [(batch.lo, batch.hi, batch.seconds) for batch in run.by_live_batch] == [(3, 4, pytest.approx(1.0))]
    assert run.steps == 2


def test_a_run_without_drafts_has_no_acceptance() -> None:
    run = as_run([step(1.0, 1, 2), step(2.0, 0, 2)], 2, START, 2.0, 0, "now")
    assert (run.draft_tokens, run.acceptance_length, run.acceptance_per_position) == (0, None, [])
    assert run.k_histogram == {0: 2}


def test_steps_with_different_numbers_of_positions_add_up() -> None:
    """vLLM sizes its counters by the limit, older versions by what was drafted."""
    steps = [step(1.0, 2, 3, (2,), (1,)), step(2.0, 0, 5, (2, 2, 1), (2, 1, 1))]
    run = as_run(steps, 2, START, 2.0, 0, "now")
    assert run.acceptance_per_position == [3 / 4, 1 / 2, 1.0]
    assert run.k_histogram == {1: 1, 3: 1}


# -- the process


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A real process with another main: an engine takes half a minute and dies when it likes, not when we do."""
    made: list[EngineProcess] = []

    def make(serve: Any) -> EngineProcess:
        monkeypatch.setattr(engine_process, "_serve", serve)
        config = parse_config({})
        made.append(EngineProcess(config, parse_arm("goodput", config), tmp_path / "logs" / "goodput.log"))
        return made[-1]

    yield make
    for process in made:
        process._process.kill()


def test_runs_come_back_and_progress_is_told(start: Any, tmp_path: Path) -> None:
    process = start(stand_ins.answers)
    process.wait_ready()
    process.warm_up([])
    told: list[int] = []
    assert process.run([], 2, told.append) == make_run(lambda live: 0, 2)
    assert told == [3, 1, 1]
    process.close()
    assert process._process.exitcode == 0
    assert (tmp_path / "logs" / "goodput.log").read_text() == "a log"


def test_an_engine_that_raises_is_an_engine_failed_that_names_arm_and_log(start: Any, tmp_path: Path) -> None:
    process = start(stand_ins.answers)
    process.wait_ready()
    with pytest.raises(EngineFailed, match=r"arm 'goodput' failed: ValueError: no memory; see .*goodput\.log"):
        process.run([], stand_ins.BROKEN, print)


def test_a_function_runs_in_the_process_and_its_result_comes_back(start: Any) -> None:
    process = start(stand_ins.answers)
    process.wait_ready()
    assert process.call(divmod, 17, 5) == (3, 2)


def test_a_process_that_dies_at_its_start_is_an_engine_failed(start: Any) -> None:
    process = start(stand_ins.dies_at_start)
    with pytest.raises(EngineFailed, match=r"arm 'goodput' ended with exit code 3; see .*goodput\.log"):
        process.wait_ready()
    process.close()


def test_a_process_that_died_while_it_idled_is_an_engine_failed(start: Any) -> None:
    process = start(stand_ins.answers)
    process.wait_ready()
    os.kill(process._process.pid, signal.SIGKILL)  # what the kernel does when memory is short
    process._process.join()
    with pytest.raises(EngineFailed, match="ended with exit code -9"):
        process.run([], 0, print)
    with pytest.raises(EngineFailed, match="ended with exit code -9"):
        process.warm_up([])
    process.close()


# -- what runs in the process


class Worker:
    """A RolloutWorker's surface without an engine: every sample finishes at the next step."""

    def __init__(self, config: Config, broken: set[int], lost: set[int]) -> None:
        self.config = config
        self.broken = broken
        self.lost = lost
        self.asked: list[tuple[Any, ...]] = []
        self.waiting: list[str] = []
        self.total = 0

    def submit(self, prompts: list[Any], n: int, sampling: Any, output_tokens: Any) -> list[str]:
        self.asked.append((prompts, n, sampling, output_tokens))
        ids = [str(self.total + sample) for sample in range(n)]
        self.total += n
        self.waiting += ids
        return ids

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting)

    def step(self) -> None:
        self.waiting.pop()

    def take(self, request_id: str) -> Rollout | None:
        number = int(request_id)
        if number in self.lost:
            return None
        reason, error = ("error", "too long") if number in self.broken else ("stop", None)
        return Rollout(0, 0, [1], [2], None, reason, 0, None, error)


GROUPS = [Group("a", "one", 2, (5, 6)), Group("b", "two", 1, None)]


def worker(broken: set[int] | None = None, lost: set[int] | None = None) -> Any:
    config = parse_config({"sampling": {"max_tokens": 11, "temperature": 0.5}, "workload": {"max_tokens": 77}})
    return Worker(config, broken or set(), lost or set())


def test_groups_are_submitted_with_their_lengths_or_the_workloads_cap() -> None:
    engine = worker()
    assert generate(engine, GROUPS) == 3
    (_, n, sampling, lengths), (_, _, capped, natural) = engine.asked
    assert (n, lengths, natural) == (2, [(5, 6)], None)
    assert capped == sampling
    assert (capped.max_tokens, capped.temperature) == (77, 0.5)


@pytest.mark.parametrize(("broken", "lost", "said"), [({1}, set(), "too long"), (set(), {0}, "vLLM lost it")])
def test_a_failed_sequence_fails_the_run(broken: set[int], lost: set[int], said: str) -> None:
    with pytest.raises(RuntimeError, match=f"1 of 3 sequences failed, the first with: {said}"):
        generate(worker(broken, lost), GROUPS)
