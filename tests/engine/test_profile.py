"""The profiler on real engines: what it measures, that it goes on after a stop, and whom the profile serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fresh import engine, run_fresh, scheduler_of

from rollout_spec.config import Config, ConfigError, parse_config
from rollout_spec.profile.record import Profile
from rollout_spec.profile.report import plot, render
from rollout_spec.profile.run import Profiler

BATCHES, KS = [1, 3], [1, 2]


def settings(model: Path, **profile: Any) -> Config:
    return parse_config(
        {
            "model": str(model),
            "engine": {
                "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "kv_cache_gib": 0.1,
                "extra": {"skip_tokenizer_init": True},
            },
            "drafter": {"k_max": 2, "synthetic_acceptance": [0.8, 0.6]},
            "sampling": {"temperature": 0},
            "profile": {"batches": BATCHES, "ks": KS, "rounds": 2, "context": 96, "long_context": 400} | profile,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def measured(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("profile") / "profile.json"
    Profiler(settings(tiny_model), out).run()
    return out


def test_measures_every_batch_and_k_with_and_without_the_drafter(measured: Path) -> None:
    profile = Profile.load(measured)
    assert {(c.batch, c.k) for c in profile.cells} == {(b, k) for b in BATCHES for k in (0, *KS)}
    assert {c.batch for c in profile.cells if c.context > 350} == set(BATCHES)
    assert all(c.samples >= 2 and c.seconds > c.host_seconds > 0 for c in profile.cells)
    assert all(0.5 <= c.filled <= 1 for c in profile.cells)
    assert set(profile.off) == set(BATCHES)
    assert profile.prefill_token_seconds > 0
    assert profile.acceptance.accepted == (0.8, 0.6)
    assert profile.engine["dtype"] == "float32"
    assert not measured.with_name("profile.partial.json").exists()
    text = render(profile)
    assert "num_speculative_tokens_per_batch_size" in text
    assert plot(profile, measured.with_suffix(".png")).stat().st_size > 10_000  # type: ignore[union-attr]


def test_goes_on_after_a_stop_and_refuses_what_is_another_measurement(measured: Path, tiny_model: Path) -> None:
    out = measured.with_name("again.json")
    profiler = Profiler(settings(tiny_model, rounds=1), out)
    # As an interruption leaves it: one batch of two is there, with times that no engine has.
    profiler.state["samples"]["1 short"] = [[9.0, k, n, k, 100.0, 1.0, k, 0] for k, n in [(0, 0), (1, 1), (2, 2)] * 3]
    profiler.state["rounds"]["1 short"] = 1
    profiler._keep()
    with pytest.raises(ConfigError, match="another configuration"):
        Profiler(settings(tiny_model, context=64), out)
    profile = Profiler(settings(tiny_model, rounds=1), out).run()
    assert {c.seconds for c in profile.cells if c.batch == 1 and c.context < 350} == {9.0}
    assert all(c.seconds < 1.0 for c in profile.cells if c.batch == 3)


def start(model: Path, profile: str, dtype: str) -> dict[str, Any]:
    with engine(
        model, engine__dtype=dtype, policy__profile=profile, drafter__k_max=2, drafter__synthetic_acceptance=[0.8, 0.6]
    ) as worker:
        known = scheduler_of(worker)._loop.policy.cost.known  # before any step: without a profile it is not
        worker.generate([[5, 6, 7]], output_tokens=[[20]])
        return {"known": known, "failed": worker.metrics()["rollout_spec/controller_failed"]}


def test_serves_the_engine_it_was_measured_on_and_no_other(measured: Path, tiny_model: Path) -> None:
    assert run_fresh(start, tiny_model, str(measured), "float32") == {"known": True, "failed": 0}
    with pytest.raises(ConfigError, match=r"another engine \(dtype 'float32', here 'bfloat16'\).*rollout-spec profile"):
        run_fresh(start, tiny_model, str(measured), "bfloat16")


def test_bad_input_is_refused_before_an_engine_starts(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile.ks goes to 2, above drafter.k_max 1"):
        parse_config({"drafter": {"k_max": 1}, "profile": {"ks": [2]}})
    with pytest.raises(ConfigError, match=r"profile.batches goes to 64"):
        parse_config({"profile": {"batches": [64]}})
    with pytest.raises(ConfigError, match=r"long_context 500 leaves fewer than"):
        Profiler(settings(tiny_model, long_context=500), tmp_path / "p.json")
    broken = tmp_path / "q.partial.json"
    broken.write_text(json.dumps({"no": "fingerprint"}))
    with pytest.raises(ConfigError, match=r"damaged"):
        Profiler(settings(tiny_model), tmp_path / "q.json")
