from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_spec.control.policy import Decision, StepResult, StepView
from rollout_spec.engine import control_loop
from rollout_spec.engine.control_loop import BUCKETS, ControlLoop, bucket_of


class Policy:
    """Always two; counts what it is told."""

    def __init__(self) -> None:
        self.seen = 0
        self.numbers: dict[str, Any] = {}

    def decide(self, view: StepView) -> Decision:
        return Decision(2)

    def observe(self, result: StepResult) -> None:
        self.seen += 1

    def metrics(self) -> dict[str, float]:
        return self.numbers


def result(decode: int, k: int = 2, seconds: float = 0.5, hits: int = 0, prefills: int = 0) -> StepResult:
    drafted = [decode if k > j else 0 for j in range(3)]
    accepted = [decode if hits > j else 0 for j in range(3)]
    return StepResult(
        seconds=seconds,
        decode=decode,
        prefill_tokens=0,
        k=k,
        k_next=k,
        drafted=drafted,
        accepted=accepted,
        speculated=decode if k else 0,
        prefills=prefills,
    )


@pytest.mark.parametrize("decode", [1, 2, 3, 4, 5, 8, 9, 100, 256, 257, 512, 513, 10_000])
def test_buckets(decode: int) -> None:
    bucket = bucket_of(decode)
    low = BUCKETS[bucket - 1] if bucket else 0
    high = BUCKETS[bucket] if bucket < len(BUCKETS) else math.inf
    assert low < decode <= high


def test_the_status_adds_up() -> None:
    loop = ControlLoop(Policy(), 3)
    loop.observe(result(decode=0, k=0))  # prompts only: no live batch, no drafts
    loop.observe(result(decode=1, k=0, seconds=0.25))
    loop.observe(result(decode=3, k=2, hits=1))
    loop.observe(result(decode=1, k=2, hits=2, prefills=3))  # one that decodes beside prompts: four live
    status = loop.status()
    assert status["steps_by_bucket_and_k"][0] == [1, 0, 0, 0]
    assert status["steps_by_bucket_and_k"][2] == [0, 0, 2, 0]
    assert sum(map(sum, status["steps_by_bucket_and_k"])) == 3
    assert status["seconds_by_bucket"][:3] == [0.25, 0.0, 1.0]
    assert status["drafted_per_position"] == [4, 4, 0]
    assert status["accepted_per_position"] == [4, 1, 0]
    assert status["speculated_sequence_steps"] == 4


def test_the_status_says_which_k_was_asked_last() -> None:
    loop = ControlLoop(Policy(), 3)
    loop.decide(StepView(decode=1))
    assert loop.status()["k"] == 2
    loop.decide(StepView(decode=1, sampling=True))
    assert loop.status()["k"] == 0


def test_metrics_that_json_cannot_hold_are_left_out(tmp_path: Path) -> None:
    policy = Policy()
    policy.numbers = {"fine": np.float64(1.5), "flag": True, "nan": math.nan, "endless": math.inf}
    loop = ControlLoop(policy, 3, str(tmp_path / "status.json"))
    loop.idle()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    status = json.loads((tmp_path / "status.json").read_text(), parse_constant=refuse)
    assert status["policy"] == {"fine": 1.5, "flag": 1.0}


def test_the_status_file_is_written_seldom_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "status.json"
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(control_loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
    loop = ControlLoop(Policy(), 3, str(file))

    def steps() -> int:
        return sum(map(sum, json.loads(file.read_text())["steps_by_bucket_and_k"]))

    loop.observe(result(1))
    assert steps() == 1
    for _ in range(5):
        clock.now += 0.1
        loop.observe(result(1))
    assert steps() == 1
    clock.now += 1.0
    loop.observe(result(1))
    assert steps() == 7
    loop.observe(result(1))
    loop.idle()
    assert steps() == 8


def test_without_a_status_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop = ControlLoop(Policy(), 3)
    loop.observe(result(1))
    loop.idle()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_policy_is_never_asked_again() -> None:
    policy = Policy()
    loop = ControlLoop(policy, 3)
    loop.observe(result(1))

    def broken(view: StepView) -> Decision:
        raise ValueError

    policy.decide = broken  # type: ignore[method-assign]
    assert loop.decide(StepView(decode=1)).k == 0
    del policy.decide
    assert loop.decide(StepView(decode=1)) == Decision(0, "controller failed")
    loop.observe(result(1))
    loop.policy_updated()
    assert policy.seen == 1
    # The engine's own counts go on: they are facts.
    assert loop.status()["steps_by_bucket_and_k"][0][2] == 2


def test_a_replaced_draft_file_tells_the_policy_once(tmp_path: Path) -> None:
    from rollout_spec.files import write_json

    told: list[str] = []
    policy = Policy()
    policy.draft_refreshed = lambda: told.append("draft")  # type: ignore[attr-defined]
    file = tmp_path / "draft.json"
    loop = ControlLoop(policy, 3, draft_file=str(file))
    for version in range(3):
        loop.decide(StepView(decode=1))
        assert told == ["draft"] * version
        write_json(file, {"draft_version": version})
        loop.decide(StepView(decode=1))
        loop.decide(StepView(decode=1))
        assert told == ["draft"] * (version + 1)
    assert loop.status()["draft_refreshes"] == 3


def test_a_policy_that_trips_over_a_new_draft_costs_only_speed(tmp_path: Path) -> None:
    def broken() -> None:
        raise ValueError

    policy = Policy()
    policy.draft_refreshed = broken  # type: ignore[attr-defined]
    file = tmp_path / "draft.json"
    file.write_text("{}")
    loop = ControlLoop(policy, 3, draft_file=str(file))
    assert loop.decide(StepView(decode=1)) == Decision(0, "controller failed")


def test_a_weight_update_counts_once() -> None:
    """verl resets the prefix cache up to three times around one."""
    policy = Policy()
    updates = []
    policy.policy_updated = lambda: updates.append(policy.seen)  # type: ignore[attr-defined]
    loop = ControlLoop(policy, 3)
    for _ in range(2):
        loop.observe(result(1))
        for _ in range(3):
            loop.policy_updated()
    assert updates == [1, 2]
    assert loop.status()["weight_updates"] == 2


def test_engines_with_the_same_settings_have_files_of_their_own(tmp_path: Path) -> None:
    ControlLoop(Policy(), 3, str(tmp_path / "status_{pid}.json"))
    assert [path.name for path in tmp_path.iterdir()] == [f"status_{os.getpid()}.json"]


def test_the_status_is_there_from_the_start_and_not_an_older_ones(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    ControlLoop(Policy(), 3, str(file)).observe(result(1))
    ControlLoop(Policy(), 3, str(file))
    assert sum(map(sum, json.loads(file.read_text())["steps_by_bucket_and_k"])) == 0
