"""The simulated engine: what it must share with the real one, and with published figures."""

import json
from pathlib import Path

import numpy as np
import pytest

from rollout_spec.cli import main
from rollout_spec.control.fixed import Fixed
from rollout_spec.control.goodput import Goodput
from rollout_spec.simulate import roofline
from rollout_spec.simulate.acceptance_curve import AcceptanceCurve
from rollout_spec.simulate.fleet import Fleet, simulate
from rollout_spec.simulate.step_model import Analytic, Tabulated, steady, tabulate

MODEL = Analytic(fixed=1e-3, weights=10e-3, token=1e-4, kv_token=1e-9, draft_pass=1e-4)
CURVE = AcceptanceCurve.geometric(0.7, 4)


def fleet(**more):
    lengths = np.random.default_rng(0).integers(20, 120, 40)
    return Fleet(**({"model": MODEL, "acceptance": CURVE, "lengths": (lengths,), "max_num_seqs": 8} | more))


def test_off_gives_a_token_a_step_and_all_tokens():
    alone = fleet(lengths=(np.array([50]),))
    outcome = simulate(alone, lambda: Fixed(0), 0)
    assert (outcome.tokens, outcome.replica_steps) == (50, 50)


def test_drafts_are_verified_a_step_after_they_were_asked_for():
    seen = []

    class Spy(Fixed):
        def observe(self, result):
            seen.append((result.k, result.k_next, int(result.drafted[0]), result.decode, result.prefill_tokens))

    simulate(fleet(lengths=(np.array([30]),), prompt_tokens=7), lambda: Spy(2), 0)
    assert seen[0] == (0, 2, 0, 0, 7)  # the prompt
    assert seen[1] == (2, 2, 1, 1, 0)


@pytest.mark.parametrize("queue", ["static", "shared"])
def test_same_seed_same_rollout_and_no_token_is_lost(queue):
    world = fleet(replicas=3, queue=queue, noise=0.05, prompt_tokens=10)
    first, second = (simulate(world, lambda: Goodput(4), 3) for _ in range(2))
    assert first.seconds == second.seconds
    assert first.tokens == int(world.lengths[0].sum())


def test_the_tail_is_timed_from_when_less_than_a_tenth_is_left():
    lengths = np.arange(10, 210, 10)
    outcome = simulate(
        fleet(lengths=(np.random.default_rng(0).permutation(lengths),), max_num_seqs=32), lambda: Fixed(0), 0
    )
    # Fewer than two of twenty are left when the second longest ends: ten steps of one sequence.
    assert outcome.tail_seconds == [pytest.approx(10 * (MODEL.fixed + MODEL.weights), rel=0.05)]


def test_shared_queue_is_no_slower_than_static():
    lengths = np.sort(np.random.default_rng(1).integers(20, 500, 48))
    times = {
        q: simulate(fleet(lengths=(lengths,), replicas=4, queue=q), lambda: Fixed(0), 0).seconds
        for q in ("static", "shared")
    }
    assert times["shared"] < 1.05 * times["static"]


def test_table_of_a_model_gives_the_models_times():
    table = Tabulated(tabulate(MODEL, [1, 2, 4, 8, 16], 4, [0, 1000], 0.1), 4)
    batches = np.array([1.0, 4.0, 16.0])
    assert steady(table, batches, batches * 500, 4) == pytest.approx(steady(MODEL, batches, batches * 500, 4), rel=0.01)


def test_experts_touched_make_small_batches_pay_for_drafts():
    moe = roofline.step_model(roofline.device("H200"), roofline.model("qwen3-30b-a3b"), roofline.Drafter())
    ratio = steady(moe, np.array([1.0, 64.0]), np.array([0.0, 0.0]), 3)
    ratio = ratio[:, 3] / ratio[:, 0]
    assert ratio[0] > 1.2 * ratio[1]


def test_speedup_by_batch_of_a_published_70b_is_met():
    model = roofline.step_model(
        roofline.device("H100"), roofline.model("llama-3-70b"), roofline.Drafter(1.24e9, sharded=False), gpus=4
    )
    batch = np.array([1.0, 4, 16, 64, 128, 256])
    seconds = steady(model, batch, batch * 1000, 4)
    speedup = sum(0.7**j for j in range(5)) * seconds[:, 0] / seconds[:, 4]
    assert speedup == pytest.approx([2.1, 1.9, 1.6, 1.2, 0.95, 0.85], rel=0.1)


def test_a_drafter_that_finds_less_costs_less_and_accepts_no_more():
    full = AcceptanceCurve.from_positions((0.4, 0.2, 0.1, 0.05), 4)
    sparse = AcceptanceCurve.from_positions((0.4, 0.2, 0.1, 0.05), 4, drafted=(0.5, 0.4, 0.3, 0.3))
    seen = {}

    class Spy(Fixed):
        def observe(self, result):
            for key in ("drafted", "accepted"):
                seen[key] = [a + b for a, b in zip(seen.get(key, [0] * 4), getattr(result, key), strict=True)]

    lengths = (np.full(64, 400),)
    seconds = {}
    for name, curve in (("full", full), ("sparse", sparse)):
        seen.clear()
        seconds[name] = simulate(fleet(acceptance=curve, lengths=lengths, max_num_seqs=64), lambda: Spy(4), 0).seconds
    assert seen["drafted"][1] / seen["drafted"][0] == pytest.approx(0.4 / 0.5, rel=0.03)
    assert seen["accepted"][0] / seen["drafted"][0] == pytest.approx(0.4 / 0.5, rel=0.03)
    assert all(a <= d for a, d in zip(seen["accepted"], seen["drafted"], strict=True))
    assert seconds["sparse"] < 0.85 * seconds["full"]
    with pytest.raises(ValueError, match="nowhere below"):
        AcceptanceCurve.from_positions((0.4, 0.2), 2, drafted=(0.3, 0.2))


def test_acceptance_changes_along_a_response():
    curve = AcceptanceCurve.geometric(0.5, 4, by_position=(8.0, 0.1), position_block=100)
    tokens = []

    class Spy(Fixed):
        def observe(self, result):
            if result.k:
                tokens.append((result.context_tokens / result.decode, sum(result.accepted) / result.decode))

    simulate(fleet(acceptance=curve, lengths=(np.full(8, 400),)), lambda: Spy(4), 0)
    early = np.mean([t for c, t in tokens if c < 90])
    late = np.mean([t for c, t in tokens if c > 150])
    assert early < 0.1
    assert late > 3.0


def test_simulates_from_a_profile(tmp_path):
    times = tabulate(MODEL, [1, 4, 16], 4, [0, 1000], 0.1)
    measured = times.to_mapping() | {
        "off_seconds": [0.9 * plane[0][0] for plane in times.seconds],
        "acceptance": [0.8, 0.6, 0.5, 0.4],
        "drafted": [0.9, 0.8, 0.8, 0.8],
        "prefill_token_seconds": 1e-5,
    }
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"step_times": measured}))
    command = ["simulate", "--out", str(tmp_path / "out"), "--set", f"simulate.step_times={profile}"]
    command += ["--set", "simulate.k_max=4", "--set", "simulate.sequences=32", "--set", "simulate.replicas=2"]
    command += ["--set", "workload.scale=0.02", "--set", "simulate.policies=[off, 'fixed:0', goodput]"]
    assert main(command) == 0
    rows = {row["policy"]: row for row in json.loads((tmp_path / "out" / "results.json").read_text())["policies"]}
    # No drafter is loaded where it is off.
    assert rows["off"]["seconds"] == pytest.approx(0.9 * rows["fixed:0"]["seconds"], rel=0.04)
    assert rows["goodput"]["seconds"] < rows["off"]["seconds"]


@pytest.mark.parametrize("queue", ["static", "shared"])
def test_requests_that_come_later_start_later(queue):
    lengths = (np.full(30, 10),)
    late = (np.linspace(0.0, 60.0, 30),)
    starts = []

    class Spy(Fixed):
        def decide(self, view):
            starts.append((view.decode, view.waiting))
            return super().decide(view)

    world = fleet(lengths=lengths, arrivals=late, replicas=2, queue=queue, max_num_seqs=2)
    outcome = simulate(world, lambda: Spy(0), 0)
    assert outcome.tokens == 300
    # Two seconds between requests of 0.1 s each: nobody ever waits, and the last one ends soon after it came.
    assert max(starts) == (1, 0)
    assert 60.0 < outcome.seconds < 60.5
    at_once = simulate(fleet(lengths=lengths, replicas=2, queue=queue, max_num_seqs=2), lambda: Fixed(0), 0)
    assert at_once.seconds < 2.0


def test_simulates_a_recorded_trace(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"prompt": "a", "n": 2, "output_tokens": [30, 70]}\n{"prompt": "b", "n": 1, "output_tokens": 9}\n'
    )
    command = ["simulate", "--out", str(tmp_path / "out"), "--set", f"workload.name={trace}"]
    command += ["--set", "simulate.policies=[off]", "--set", "simulate.replicas=1", "--set", "simulate.arrival_rate=5"]
    assert main(command) == 0
    row = json.loads((tmp_path / "out" / "results.json").read_text())["policies"][0]
    assert row["tokens"] == 109
    trace.write_text('{"prompt": "a"}\n')
    assert main(command) == 2


def test_command_writes_table_results_and_plot(tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text(
        "workload: {name: heavy_tail, scale: 0.02}\n"
        "simulate: {sequences: 32, replicas: 2, max_num_seqs: 8, policies: [off, goodput, oracle]}\n"
    )
    assert main(["simulate", "--config", str(config), "--out", str(tmp_path / "out")]) == 0
    assert "goodput" in capsys.readouterr().out
    results = json.loads(Path(tmp_path / "out" / "results.json").read_text())
    assert [row["policy"] for row in results["policies"]] == ["off", "goodput", "oracle"]
    assert main(["simulate", "--out", str(tmp_path), "--set", "simulate.device=H9"]) == 2
