"""Jobs on a real Ray with fake engines, and everything that can go wrong in one. What must hold each time: no finished
sequence lost, none twice, the same set of (prompt, sample) as without the fault."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jobs
import psutil
import pytest
from chain import make_moved
from fake import GATED, LATE, POISON, STUCK
from rollout_spec_ray import job
from rollout_spec_ray.engine import Weights
from rollout_spec_ray.failures import PoolFailed, WeightsRefused
from rollout_spec_ray.pool import Pool
from rollout_spec_ray.work import Work

from rollout_spec.config import ConfigError
from rollout_spec.control.makespan import Lengths

pytestmark = pytest.mark.slow

PLAIN = 5
KILLS = 20


def plain(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts with responses of 2 to 40 tokens."""
    rng = random.Random(seed)
    return [[PLAIN, rng.randint(2, 40)] for _ in range(count)]


class Killer(threading.Thread):
    """Kills engines of this process at random moments, then opens the gate, without which the job can't end."""

    def __init__(self, gate: Path, kills: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.killed: list[int] = []
        self._gate, self._kills, self._rng = gate, kills, random.Random(seed)

    def run(self) -> None:
        while len(self.killed) < self._kills:
            time.sleep(self._rng.expovariate(1 / 0.4))
            alive = [one for one in jobs.engine_processes() if one.pid not in self.killed]
            if alive:
                victim = self._rng.choice(alive)
                self.killed.append(victim.pid)
                victim.kill()
        self._gate.touch()


def test_engines_killed_at_random_moments(cluster: str, tmp_path: Path, out: Path) -> None:
    gate = tmp_path / "gate"
    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", [*plain(80), [GATED, 1]])
    killer = Killer(gate, KILLS, seed=1)
    killer.start()
    options = jobs.config(engines=3, tries=1000, restarts=1000)
    code, _ = jobs.run(out, prompts, options, jobs.worker(gate=str(gate), step_seconds=0.02))
    assert (code, jobs.keys(out)) == (job.COMPLETE, jobs.asked(81))
    (attempt,) = json.loads((out / "report.json").read_text())["attempts"]
    # A process that is killed before it was ever spoken to is not missed.
    assert 0 < attempt["restarts"] <= KILLS == len(killer.killed)
    assert all(row["token_ids"] == [PLAIN] * row["num_tokens"] for row in jobs.rows(out) if row["prompt_id"] != "p80")


def test_in_the_tail_sequences_move_to_the_engine_that_has_drained(cluster: str, tmp_path: Path, out: Path) -> None:
    # The first half goes to one engine; the other's lengths let it see every size on its way to none.
    lengths = [500] * 4 + [40, 100, 160, 220]
    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", [[PLAIN, length] for length in lengths])
    worker = jobs.worker(step_seconds=0.002, sequence_seconds=0.003)
    code, said = jobs.run(out, prompts, jobs.config(engine__max_model_len=512), worker)
    assert (code, jobs.keys(out)) == (job.COMPLETE, jobs.asked(8))
    (attempt,) = json.loads((out / "report.json").read_text())["attempts"]
    assert attempt["moved"] >= 3
    assert any("moved between engines" in line for line in said)
    for row in jobs.rows(out):
        assert row["token_ids"] == [PLAIN] * lengths[int(row["prompt_id"][1:])]
        assert len(row["logprobs"]) == row["num_tokens"]
    assert {row["engine"] for row in jobs.rows(out) if row["num_tokens"] == 500} == {0, 1}


def test_poison_prompts_are_set_aside_and_a_bad_row_and_a_failing_template_reported(
    cluster: str, tmp_path: Path, out: Path
) -> None:
    path = jobs.write_prompts(
        tmp_path / "prompts.jsonl",
        [*plain(30), [POISON, 9], "text, which the fake has no tokenizer for", [PLAIN, 9999]],
    )
    path.write_text(path.read_text() + "{not json}\n")
    code, said = jobs.run(out, path, jobs.config(), jobs.worker())
    assert code == job.INCOMPLETE
    assert jobs.keys(out) == sorted({*jobs.asked(33)} - {("p30", 0), ("p30", 1)})
    errors = {row["prompt_id"]: row["error"] for row in jobs.rows(out) if row["finish_reason"] == "error"}
    assert set(errors) == {"p31", "p32"}
    assert "the chat template fails" in errors["p31"]
    (aside,) = [json.loads(line) for line in (out / "quarantined.jsonl").read_text().splitlines()]
    assert (aside["prompt_id"], aside["samples"]) == ("p30", [0, 1])
    (rejected,) = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert rejected["row"] == 34
    assert any("prompt 'p30' is set aside" in line for line in said)
    # Again: it is known, and kills no engine any more.
    code, _ = jobs.run(out, path, jobs.config(), jobs.worker())
    report = json.loads((out / "report.json").read_text())
    assert code == job.INCOMPLETE
    # Its samples may have begun in both engines.
    assert report["attempts"][0]["restarts"] in (3, 4)
    assert report["attempts"][1]["restarts"] == 0
    assert report["sequences"]["twice"] == 0


def test_a_killed_driver_loses_nothing_that_was_written(cluster: str, tmp_path: Path, out: Path) -> None:
    gate = tmp_path / "gate"
    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", [*plain(60), [GATED, 1]], n=2)
    arguments = ["--address", cluster, "--gate", str(gate), "--step-seconds", "0.02"]
    first = jobs.driver(out, prompts, *arguments)
    written = jobs.wait_for(
        lambda: len(list((out / "parts").glob("*.parquet"))) >= 2 and sorted((out / "parts").iterdir())
    )
    with pytest.raises(ConfigError, match="another job writes there"):
        jobs.run(out, prompts, jobs.config(), jobs.worker())
    first.kill()
    first.communicate()
    before = {path: path.read_bytes() for path in written if not path.name.startswith(".")}
    done = jobs.keys(out)
    assert 0 < len(done) < 122
    gate.touch()
    code, _ = jobs.run(out, prompts, jobs.config(), jobs.worker(gate=str(gate)))
    assert (code, jobs.keys(out)) == (job.COMPLETE, jobs.asked(61))
    assert {path: path.read_bytes() for path in before} == before
    attempts = json.loads((out / "report.json").read_text())["attempts"]
    assert [one["outcome"] for one in attempts] == ["killed", "ended"]
    assert attempts[1]["sequences"] == 122 - len(done)


def test_a_terminated_driver_writes_what_has_finished(cluster: str, tmp_path: Path, out: Path) -> None:
    gate = tmp_path / "gate"
    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", [*plain(10), [GATED, 1]])
    process = jobs.driver(out, prompts, "--address", cluster, "--gate", str(gate), "--step-seconds", "0.02")
    jobs.wait_for(lambda: len(list((out / "parts").glob("*.parquet"))) >= 1)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert 0 < len(jobs.keys(out)) < 22
    gate.touch()
    code, _ = jobs.run(out, prompts, jobs.config(), jobs.worker(gate=str(gate)))
    assert (code, jobs.keys(out)) == (job.COMPLETE, jobs.asked(11))


def test_a_full_disk_ends_the_job_and_costs_nothing_that_was_written(cluster: str, tmp_path: Path, out: Path) -> None:
    # The last prompts are long, so that a part with a dozen of them is beyond the limit; others and job.json are below.
    rng = random.Random(0)
    long = [[PLAIN, 50, *(rng.randrange(30_000) for _ in range(2000))] for _ in range(20)]
    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", [*plain(30), *long])
    process = jobs.driver(out, prompts, "--address", cluster, "--file-limit", "40000")
    output, _ = process.communicate()
    assert process.returncode == job.FAILED, output
    assert "cannot be written: there is no room left" in output
    done = jobs.keys(out)
    assert 0 < len(done) == len(set(done)) < 100
    code, _ = jobs.run(out, prompts, jobs.config(), jobs.worker())
    assert (code, jobs.keys(out)) == (job.COMPLETE, jobs.asked(50))


def test_an_engine_that_is_stuck_is_restarted(cluster: str, tmp_path: Path, out: Path) -> None:
    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", [[STUCK, 10], *plain(6)])
    code, said = jobs.run(out, prompts, jobs.config(stall_seconds=1.0), jobs.worker(gate=str(tmp_path / "stuck")))
    assert (code, jobs.keys(out)) == (job.COMPLETE, jobs.asked(7))
    assert any("made no step for" in line for line in said)


def test_other_prompts_or_another_sampling_are_refused(cluster: str, tmp_path: Path, out: Path) -> None:
    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", plain(2))
    jobs.run(out, prompts, jobs.config(engines=1), jobs.worker())
    with pytest.raises(ConfigError, match="another model or sampling"):
        jobs.run(out, prompts, jobs.config(sampling__temperature=0.5), jobs.worker())
    jobs.write_prompts(prompts, [[PLAIN, 3], [PLAIN, 4]])
    with pytest.raises(ConfigError, match="prompt id 'p0', which is another prompt of this file"):
        jobs.run(out, prompts, jobs.config(), jobs.worker())


def test_a_configuration_that_cannot_work_ends_the_job(cluster: str, tmp_path: Path, out: Path) -> None:
    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", plain(2))
    with pytest.raises(ConfigError, match="model 'refused': no such folder"):
        jobs.run(tmp_path / "refused", prompts, jobs.config(top__model="refused"), jobs.worker())
    with pytest.raises(ConfigError, match="scheduler_cls: is not taken"):
        jobs.run(out, prompts, jobs.config(engine__extra={"scheduler_cls": "evil.Scheduler"}), jobs.worker())
    with pytest.raises(PoolFailed, match=r"each needs 99 CPUs .* the cluster has 8 CPUs, 2 GPUs"):
        jobs.run(out, prompts, jobs.config(cpus_per_engine=99, start_seconds=1.0), jobs.worker())


def test_tensor_parallel_engines_are_placed_on_whole_groups(cluster: str, tmp_path: Path, out: Path) -> None:
    import ray

    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", [*plain(4), [GATED, 1]])
    gate, free = tmp_path / "gate", []

    def watch() -> None:
        jobs.wait_for(lambda: len(list((out / "parts").glob("*.parquet"))) >= 1)
        free.append(ray.available_resources().get("GPU", 0))
        gate.touch()

    threading.Thread(target=watch, daemon=True).start()
    code, _ = jobs.run(out, prompts, jobs.config(engines=1, gpus_per_engine=2), jobs.worker(gate=str(gate)))
    assert (code, free) == (job.COMPLETE, [0])
    jobs.wait_for(lambda: ray.available_resources().get("GPU") == 2)


# -- weights


def test_new_weights_reach_all_engines_and_those_that_come_back(cluster: str, tmp_path: Path) -> None:
    with Pool(jobs.config(), make_worker=jobs.worker(), say=lambda line: None) as pool:
        pool.wait(60)
        weights = Weights(str(tmp_path), 4)
        pool.update_weights(weights)
        assert [seat.weights for seat in pool.seats] == [weights] * 2
        with pytest.raises(WeightsRefused, match=r"policy version 5: weights .* no .*safetensors"):
            pool.update_weights(Weights(str(tmp_path / "none"), 5))
        for process in jobs.engine_processes():
            process.kill()
        versions: list[int] = []
        catalogue, work = numbered(12)
        on_finished = lambda table: versions.extend(table["policy_version"].to_pylist())  # noqa: E731
        pool.run(work, catalogue, on_finished, lambda prompt, why: None)
        assert versions == [4] * 12
        assert pool.restarts == 2


def numbered(count: int) -> tuple[Any, Work]:
    from rollout_spec_ray.catalogue import Catalogue

    from rollout_spec.workload.workload import Group

    catalogue, work = Catalogue(), Work(Lengths(), capacity=8)
    for i in range(count):
        catalogue.add(Group(f"p{i}", (PLAIN, 5), 1, None))
        work.add(i, [0])
    catalogue.close()
    return catalogue, work


def test_a_job_takes_weights_that_a_trainer_names(cluster: str, tmp_path: Path, out: Path) -> None:
    # When the weights are named, both engines are full of sequences that wait for that; one prompt begins after these.
    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", [*plain(20), [GATED, 1], [GATED, 1], [PLAIN, 5]])
    gate, watched = tmp_path / "gate", tmp_path / "trainer"
    (watched / "step-1").mkdir(parents=True)
    said: list[str] = []

    def name_weights(version: int, folder: str, answer: str) -> None:
        (watched / "latest.json").write_text(json.dumps({"policy_version": version, "policy": folder}))
        jobs.wait_for(lambda: any(answer in line for line in said))

    def train() -> None:
        try:
            jobs.wait_for(lambda: len(list((out / "parts").glob("*.parquet"))) >= 1)
            name_weights(9, "../elsewhere", "outside of the watched folder")
            name_weights(7, "step-1", "policy version 7 are wanted")
        finally:
            gate.touch()  # without which the job cannot end

    threading.Thread(target=train, daemon=True).start()
    code, _ = jobs.run(
        out,
        prompts,
        jobs.config(backlog=0, engine__max_num_seqs=2),
        jobs.worker(gate=str(gate), step_seconds=0.02),
        said=said,
        watch=str(watched),
    )
    assert (code, jobs.keys(out)) == (job.COMPLETE, jobs.asked(23))
    versions = {row["prompt_id"]: row["policy_version"] for row in jobs.rows(out)}
    assert set(versions.values()) == {0, 7}
    assert versions["p22"] == 7
    assert any("outside of the watched folder" in line for line in said)


def test_a_head_follows_the_policy_on_resources_of_its_own(cluster: str, tmp_path: Path, out: Path) -> None:
    models = make_moved(tmp_path / "models")
    gate, watched, heads, versions = (tmp_path / name for name in ("gate", "trainer", "heads", "versions"))
    shutil.copytree(models.after, watched / "step-1")
    versions.mkdir()
    # Some end before the new policy is there, most when both engines have it, the last when both have the new head.
    early, late = [[PLAIN, 30 + i] for i in range(4)], [[PLAIN, 30 + i, LATE] for i in range(16)]
    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", [*early, *late, [GATED, 1]])
    refresh = {"policy": "every", "every": 1, "min_tokens": 200, "seconds": 1e5, "timeout": 2e5}
    options = jobs.config(
        top__model=str(models.before),
        top__drafter={"method": "eagle3", "model": str(models.untrained), "k_max": 3},
        top__draft={"max_passes": 30, "batch_tokens": 1024},
        top__refresh=refresh | {"folder": str(heads)},
    )

    def train() -> None:
        # Whatever does not happen, the job must end, and the test fail.
        try:
            jobs.wait_for(lambda: len(list((out / "parts").glob("*.parquet"))) >= 1)
            (watched / "latest.json").write_text(json.dumps({"policy_version": 1, "policy": "step-1"}))
            jobs.wait_for(lambda: len(list(versions.glob("*-1-0"))) == 2)
            Path(f"{gate}-late").touch()
            jobs.wait_for(lambda: len(list(versions.glob("*-1-1"))) == 2, 300.0)
        finally:
            Path(f"{gate}-late").touch()
            gate.touch()

    threading.Thread(target=train, daemon=True).start()
    worker = jobs.worker(gate=str(gate), versions=str(versions))
    without = options.model_copy(update={"refresh": options.refresh.model_copy(update={"folder": None})})
    with pytest.raises(ConfigError, match=r"refresh\.folder: not set"):
        jobs.run(out, prompts, without, worker, watch=str(watched))
    code, said = jobs.run(out, prompts, options, worker, watch=str(watched), mode="in_flight")
    assert (code, jobs.keys(out)) == (job.COMPLETE, jobs.asked(21))
    assert any("version 1 of the head is ready" in line for line in said), (said, (heads / "record.jsonl").read_text())
    last = [row for row in jobs.rows(out) if row["prompt_id"] == "p20"]
    assert [(row["policy_version"], row["draft_version"]) for row in last] == [(1, 1)] * 2
    (attempt,) = json.loads((out / "job.json").read_text())["attempts"]
    assert attempt["refresh"]["rollout_spec/refresh_done"] == 1


# -- earlier epochs


def test_an_earlier_epoch_says_what_is_long_and_gives_drafts(cluster: str, tmp_path: Path, out: Path) -> None:
    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", [[PLAIN, tokens] for tokens in (3, 9, 40, 20)])
    jobs.run(out, prompts, jobs.config(engines=1), jobs.worker())
    second, log = tmp_path / "second", tmp_path / "log"
    options = jobs.config(engines=1, history=[str(out)], drafter__method="suffix", engine__max_num_seqs=2, backlog=0)
    jobs.run(second, prompts, options, jobs.worker(log=str(log)))
    begun = sorted({(row["started_at"], row["prompt_id"]) for row in jobs.rows(second)})
    assert [prompt for _, prompt in begun] == ["p2", "p3", "p1", "p0"]
    reminded = [json.loads(line) for line in log.read_text().splitlines()]
    assert [prompt for prompt, _ in reminded] == [[PLAIN, 40], [PLAIN, 20], [PLAIN, 9], [PLAIN, 3]]
    assert all(responses == [[PLAIN] * prompt[1]] * 2 for prompt, responses in reminded)
    with pytest.raises(ConfigError, match=r"ray\.history: .* is no output"):
        jobs.run(second, prompts, jobs.config(history=[str(tmp_path)], samples=3), jobs.worker())


# -- a Ray of its own


def test_a_local_ray_listens_on_loopback_only_and_is_stopped(tmp_path: Path, out: Path) -> None:
    gate = tmp_path / "gate"
    prompts = jobs.write_prompts(tmp_path / "prompts.jsonl", [*plain(4), [GATED, 1]])
    process = jobs.driver(out, prompts, "--gate", str(gate))
    jobs.wait_for(lambda: len(list((out / "parts").glob("*.parquet"))) >= 1)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    listening = {
        (one.laddr.ip, member.name())
        for member in family
        for one in member.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }
    gate.touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == job.COMPLETE, output
    assert "10 of 10 sequences are there" in output
    assert {ip.removeprefix("::ffff:") for ip, _ in listening} == {"127.0.0.1"}, listening
    jobs.wait_for(lambda: not any(member.is_running() and member.status() != "zombie" for member in family), 30)
    assert os.environ.get("RAY_ADDRESS") is None
