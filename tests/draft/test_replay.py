from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from rollout_spec.draft.replay import Replay
from rollout_spec.draft.samples import Sample


def sample(length: int, name: str = "p") -> Sample:
    return Sample(name, [1, 2], list(range(length)), 1.0, True)


def heavy_tail(rng: Random, count: int) -> list[Sample]:
    return [sample(min(int(20 * rng.paretovariate(1.0)), 900), f"p{index}") for index in range(count)]


def test_never_more_tokens_than_its_bound() -> None:
    rng, replay = Random(0), Replay(5000, 8)
    for version in range(20):
        replay.add(heavy_tail(rng, 50), version)
        assert replay.tokens == sum(kept.size for kept in replay) <= 5000
    assert replay.tokens > 4000
    assert replay.add([sample(5000), sample(0)], 20) == 0


def test_long_responses_are_not_drowned_by_short_ones() -> None:
    replay = Replay(20_000, 100)
    replay.add([sample(800, f"long{index}") for index in range(5)], 0)
    for _ in range(50):
        replay.add([sample(20) for _ in range(100)], 0)
    lengths = Counter(len(kept.sample.response) for kept in replay)
    assert lengths[800] == 5
    assert lengths[20] > 600
    replay.add([sample(800) for _ in range(50)], 0)
    of_long = sum(kept.size for kept in replay if len(kept.sample.response) == 800)
    assert of_long == pytest.approx(10_000, abs=1000)


def test_the_newest_versions_stay() -> None:
    replay = Replay(10**6, 3)
    for version in (10, 20, 40, 30, 50):
        replay.add([sample(10)], version)
    assert replay.versions == [30, 40, 50]
    replay.add([sample(10)], 5)  # a straggler
    assert replay.versions == [30, 40, 50]


def test_within_a_stratum_the_oldest_goes_first() -> None:
    replay = Replay(5 * 12, 100)
    for version in (1, 2, 3, 0, 4, 5):
        replay.add([sample(10)], version)
    assert replay.versions == [1, 2, 3, 4, 5]
    assert [kept.policy_version for kept in replay.draw(24)] == [5, 4]


def test_a_draw_takes_from_all_lengths_the_newest_first() -> None:
    replay = Replay(10**6, 100)
    for version in range(10):
        replay.add([sample(600, "long")] + [sample(20, "short") for _ in range(300)], version)
    drawn = replay.draw(8000)
    assert sum(kept.size for kept in drawn) <= 8000
    by_name = Counter()
    for kept in drawn:
        by_name[kept.sample.prompt_id] += kept.size
    assert min(by_name.values()) > 3000
    longs = [kept.policy_version for kept in drawn if kept.sample.prompt_id == "long"]
    assert longs == list(range(9, 9 - len(longs), -1))
    assert len(replay.draw(10**9)) == len(replay)
    assert replay.draw(5) == []


def test_it_goes_on_from_its_file(tmp_path: Path) -> None:
    path, rng = tmp_path / "folder" / "rollouts.jsonl", Random(2)
    replay = Replay(4000, 4, path)
    for version in range(12):
        replay.add(heavy_tail(rng, 40), version)
        assert len(path.read_text().splitlines()) <= max(2 * len(replay), 40)
    again = Replay(4000, 4, path)
    assert again.tokens == replay.tokens
    assert sorted(map(repr, again)) == sorted(map(repr, replay))
    for each in (again, replay):
        each.add(heavy_tail(Random(3), 30), 12)
    assert sorted(map(repr, again)) == sorted(map(repr, replay))


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    Replay(1000, 4, path).add([sample(10), sample(20)], 1)
    with path.open("a") as file:
        file.write('{"policy_version": 1, "prompt_id": "c", "prom')
    again = Replay(1000, 4, path)
    assert sorted(len(kept.sample.response) for kept in again) == [10, 20]
    again.add([sample(30)], 2)
    assert len(Replay(1000, 4, path)) == 3


def test_another_bound_holds_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    Replay(1000, 4, path).add([sample(10) for _ in range(20)], 1)
    assert Replay(100, 4, path).tokens <= 100
    assert len(path.read_text().splitlines()) <= 8


def test_a_trainer_that_goes_back_takes_its_rollouts_back(tmp_path: Path) -> None:
    """Else those of the abandoned steps, being newer, would keep the new ones out for as long as versions are kept."""
    path = tmp_path / "rollouts.jsonl"
    replay = Replay(1000, 3, path)
    for version in range(1, 9):
        replay.add([sample(10)], version)
    again = Replay(1000, 3, path)
    again.forget_from(7)
    again.add([sample(10)], 7)
    assert again.versions == [6, 7]
    assert again.tokens == 24
    assert Replay(1000, 3, path).versions == [6, 7]
