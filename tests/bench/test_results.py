from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic import ARMS, PROVENANCE, WORKLOAD, flat_run, make_results, make_run, timed

from rollout_spec import provenance
from rollout_spec.bench.results import (
    SCHEMA,
    Arm,
    LiveBatch,
    Results,
    live_batch_bounds,
    speedup,
    speedup_by_live_batch,
    summarise,
)
from rollout_spec.config import Config, ConfigError


def test_speedup_is_paired_by_repeat() -> None:
    results = timed(off=[10.0, 20.0, 30.0], goodput=[5.0, 16.0, 20.0])
    arm = results.arm("goodput")
    assert arm.speedup_over_off
    assert arm.makespan_s
    assert (arm.speedup_over_off.median, arm.speedup_over_off.low, arm.speedup_over_off.high) == (1.5, 1.25, 2.0)
    assert (arm.makespan_s.median, arm.makespan_s.min, arm.makespan_s.max) == (16.0, 5.0, 20.0)
    assert results.arm("off").speedup_over_off == speedup(results.arm("off"), results.arm("off"))


def test_runs_without_a_partner_are_left_out() -> None:
    results = Results(PROVENANCE, WORKLOAD)
    results.add_arm("off", "off")
    results.add_arm("goodput", "goodput", "ngram")
    for repeat, seconds in ((2, 30.0), (0, 10.0)):
        results.add_run("off", flat_run(repeat, seconds))
    assert results.arm("goodput").speedup_over_off is None
    for repeat, seconds in ((1, 1.0), (2, 20.0)):
        results.add_run("goodput", flat_run(repeat, seconds))
    ratio = results.arm("goodput").speedup_over_off
    assert ratio
    assert (ratio.median, ratio.low, ratio.high) == (1.5, 1.5, 1.5)
    assert [run.repeat for run in results.arm("off").runs] == [0, 2]


def test_ratio_follows_when_off_finishes_last() -> None:
    results = Results(PROVENANCE, WORKLOAD)
    results.add_arm("goodput", "goodput")
    results.add_run("goodput", flat_run(0, 2.0))
    results.add_arm("off", "off")
    results.add_run("off", flat_run(0, 3.0))
    ratio = results.arm("goodput").speedup_over_off
    assert ratio
    assert ratio.median == 1.5


def test_no_ratio_without_off() -> None:
    assert timed(table=[2.0], goodput=[1.0]).arm("goodput").speedup_over_off is None


def test_no_drafts_and_no_runs_are_null() -> None:
    results = make_results(["off"], repeats=1)
    results.add_arm("goodput", "goodput", "ngram")
    off, pending = results.to_dict()["arms"]
    assert off["runs"][0]["acceptance_length"] is None
    assert off["runs"][0]["acceptance_per_position"] == []
    assert pending["makespan_s"] is None
    assert pending["speedup_over_off"] is None
    assert summarise(Arm(name="x", policy="off"), None).makespan_s is None


@pytest.mark.parametrize(
    ("live", "bounds"),
    [(1, (1, 1)), (2, (2, 2)), (3, (3, 4)), (4, (3, 4)), (5, (5, 8)), (32, (17, 32)), (33, (33, 64))],
)
def test_live_batch_bounds(live: int, bounds: tuple[int, int]) -> None:
    assert live_batch_bounds(live) == bounds


def test_speedup_by_live_batch_pools_paired_repeats() -> None:
    def arm(name: str, *runs: tuple[int, list[LiveBatch]]) -> Arm:
        made = [flat_run(repeat, 1.0).model_copy(update={"by_live_batch": buckets}) for repeat, buckets in runs]
        return Arm(name=name, policy=name, runs=made)

    def bucket(lo: int, hi: int, seconds: float, tokens: int) -> LiveBatch:
        return LiveBatch(lo=lo, hi=hi, seconds=seconds, output_tokens=tokens)

    off = arm("off", (0, [bucket(1, 1, 1.0, 10), bucket(2, 2, 1.0, 7)]), (1, [bucket(1, 1, 3.0, 30)]))
    ours = arm(
        "goodput",
        (0, [bucket(1, 1, 1.0, 30), bucket(3, 4, 1.0, 9), bucket(2, 2, 0.0, 0)]),
        (1, [bucket(1, 1, 1.0, 10)]),
        (2, [bucket(1, 1, 9.0, 1)]),
    )
    # Bucket 1: (30 + 10) / 2 s against (10 + 30) / 4 s. 3-4 is ours alone, in 2 we spent no time, repeat 2 is unpaired.
    assert speedup_by_live_batch(ours, off) == [(1, 1, 2.0)]


def test_json_round_trip(tmp_path: Path) -> None:
    results = make_results(repeats=2)
    path = tmp_path / "deep" / "results.json"
    results.save(path)
    tree = json.loads(path.read_text())
    assert tree["schema"] == SCHEMA
    assert tree == results.to_dict()
    assert set(tree["arms"][1]["runs"][0]["k_histogram"]) == {"3"}
    assert Results.load(path).to_dict() == tree


def test_strings_with_brackets_survive(tmp_path: Path) -> None:
    command = ["bench", "a[1,  2]", "line\nbreak ]", '"[\\']
    Results({**PROVENANCE, "command": command}, WORKLOAD).save(tmp_path / "r.json")
    assert Results.load(tmp_path / "r.json").provenance["command"] == command


def test_save_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    results = timed(off=[1.0])
    results.save(path)
    before = path.read_text()
    results.add_run("off", flat_run(1, 2.0))

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        results.save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_resume_runs_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    policy, drafter, choose = ARMS["goodput"]
    first = Results.resume(path, PROVENANCE, WORKLOAD)
    first.add_arm("goodput", policy, drafter)
    first.add_run("goodput", make_run(choose, 1))
    first.save(path)

    again = Results.resume(path, {**PROVENANCE, "time": "later"}, WORKLOAD)
    again.add_arm("goodput", policy, drafter)
    assert again.missing("goodput", 3) == [0, 2]
    assert again.missing("table", 2) == [0, 1]
    assert again.provenance["resumed_at"] == ["later"]
    with pytest.raises(ValueError, match="already has repeat 1"):
        again.add_run("goodput", make_run(choose, 1))
    with pytest.raises(ValueError, match="already goodput"):
        again.add_arm("goodput", policy, "suffix")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config_fingerprint": "other"}, "another configuration"),
        ({"versions": {**PROVENANCE["versions"], "vllm": "0.32.0"}}, "other versions.vllm"),
        ({"device": {**PROVENANCE["device"], "cpu": "Another"}}, "other device.cpu"),
    ],
)
def test_resume_refuses_another_set_up(tmp_path: Path, change: dict[str, object], said: str) -> None:
    timed(off=[1.0]).save(tmp_path / "r.json")
    with pytest.raises(ConfigError, match=said):
        Results.resume(tmp_path / "r.json", {**PROVENANCE, **change}, WORKLOAD)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "has schema None"),
        ('{"schema": "rollout-spec/bench/0"}', "bench/0"),
        (f'{{"schema": "{SCHEMA}", "provenance": {{}}, "workload": {{}}, "arms": [{{}}]}}', "not a complete results"),
    ],
)
def test_load_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        Results.load(path)


def test_fingerprint_ignores_only_what_a_continuation_may_change() -> None:
    def of(**bench: object) -> str:
        return provenance.fingerprint(Config.model_validate({"bench": bench}).model_dump(mode="json"))

    assert of() == of(repeats=9) == of(arms=["off"])
    assert of() != of(seed=1)


def test_provenance_is_plain_and_names_no_host() -> None:
    found = provenance.collect()
    json.dumps(found)
    assert found["versions"]["numpy"]
    assert found["device"]["cores"] >= 1
    assert "host" not in json.dumps(list(found) + list(found["device"]))
