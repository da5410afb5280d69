"""When sequences move, and that the queue's books are right when they do. No Ray."""

from __future__ import annotations

import pytest
from rollout_spec_ray.balance import Balance, Load
from rollout_spec_ray.pace import Pace, Window
from rollout_spec_ray.work import Piece, Work

from rollout_spec.control.makespan import Lengths


def balance(seconds_of_step: float, seconds_of_sequence: float, upto: int = 16) -> Balance:
    """Has seen every size up to `upto`."""
    made = Balance()
    for live in range(1, upto + 1):
        made.measured(live, seconds_of_step + seconds_of_sequence * live, live)
    return made


def rest(so_far: int) -> float:
    return 1000.0


def test_half_the_difference_moves_from_the_fullest_to_the_emptiest() -> None:
    known = balance(0.01, 0.01)
    loads = [Load(0, [500] * 7, 10), Load(1, [600], 10), Load(2, [500] * 3, 10)]
    move = known.best(loads, rest)
    assert move is not None
    assert move[:3] == (0, 1, 3)
    # From 7 live to 4 in both: 1000 tokens of 0.03 s less each, and 1530 tokens are read at the fastest pace known.
    assert move.gain == pytest.approx(1000 * 0.03 - 3 * 510 / (16 / 0.17), rel=1e-6)


def test_nothing_moves_where_a_step_costs_the_same_for_all() -> None:
    assert balance(0.02, 0.0).best([Load(0, [500] * 7, 10), Load(1, [], 0)], rest) is None


def test_nothing_moves_for_less_than_reading_it_again_costs() -> None:
    known = balance(0.01, 0.01)
    loads = [Load(0, [500] * 4, 10_000), Load(1, [], 0)]
    assert known.best(loads, rest) is None
    assert known.best([Load(0, [500] * 4, 10), Load(1, [], 0)], rest) is not None


def test_nothing_moves_for_a_gain_that_was_never_measured() -> None:
    known = Balance()
    known.measured(8, 0.1, 8)
    assert known.pace(3) == known.pace(20) == pytest.approx(0.1)
    assert known.best([Load(0, [500] * 8, 10), Load(1, [], 0)], rest) is None
    assert Balance().best([Load(0, [500] * 8, 10), Load(1, [], 0)], rest) is None


def test_the_last_of_two_does_not_move() -> None:
    assert balance(0.01, 0.01).best([Load(0, [500, 400], 10), Load(1, [3], 10)], rest) is None
    assert balance(0.01, 0.01).best([Load(0, [500], 10), Load(1, [], 0)], rest) is None


def test_a_pace_is_a_window_of_steps() -> None:
    pace = Pace()
    assert pace.close(10) is None
    pace.step(4, 0.5)
    pace.step(2, 1.0)
    assert pace.close(12) == Window(3.0, 1.5, 12)
    assert pace.close(12) is None


def moved_work() -> tuple[Work, dict[tuple[int, int], str]]:
    """Engine 0 holds four samples of prompt 0; two of them are on their way to engine 1."""
    work = Work(Lengths(), capacity=8)
    work.add(0, range(4))
    work.take(0, 1)
    for sample in (0, 1):
        work.move(0, 0, sample, 1, f"begun {sample}")
    return work, {(0, 0): "begun 0", (0, 1): "begun 1"}


def test_a_moved_sequence_is_the_other_engines_and_ends_there() -> None:
    work, begun = moved_work()
    assert (work.live, work.held_by(0), work.held_by(1), work.coming(1)) == (4, 2, 0, 2)
    assert not work.finish(0, 0, 0, 10)
    assert work.take(1, 2) == [Piece(0, (0,)), Piece(0, (1,))]
    assert (work.live, work.held_by(1), work.coming(1), work.begun) == (4, 2, 0, begun)
    assert work.finish(1, 0, 0, 10)
    assert work.finish(1, 0, 1, 10)
    assert work.begun == {}
    assert work.finish(0, 0, 2, 10)
    assert work.finish(0, 0, 3, 10)
    assert work.done


@pytest.mark.parametrize("arrived", [False, True])
def test_an_engine_that_dies_loses_nothing_of_what_has_moved_to_it(arrived: bool) -> None:
    work, begun = moved_work()
    if arrived:
        work.take(1, 2)
    assert work.engine_died(1) == []
    assert (work.live, work.waiting, work.coming(1)) == (2, 2, 0)
    assert work.begun == begun  # it goes on from there
    for piece in work.take(2, 2):
        for sample in piece.samples:
            assert work.finish(2, piece.prompt, sample, 10)
    assert work.finish(0, 0, 2, 10)
    assert work.finish(0, 0, 3, 10)
    assert work.done


def test_engines_with_suspects_give_and_take_nothing() -> None:
    work = Work(Lengths(), capacity=8)
    work.add(0, range(2))
    work.take(0, 1)
    work.engine_died(0)
    work.take(0, 1)
    assert not work.may_move(0)
    assert work.may_move(1)
