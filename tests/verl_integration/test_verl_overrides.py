"""What we replace in verl, each against verl's own code."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from rollout_spec_verl import compat, metrics, overrides


def test_verl_is_what_we_rely_on() -> None:
    assert list(compat.problems()) == []


def test_what_changed_in_verl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.utils.tracking import Tracking
    from verl.workers.config import RolloutConfig

    def log(self: Any, metrics: Any, step: int) -> None: ...

    monkeypatch.setattr(Tracking, "log", log)
    monkeypatch.setattr(RolloutConfig, "_mutable_fields", set())
    first, second = compat.problems()
    assert "engine_kwargs" in first
    assert "log" in second
    assert "metrics" in second


@pytest.fixture
def tracking(monkeypatch: pytest.MonkeyPatch) -> Any:
    """verl's logger with the file backend, without what another test put into it; afterwards as it was before."""
    from verl.utils.tracking import Tracking

    for name in ("__init__", "log"):
        monkeypatch.setattr(Tracking, name, inspect.unwrap(getattr(Tracking, name)))
    return Tracking


def test_our_metrics_are_in_verls_log(tracking: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = {
        "k": 2,
        "failed": False,
        "buckets": [1, 2],
        "steps_by_bucket_and_k": [[0, 4, 4], [0, 0, 0], [0, 0, 0]],
        "seconds_by_bucket": [1.0, 0.0, 0.0],
        "drafted_per_position": [8, 4],
        "accepted_per_position": [4, 2],
        "greedy_drafted_per_position": [0, 0],
        "greedy_accepted_per_position": [0, 0],
        "speculated_sequence_steps": 8,
        "tail_seconds": 0.5,
        "weight_updates": 3,
        "draft_refreshes": 1,
        "preemptions": 0,
        "policy": {"effective_speedup": 1.25},
    }
    readings = iter([{}, {"node:1": status}, {"node:1": status}])  # none yet when the logger begins
    asked = []

    class Refresh:
        def step(self, step: int, now: Any, before: Any) -> dict[str, float]:
            asked.append((step, now, before))
            return {"rollout_spec/draft_version": 7.0}

    monkeypatch.setattr(metrics.RayEngines, "statuses", lambda self: next(readings))
    monkeypatch.setattr(metrics.RayEngines, "refresh", lambda self, statuses: Refresh())
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    overrides._log_ours()
    overrides._log_ours()  # once only
    logger = tracking("project", "experiment", default_backend=["file"])
    logger.log({"critic/score/mean": 0.5}, 1)
    logger.log({"critic/score/mean": 0.5}, step=2)
    logger.finish()
    assert asked == [(1, {"node:1": status}, {}), (2, {"node:1": status}, {"node:1": status})]
    first, second = (json.loads(line)["data"] for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert first["critic/score/mean"] == 0.5
    assert first["rollout/spec_accept_rate"] == 0.5
    assert first["rollout/spec_accept_length"] == 1.75
    assert first["rollout_spec/mean_k/live_from_1"] == 1.5
    assert first["rollout_spec/tail_seconds"] == 0.5
    # Nothing was generated since.
    assert "rollout/spec_accept_rate" not in second
    assert second["rollout_spec/effective_speedup"] == 1.25
    assert second["rollout_spec/draft_version"] == 7.0


def test_a_job_whose_heads_cannot_be_refreshed_goes_on(
    tracking: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Any, statuses: Any) -> None:
        raise RuntimeError("a planted failure")

    monkeypatch.setattr(metrics.RayEngines, "statuses", lambda self: {})
    monkeypatch.setattr(metrics.RayEngines, "refresh", broken)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    overrides._log_ours()
    logger = tracking("project", "experiment", default_backend=["file"])
    logger.log({"a": 1.0}, 1)
    logger.finish()
    assert "draft heads are not refreshed in this run" in caplog.text
    logged = json.loads((tmp_path / "log.jsonl").read_text())["data"]
    assert 0 <= logged.pop("rollout_spec/collect_seconds") < 60
    assert logged == {"a": 1.0, "rollout_spec/engines": 0.0}


def test_metrics_that_fail_cost_no_step(tracking: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = 0

    def broken(self: Any) -> None:
        nonlocal calls
        calls += 1
        raise OSError("no Ray")

    monkeypatch.setattr(metrics.RayEngines, "statuses", broken)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    overrides._log_ours()
    logger = tracking("project", "experiment", default_backend=["file"])
    for step in range(6):
        logger.log({"a": 1.0}, step)
    logger.finish()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 6
    assert calls == 1 + metrics.PATIENCE  # once at the start


def test_an_engine_that_never_answers_ends_the_weight_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """verl's own sender, with nobody at the other end."""
    import importlib.metadata

    import torch

    for holder, name in ((importlib.metadata, "version"), (torch.distributed, "init_process_group")):
        monkeypatch.setattr(holder, name, getattr(holder, name))  # what the platform replaces, to be as it was
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    import rollout_spec_verl.cpu.platform  # noqa: F401 - vLLM's distribution has another name here
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    assert list(compat.sender_problems()) == []
    assert list(compat.worker_problems()) == []
    for name in ("_init_socket", "async_send_weights"):
        monkeypatch.setattr(BucketedWeightSender, name, getattr(BucketedWeightSender, name))
    overrides._limit_weight_sync(0.2)
    sender = BucketedWeightSender(zmq_handle=f"ipc://{tmp_path}/socket", bucket_size_mb=1, use_shm=True)
    caught: list[BaseException] = []

    def send() -> None:
        try:
            asyncio.run(sender.async_send_weights(iter({"weight": torch.zeros(4)}.items())))
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=send, daemon=True)  # without the limit it would never end
    thread.start()
    thread.join(60)
    assert caught
    assert "weight_sync_seconds" in str(caught[0])
