from __future__ import annotations

import pytest

from rollout_spec.rollout.types import SpeculationStats


@pytest.mark.parametrize(("steps", "drafted", "accepted", "length"), [(4, 12, 6, 2.5), (3, 9, 0, 1.0), (1, 8, 8, 9.0)])
def test_acceptance_length_counts_the_token_that_is_always_there(
    steps: int, drafted: int, accepted: int, length: float
) -> None:
    assert SpeculationStats(steps, drafted, accepted).acceptance_length == length


def test_without_drafts_there_is_no_acceptance_length() -> None:
    assert SpeculationStats(0, 0, 0).acceptance_length is None
