from __future__ import annotations

import pytest

from rollout_spec.rollout.ledger import Request
from rollout_spec.rollout.types import Span, SpeculationStats
from rollout_spec.rollout.versions import Versions, extend


@pytest.mark.parametrize(("steps", "drafted", "accepted", "length"), [(4, 12, 6, 2.5), (3, 9, 0, 1.0), (1, 8, 8, 9.0)])
def test_acceptance_length_counts_the_token_that_is_always_there(
    steps: int, drafted: int, accepted: int, length: float
) -> None:
    assert SpeculationStats(steps, drafted, accepted).acceptance_length == length


def test_without_drafts_there_is_no_acceptance_length() -> None:
    assert SpeculationStats(0, 0, 0).acceptance_length is None


def test_versions_count_what_they_name() -> None:
    start = Versions()
    both = start.updated(policy=7, draft=3)
    assert (both.policy, both.draft, both.targets) == (7, 3, 1)
    head = both.updated(policy=None, draft=4)
    assert (head.policy, head.draft, head.targets) == (7, 4, 1)
    assert head.cache_salt == both.cache_salt != start.cache_salt
    # The same number again is another update: its cached blocks are not those of the first.
    assert head.updated(policy=7, draft=None).cache_salt != head.cache_salt


def test_a_span_without_tokens_is_replaced() -> None:
    spans = extend((Span(0, 1, 1),), Span(0, 2, 1))
    assert spans == (Span(0, 2, 1),)
    assert extend(spans, Span(5, 3, 1)) == (Span(0, 2, 1), Span(5, 3, 1))


def test_a_rollout_names_the_version_of_each_token() -> None:
    request = Request(0, 0, [1, 2], "x", None, (Span(0, 4, 1), Span(2, 5, 1), Span(3, 5, 2), Span(5, 6, 2)))
    rollout = request.rollout([9] * 5, None, "length")
    assert rollout.spans == (Span(0, 4, 1), Span(2, 5, 1), Span(3, 5, 2))  # the last change made no token
    assert rollout.policy_versions == [4, 4, 5, 5, 5]
    assert rollout.policy_version == 5
    assert request.rollout([], None, "abort").policy_versions == []
    assert request.rollout([], None, "abort").policy_version == 4
