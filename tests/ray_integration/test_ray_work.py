"""The queue: order, groups, fair shares, deaths. No Ray."""

from __future__ import annotations

import random

import pytest
from rollout_spec_ray.work import Piece, Work

from rollout_spec.control.makespan import Lengths


def work(*groups: int, capacity: int = 8, lengths: Lengths | None = None, **options: object) -> Work:
    """Prompt i has groups[i] samples."""
    made = Work(lengths or Lengths(), capacity=capacity, **options)  # type: ignore[arg-type]
    for prompt, n in enumerate(groups):
        made.add(prompt, range(n))
    return made


def finish(made: Work, engine: int, pieces: list[Piece], tokens: int = 10) -> None:
    for prompt, samples in pieces:
        for sample in samples:
            assert made.finish(engine, prompt, sample, tokens)


def test_prompts_that_were_long_before_start_first() -> None:
    lengths = Lengths()
    for prompt, tokens in ((0, 10), (1, 900), (2, 300)):
        lengths.finished(prompt, tokens)
    made = work(1, 1, 1, 1, capacity=2, lengths=lengths)
    # Prompt 3 is unknown: expected to be as long as the mean, 403.
    assert [piece.prompt for piece in made.take(0, 1)] == [1, 3]
    assert [piece.prompt for piece in made.take(1, 1)] == [2, 0]


def test_as_submitted_is_as_submitted() -> None:
    lengths = Lengths()
    lengths.finished(1, 900)
    made = work(1, 1, 1, capacity=3, lengths=lengths, longest_first=False)
    assert [piece.prompt for piece in made.take(0, 1)] == [0, 1, 2]


def test_a_sibling_that_was_long_brings_the_rest_forward() -> None:
    made = work(3, 1, 1, 1, capacity=2)
    (first,) = made.take(0, 1)
    assert first == Piece(0, (0, 1))
    other = made.take(1, 2)
    assert [piece.prompt for piece in other] == [1, 2]
    finish(made, 1, other, tokens=5)
    assert made.finish(0, 0, 0, 5000)
    # The rest of the group goes to the engine that has its prefix, at once.
    assert made.take(0, 2) == [Piece(0, (2,))]
    assert made.take(1, 2) == [Piece(3, (0,))]


def test_groups_stay_together_where_they_fit() -> None:
    made = work(4, 4, 4, 4, 4, 4, capacity=8)
    assert made.take(0, 2) == [Piece(0, (0, 1, 2, 3)), Piece(1, (0, 1, 2, 3))]
    assert made.take(1, 2) == [Piece(2, (0, 1, 2, 3)), Piece(3, (0, 1, 2, 3))]


def test_the_rest_of_a_split_group_waits_for_its_engine_until_nothing_else_is_left() -> None:
    made = work(12, 4, capacity=8)
    assert made.take(0, 2) == [Piece(0, tuple(range(8)))]
    assert made.take(1, 2) == [Piece(1, (0, 1, 2, 3)), Piece(0, (8, 9, 10, 11))]


def test_what_fits_at_once_is_shared_evenly() -> None:
    made = work(*[1] * 6, capacity=8)
    assert len(made.take(0, 2)) == len(made.take(1, 2)) == 3
    single = work(8, capacity=8)
    assert [len(single.take(engine, 2)[0].samples) for engine in (0, 1)] == [4, 4]


def test_results_of_an_engine_that_lost_them_do_not_count() -> None:
    made = work(2)
    (piece,) = made.take(0, 1)
    made.engine_died(0)
    assert not made.finish(0, 0, 0, 10)
    assert (made.waiting, made.live, made.finished, made.lost) == (2, 0, 0, 2)
    assert made.take(1, 1) == [piece]


def run_until_done(made: Work, poison: set[int], rng: random.Random, kill: float = 0.0) -> int:
    """Two engines; one that holds a poison prompt dies of it before anything in it finishes. Returns the deaths."""
    deaths = 0
    while not made.done:
        engine = rng.randrange(2)
        made.take(engine, 2)
        held = sorted(made._of.get(engine, ()))
        if not held:
            continue
        if poison & {prompt for prompt, _ in held} or rng.random() < kill:
            made.engine_died(engine)
            deaths += 1
        else:
            prompt, sample = rng.choice(held)
            made.finish(engine, prompt, sample, 10)
        assert deaths < 1000
    return deaths


@pytest.mark.parametrize("seed", range(20))
def test_poison_is_found_and_nobody_is_blamed_for_a_neighbour(seed: int) -> None:
    rng = random.Random(seed)
    made = work(*[rng.randint(1, 6) for _ in range(40)], capacity=16)
    poison = set(rng.sample(range(40), 2))
    total = made.waiting
    deaths = run_until_done(made, poison, rng)
    assert set(made.quarantined) == poison
    assert made.finished == total - sum(len(samples) for samples in made.quarantined.values())
    assert deaths <= 2 * 2 * 3


@pytest.mark.parametrize("seed", range(5))
def test_random_deaths_lose_nothing(seed: int) -> None:
    rng = random.Random(seed)
    made = work(*[3] * 30, capacity=16, tries=10)
    assert run_until_done(made, set(), rng, kill=0.1) > 0
    assert (made.finished, made.quarantined) == (90, {})


def test_a_node_that_goes_blames_no_prompt() -> None:
    made = work(1, tries=2)
    for _ in range(10):
        made.take(0, 1)
        assert made.engine_died(0, blame=False) == []
    assert made.take(0, 1) == [Piece(0, (0,))]


def test_the_order_follows_what_becomes_known_of_all() -> None:
    lengths = Lengths()
    lengths.finished(2, 100)
    made = work(*[1] * 8, capacity=2, lengths=lengths)
    assert [piece.prompt for piece in made.take(0, 1)] == [0, 1]  # all alike
    for _ in range(200):
        lengths.finished(None, 2000)  # the others turn out to be long: 2 was short
    taken = [piece.prompt for engine in (1, 2, 3) for piece in made.take(engine, 1)]
    assert taken == [3, 4, 5, 6, 7, 2]
