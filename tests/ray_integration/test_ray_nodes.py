"""A worker node that goes while its engine is at work, on Ray's own pretend cluster."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import jobs
import pytest
from fake import GATED
from rollout_spec_ray import job

pytestmark = pytest.mark.slow


def test_a_node_that_is_removed_costs_a_retry(tmp_path: Path, out: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        lost = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        gate = tmp_path / "gate"
        prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", [[5, 30], [GATED, 1]] * 10)
        said: list[str] = []

        def remove() -> None:
            try:
                jobs.wait_for(lambda: len({row["engine"] for row in jobs.rows(out)}) == 2)
                cluster.remove_node(lost, allow_graceful=False)  # with some of those that wait for the gate
                # Its processes outlive it for a moment, in which they could still finish.
                jobs.wait_for(lambda: any(": lost with" in line for line in said))
            finally:
                gate.touch()

        thread = threading.Thread(target=remove, daemon=True)
        thread.start()
        worker = jobs.worker(gate=str(gate), step_seconds=0.02)
        code = job.run(jobs.config(tries=2), str(prompts), str(out), make_worker=worker, say=said.append)
        thread.join(60)
        assert (code, jobs.keys(out)) == (job.COMPLETE, jobs.asked(20)), said
        (attempt,) = json.loads((out / "report.json").read_text())["attempts"]
        assert attempt["restarts"] == 1
        assert not (out / "quarantined.jsonl").exists()
    finally:
        ray.shutdown()
        cluster.shutdown()
