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
