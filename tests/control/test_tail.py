from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.control.tail import Tail, tail_seconds


def test_the_tail_begins_below_a_tenth_of_the_most() -> None:
    tail = Tail()
    for alive in (5, 100, 50, 10, 9, 1):
        tail.step(alive, 1.0)
    assert tail.seconds == 2.0


@pytest.mark.parametrize("count", [1, 10, 11, 20, 21, 95])
def test_it_is_the_same_from_when_sequences_ended(count: int) -> None:
    tail = Tail()
    for alive in range(count, 0, -1):
        tail.step(alive, 1.0)
    assert tail_seconds(np.random.default_rng(0).permutation(np.arange(1.0, count + 1))) == tail.seconds


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
