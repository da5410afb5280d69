"""FleetRefresh beside engines that only answer: what it asks of them, and what happens when they don't."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout_spec.config import Config, parse_config
from rollout_spec.control.policy import Decision, StepResult, StepView
from rollout_spec.draft.samples import Sample
from rollout_spec.engine.control_loop import ControlLoop
from rollout_spec.rollout.fleet_refresh import Fleet, FleetRefresh


class Two:
    def decide(self, view: StepView) -> Decision:
        return Decision(2)

    def observe(self, result: StepResult) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}


class Answering:
    """Two engines of one worker each, as far as they are asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.loops = [ControlLoop(Two(), 2), ControlLoop(Two(), 2)]
        self.samples: list[Sample] = []
        self.announced: list[int] = []
        self.fails = ""
        self.dies = ""
        self.marks = [1, 1]

    def call(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, args))
        if method == self.dies:
            raise RuntimeError(f"{method}: the engine is dead")
        if method == "rollout_spec_load_weights":
            return [None, self.fails or None]
        if method == "rollout_spec_fingerprint":
            return list(self.marks)
        return [[]] * 2 if method == "rollout_spec_shared_layers" else [None] * 2

    def announce(self, draft_version: int) -> None:
        self.announced.append(draft_version)

    def take(self, temperature: float, tokens: int) -> list[Sample]:
        taken, self.samples = self.samples, []
        return taken

    def statuses(self) -> dict[str, Any]:
        return {str(i): json.loads(json.dumps(loop.status())) for i, loop in enumerate(self.loops)}

    def generate(self, greedy: bool = False) -> None:
        for loop in self.loops:
            loop.observe(StepResult(0.5, 4, 0, 2, 2, [4, 4], [2, 1], speculated=4, greedy=greedy))

    def update(self) -> None:
        for loop in self.loops:
            loop.policy_updated()

    def asked(self, method: str) -> list[Any]:
        return [args for name, args in self.calls if name == method]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A target of two tokens and a head for it, as far as they are looked at without an engine."""
    for name in ("target", "head", "newer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2}))
        save_file({"weight": torch.zeros(2, 2)}, tmp_path / name / "model.safetensors")
    tree = {
        "model": str(tmp_path / "target"),
        "drafter": {"method": "eagle3", "model": str(tmp_path / "head"), "k_max": 2},
        "refresh": {"policy": "every", "every": 2, "folder": str(tmp_path / "kept")},
    }
    return parse_config(tree)


def sample() -> Sample:
    return Sample("", [1, 0], [0, 1, 0], 1.0, ended=False)


def test_a_head_goes_into_all_engines_or_into_none(config: Config, tmp_path: Path) -> None:
    engines = Answering()
    fleet = Fleet(config, engines, tmp_path)
    fleet.refresh_draft(tmp_path / "newer", 1)
    [(target, files)] = engines.asked("rollout_spec_load_weights")
    assert target == []
    assert [Path(file).name for file in files] == ["model.safetensors"]
    assert engines.asked("rollout_spec_settle_weights") == [(True,)]
    assert (engines.announced, fleet.draft_version) == ([1], 1)

    engines.fails = "ValueError: no"
    with pytest.raises(RuntimeError, match="the old ones stay in force: ValueError: no"):
        fleet.refresh_draft(tmp_path / "newer", 2)
    assert engines.asked("rollout_spec_settle_weights")[1:] == [(False,), (False,)]
    assert (engines.announced, fleet.draft_version) == ([1], 1)

    engines.fails, engines.dies = "", "rollout_spec_load_weights"
    with pytest.raises(RuntimeError, match="is dead"):
        fleet.refresh_draft(tmp_path / "newer", 2)
    assert engines.asked("rollout_spec_settle_weights")[3:] == [(False,)]  # those that live put it back


def test_what_engines_did_counts_together_and_takes_as_long_as_one(config: Config, tmp_path: Path) -> None:
    engines = Answering()
    fleet = Fleet(config, engines, tmp_path)
    assert fleet.controller_status() is None
    before = engines.statuses()
    engines.generate()
    engines.generate(greedy=True)  # validation, which accepts as it does
    fleet.gains.took(engines.statuses(), before)
    status = fleet.controller_status()
    assert status is not None
    assert status["drafted_per_position"] == [8, 8]
    assert status["accepted_per_position"] == [4, 2]
    assert sum(status["seconds_by_bucket"]) == pytest.approx(1.0)
    before = engines.statuses()
    engines.generate()
    fleet.gains.took(engines.statuses(), before)
    again = fleet.controller_status()
    assert again is not None
    assert again["drafted_per_position"] == [16, 16]


def test_engines_with_different_heads_have_no_fingerprint(config: Config, tmp_path: Path) -> None:
    engines = Answering()
    fleet = Fleet(config, engines, tmp_path)
    engines.marks = [7, 7]
    assert fleet.fingerprint() == 7
    engines.marks = [7, 8]
    assert fleet.fingerprint() == 0


def test_weights_are_asked_for_when_a_refresh_is_due(config: Config, tmp_path: Path) -> None:
    engines = Answering()
    before = engines.statuses()
    refresh = FleetRefresh(config, engines, near=False, statuses=before)
    [(file,)] = engines.asked("rollout_spec_copy_next_update")  # the first update's, in case
    assert Path(file).parent.parent == tmp_path / "kept"
    codes = []
    for step in range(1, 4):
        engines.generate()
        engines.samples = [sample(), sample()]
        engines.update()
        now = engines.statuses()
        metrics = refresh.step(step, now, before)
        before = now
        codes.append(refresh._refresh.decision.code)
    assert codes == ["not_due", "no_weights", "no_weights"]
    # Once at the start, and after each step at whose end a refresh is due.
    assert len(engines.asked("rollout_spec_copy_next_update")) == 3
    assert metrics["rollout_spec/refresh_reason/no_weights"] == 2
    assert metrics["rollout_spec/refresh_buffer_responses"] == 6
    assert metrics["rollout_spec/draft_version"] == 0
    assert metrics["rollout_spec/draft_fingerprint"] == 1
    # They come now. The process that trains finds no model there, which costs a warning only.
    Path(file).write_bytes(b"")
    engines.generate()
    engines.update()
    assert refresh.step(4, engines.statuses(), before)["rollout_spec/refresh_begun"] == 1
    refresh.close()
    assert not Path(file).parent.exists()
    refresh.close()


def test_a_validation_is_no_rollout(config: Config) -> None:
    engines = Answering()
    before = engines.statuses()
    refresh = FleetRefresh(config, engines, near=True, statuses=before)
    engines.generate(greedy=True)
    refresh.step(0, engines.statuses(), before)
    assert refresh._refresh.decision.code == "none"
    refresh.close()


def test_a_resumed_run_goes_on_with_head_and_rollouts(config: Config, tmp_path: Path) -> None:
    engines = Answering()
    first = FleetRefresh(config, engines, near=True, statuses=engines.statuses())
    for step in range(1, 6):
        engines.samples = [sample()]
        first.step(step, engines.statuses(), engines.statuses())
    head = tmp_path / "kept/refresh-1/head"
    head.parent.mkdir()
    (tmp_path / "newer").rename(head)
    (tmp_path / "kept/newest.json").write_text(json.dumps({"head": "refresh-1/head", "draft_version": 4}))
    first.close()

    engines = Answering()
    resumed = FleetRefresh(config, engines, near=True, statuses=engines.statuses())
    assert engines.announced == [4]
    engines.samples = [sample()]
    metrics = resumed.step(4, engines.statuses(), engines.statuses())  # from the checkpoint of step 3
    assert metrics["rollout_spec/draft_version"] == 4
    assert resumed._refresh.replay.versions == [1, 2, 3, 4]
    resumed.close()


def test_a_fault_costs_a_warning_and_a_metric(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    engines = Answering()
    refresh = FleetRefresh(config, engines, near=True, statuses=engines.statuses())

    def broken(temperature: float, tokens: int) -> list[Sample]:
        raise OSError("a planted failure")

    engines.take = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "vllm.rollout_spec"):
        metrics = refresh.step(1, engines.statuses(), engines.statuses())
    assert metrics["rollout_spec/refresh_faults"] == 1
    assert "the head in the engines stays" in caplog.text
    refresh.close()


def test_a_head_that_cannot_be_put_back_in_is_left(config: Config, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/newest.json").write_text(json.dumps({"head": "refresh-1/head", "draft_version": 4}))
    engines = Answering()
    refresh = FleetRefresh(config, engines, near=True, statuses=engines.statuses())
    metrics = refresh.step(1, engines.statuses(), engines.statuses())
    assert metrics["rollout_spec/refresh_failed"] == 1
    assert metrics["rollout_spec/draft_version"] == 0
    refresh.close()
