"""DraftRefresh beside a worker without an engine: what it asks of the worker, and what it says when things go wrong."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chain import Moved

from rollout_spec.config import Config, ConfigError, parse_config
from rollout_spec.draft.samples import Sample
from rollout_spec.rollout.draft_refresh import DraftRefresh
from rollout_spec.rollout.metrics import COUNTERS
from rollout_spec.rollout.types import Rollout
from rollout_spec.rollout.update import UpdateFailed

# Longer than any refresh here takes on a busy machine.
LONG = 500.0


class Bare:
    """What DraftRefresh uses of a RolloutWorker."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy_version = self.draft_version = self.num_unfinished = 0
        self.takes_in_flight = True
        self.status: dict[str, Any] | None = None
        self.heads: list[Path] = []
        self.refuses = False

    def controller_status(self) -> dict[str, Any] | None:
        return self.status

    def refresh_draft(self, weights: Path, draft_version: int) -> None:
        if self.refuses:
            raise UpdateFailed("weights: vLLM could not load them, the old ones stay in force")
        self.heads.append(weights)
        self.draft_version = draft_version


@pytest.fixture(scope="module")
def policy(moved: Moved) -> tuple[Path, Path, list[Rollout]]:
    return moved.before, moved.untrained, [rollout(sample) for sample in moved.samples_before[:64]]


def rollout(sample: Sample) -> Rollout:
    return Rollout(0, 0, sample.prompt, sample.response, None, "length", 0, None)


def made(models: tuple[Path, Path, list[Rollout]], folder: Path | None, **refresh: Any) -> tuple[Bare, DraftRefresh]:
    options = {"seconds": 1e5, "timeout": 2e5, "rate_share": 2.0, "folder": str(folder) if folder else None}
    tree = {
        "model": str(models[0]),
        "drafter": {"method": "eagle3", "model": str(models[1]), "k_max": 4},
        "draft": {"max_passes": 4, "batch_tokens": 1024},
        "refresh": options | refresh,
    }
    worker = Bare(parse_config(tree))
    return worker, DraftRefresh(worker)  # type: ignore[arg-type]


def test_a_drafter_without_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"drafter.method 'ngram'.*name the folder of one"):
        DraftRefresh(Bare(Config()))  # type: ignore[arg-type]


def test_a_refresh_that_is_due_waits_for_weights(policy: tuple[Path, Path, list[Rollout]]) -> None:
    _, refresh = made(policy, None, policy="every", every=1)
    with refresh:
        refresh.after_update(None)
        decision = refresh.after_rollout(policy[2])
        assert (decision.refresh, decision.code) == (False, "no_weights")
        assert refresh.wants_weights
        assert not refresh.running
        refresh.after_update(policy[0])
        assert refresh.after_rollout([]).refresh
        assert not refresh.wants_weights
        assert refresh.running
        assert refresh.metrics()["rollout_spec/refresh_reason/no_weights"] == 1


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_time_that_has_passed_is_enough_for_a_trial(policy: tuple[Path, Path, list[Rollout]], share: float) -> None:
    worker, refresh = made(policy, None, min_tokens=1, trial_share=share, seconds=1e-6)  # less than any step takes
    with refresh:
        refresh.after_update(policy[0])
        for rollouts in range(1, 3):
            worker.status = dict.fromkeys(COUNTERS, 0) | {
                "steps_by_bucket_and_k": [[0, 100 * rollouts]],
                "seconds_by_bucket": [10.0 * rollouts],
                "drafted_per_position": [1000 * rollouts],
                "accepted_per_position": [700 * rollouts],
            }
            decision = refresh.after_rollout(policy[2])
        assert decision.code == ("trial" if share else "fresh")
        assert refresh.running == bool(share)


@pytest.mark.slow
def test_a_head_goes_in_between_steps_and_is_there_after_a_restart(
    policy: tuple[Path, Path, list[Rollout]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker, refresh = made(policy, tmp_path, policy="every", every=1)
    assert not refresh.after_rollout(policy[2]).refresh
    worker.policy_version = 1
    refresh.after_update(policy[0])
    assert refresh.after_rollout([replace(each, policy_version=1) for each in policy[2]]).refresh
    assert refresh.metrics()["rollout_spec/refresh_running"] == 1
    assert refresh.after_rollout([]).code == "running"

    # Its head waits while requests run that could not tell drafts apart, and a worker that refuses it keeps the old.
    worker.num_unfinished, worker.takes_in_flight = 1, False
    refresh.between_steps()
    worker.num_unfinished, worker.refuses = 0, True
    with caplog.at_level(logging.WARNING, "vllm.rollout_spec"):
        refresh.wait(LONG)
    assert "the new head could not be loaded" in caplog.text
    assert (worker.heads, worker.draft_version) == ([], 0)
    assert refresh.metrics()["rollout_spec/refresh_failed"] == 1

    worker.refuses = False
    refresh.after_update(policy[0])
    assert refresh.after_rollout([]).refresh
    refresh.wait(LONG)
    [head] = worker.heads
    assert worker.draft_version == 1
    metrics = refresh.metrics()
    assert metrics["rollout_spec/refresh_done"] == 1
    assert metrics["rollout_spec/refresh_begun"] == 2
    assert metrics["rollout_spec/refresh_predicted_after"] > metrics["rollout_spec/refresh_predicted_before"]
    assert metrics["rollout_spec/refresh_total_cost_seconds"] > metrics["rollout_spec/refresh_cost_seconds"] > 0
    assert metrics["rollout_spec/refresh_reason/due"] == 2
    events = [json.loads(line)["event"] for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert events == ["decision"] * 3 + ["failed", "decision", "refreshed"]
    tokens = refresh.replay.tokens
    refresh.close()

    worker, again = made(policy, tmp_path)
    assert worker.heads == [head]
    assert worker.draft_version == 1
    assert again.replay.tokens == tokens > 0
    again.close()


def test_failures_leave_the_old_head_and_say_so(
    policy: tuple[Path, Path, list[Rollout]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker, refresh = made(policy, None, policy="every", every=1)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((policy[0] / "config.json").read_text())
    with caplog.at_level(logging.WARNING, "vllm.rollout_spec"), refresh:
        for weights, said in ((tmp_path / "none", "could not begin"), (broken, "the process ended with 1")):
            refresh.after_update(weights)
            assert refresh.after_rollout(policy[2]).refresh
            refresh.wait(LONG)
            assert said in caplog.text
            assert not refresh.metrics()["rollout_spec/refresh_running"]
    assert caplog.text.count("the old head (version 0) stays") == 2
    assert refresh.metrics()["rollout_spec/refresh_failed"] == 2
    assert worker.heads == []


def test_tensors_are_copied_where_the_process_can_read_them(policy: tuple[Path, Path, list[Rollout]]) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from rollout_spec.rollout.policy_folder import policy_folder

    model = AutoModelForCausalLM.from_pretrained(policy[0])
    state = model.state_dict()
    assert "lm_head.weight" in state  # tied: the same storage twice
    with policy_folder(state, policy[0]) as folder:
        again = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert all(tensor.equal(again[name]) for name, tensor in state.items())
    assert not folder.exists()
    alone = policy[0] / "model.safetensors"
    with policy_folder(alone, policy[0]) as folder:
        assert load_file(folder / "model.safetensors").keys() == load_file(alone).keys()
    with policy_folder(str(policy[0]), policy[0]) as folder:
        assert folder == policy[0]


def test_only_whole_responses_are_kept(policy: tuple[Path, Path, list[Rollout]]) -> None:
    _, refresh = made(policy, None, policy="never")
    first, second, third, *_ = policy[2]
    with refresh:
        refresh.add([first], temperature=0.5)
        decision = refresh.after_rollout([replace(second, finish_reason="abort"), replace(third, finish_reason="stop")])
        assert decision.code == "never"
        kept = sorted((k.sample.temperature, k.sample.ended) for k in refresh.replay)
        assert kept == [(0.5, False), (1.0, True)]
        size = len(first.prompt_token_ids) + len(first.token_ids)
        assert refresh.metrics()["rollout_spec/refresh_buffer_tokens"] == 2 * size
