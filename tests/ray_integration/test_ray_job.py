"""Real engines, two of one core each: through Ray's job submission with one of them killed on the way, and with live
sequences that go from one to the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import psutil
import pytest
import yaml
from rollout_spec_ray import balance, job

from rollout_spec.config import parse_config

pytestmark = pytest.mark.engine

LONG = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import make_target

    return make_target(tmp_path_factory.mktemp("tiny"), seed=0, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """The address for jobs of a Ray whose `python` is this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        import ray

        context = ray.init(address="local", num_cpus=4, include_dashboard=True, log_to_driver=False)
        try:
            yield f"http://{context.dashboard_url}"
        finally:
            ray.shutdown()


def test_a_job_with_real_engines_survives_the_death_of_one(
    dashboard: str, model: Path, tmp_path: Path, out: Path
) -> None:
    # Half of the prompts are asked for long responses, so that the death falls into the work of both engines.
    rows = [
        {"id": f"p{i}", "prompt": [5 + i, 6, 7, 8] * 4, "n": 2, "output_tokens": LONG if i % 2 else 8}
        for i in range(24)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree_of(model)))
    command = [sys.executable, "-m", "rollout_spec.cli", "submit", "--address", dashboard]
    command += ["--config", str(config), "--prompts", str(prompts), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    killed = kill_one(out, process)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    found = jobs.rows(out)
    assert sorted((row["prompt_id"], row["sample_id"]) for row in found) == jobs.asked(24), output
    assert all(row["num_tokens"] == len(row["token_ids"]) == len(row["logprobs"]) for row in found)
    assert {row["num_tokens"] for row in found} == {8, LONG}
    assert {row["engine"] for row in found} == {0, 1}
    assert sum(row["draft_tokens"] or 0 for row in found) > 0
    assert "48 of 48 sequences are there, 0 twice" in output
    report = json.loads((out / "report.json").read_text())
    assert report["attempts"][0]["restarts"] == 1, (killed, output)


def test_sequences_that_move_between_real_engines_go_on_as_if_they_had_not(
    dashboard: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One engine gets more of the long ones, or all, and the other is done sooner; so long that both are up by then.
    rows = [
        {"id": f"p{i}", "prompt": [5 + i, 6, 7, 8] * 4, "n": 1, "output_tokens": 10 * LONG if i < 4 else 8}
        for i in range(8)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Whether a move pays is another test's matter; here each that can be is made.
    monkeypatch.setattr(balance, "LEAST_SECONDS", -1e9)
    found = {}
    for move in (False, True):
        tree = tree_of(model)
        tree["ray"]["move"] = move
        tree["sampling"] = {"temperature": 0.0}
        tree["engine"]["max_model_len"] = 4096
        out = tmp_path / f"move_{move}"
        assert job.run(parse_config(tree), str(prompts), str(out), say=lambda line: None) == job.COMPLETE
        found[move] = {row["prompt_id"]: row for row in jobs.rows(out)}
        (attempt,) = json.loads((out / "report.json").read_text())["attempts"]
        assert attempt["restarts"] == 0
        assert (attempt["moved"] > 0) == move, attempt
    assert found[True].keys() == found[False].keys()
    for name, row in found[True].items():
        assert row["token_ids"] == found[False][name]["token_ids"]
        np.testing.assert_allclose(row["logprobs"], found[False][name]["logprobs"], atol=1e-4)


def tree_of(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "engine": {
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 8,
            "kv_cache_gib": 0.25,
            "extra": {"skip_tokenizer_init": True},
        },
        "drafter": {"k_max": 3},
        "policy": {"name": "fixed", "k": 2},
        "ray": {"engines": 2, "flush_seconds": 0.2, "progress_seconds": 1.0},
    }


def kill_one(out: Path, process: subprocess.Popen[str]) -> int:
    """An engine, once both have finished something; each must be bound to a core of its own."""
    while len({row["engine"] for row in jobs.rows(out)}) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    engines = jobs.engine_processes()
    bound = [threads_bound_to_one_core(one) for one in engines]
    assert len(engines) == 2
    assert all(bound)
    assert bound[0] != bound[1]
    engines[0].kill()
    return engines[0].pid


def threads_bound_to_one_core(process: psutil.Process) -> set[int]:
    """Cores of those threads of the process that are bound to a single one."""
    cores = [os.sched_getaffinity(thread.id) for thread in process.threads()]
    return {core for one in cores if len(one) == 1 for core in one}
