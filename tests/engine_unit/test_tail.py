from __future__ import annotations

import pytest

from rollout_spec.engine.tail import Tail


def test_the_tail_begins_below_a_tenth_of_the_most() -> None:
    tail = Tail()
    for alive in (5, 100, 50, 10, 9, 1):
        tail.step(alive, 1.0)
    assert tail.seconds == 2.0


def test_a_drained_engine_begins_a_new_rollout() -> None:
    tail = Tail()
    tail.step(100, 1.0)
    tail.drained()
    tail.step(5, 1.0)
    tail.step(4, 1.0)
    assert tail.seconds == 0.0


@pytest.mark.parametrize("most", [1, 9, 10])
def test_a_batch_of_ten_or_less_has_no_tail(most: int) -> None:
    tail = Tail()
    for alive in range(most, 0, -1):
        tail.step(alive, 1.0)
    assert tail.seconds == 0.0
