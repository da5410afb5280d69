from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.engine.missed_tokens import Missed, MissedTokens, batches

BLOCK = 4
TABLE = torch.tensor([[1, 2, 0], [1, 3, 5]], dtype=torch.int32)  # two sequences that share their first block


def store(capacity: int = 64) -> MissedTokens:
    return MissedTokens(capacity, slots=8 * BLOCK, block_size=BLOCK)


def put(missed: MissedTokens, slots: list[int], first: int = 0) -> None:
    """Tokens numbered from `first`; a token's hidden state is its number twice."""
    ids = torch.arange(first, first + len(slots), dtype=torch.int32)
    missed.put(torch.tensor(slots), ids, ids[:, None].float().expand(-1, 2))


def found(missed: MissedTokens, until: list[int]) -> list[tuple[int, int, int, int]]:
    """(sequence, position, slot, token) of what was missed."""
    tokens = missed.of(TABLE, torch.tensor(until), longest=12)
    ids, hidden = missed.inputs(torch.from_numpy(tokens.row))
    assert torch.equal(hidden, ids[:, None].float().expand(-1, 2))
    return list(
        zip(tokens.sequence.tolist(), tokens.position.tolist(), tokens.slot.tolist(), ids.tolist(), strict=True)
    )


def test_what_was_put_is_found_by_sequence_and_position() -> None:
    missed = store()
    put(missed, [8, 9, 12], first=10)  # positions 4 and 5 of the first sequence, 4 of the second
    put(missed, [20], first=20)  # position 8 of the second
    assert found(missed, [12, 12]) == [(0, 4, 8, 10), (0, 5, 9, 11), (1, 4, 12, 12), (1, 8, 20, 20)]
    assert found(missed, [5, 8]) == [(0, 4, 8, 10), (1, 4, 12, 12)]


def test_a_token_computed_again_takes_the_place_of_the_first() -> None:
    missed = store()
    put(missed, [8, 9, 10], first=10)  # two of them were rejected drafts
    put(missed, [9], first=30)
    assert found(missed, [6, 0]) == [(0, 4, 8, 10), (0, 5, 9, 30)]


def test_what_was_seen_or_cleared_is_not_missed() -> None:
    missed = store()
    put(missed, [8, 9])
    missed.seen(torch.tensor([8]))
    assert [slot for _, _, slot, _ in found(missed, [12, 12])] == [9]
    missed.clear()
    assert found(missed, [12, 12]) == []
    assert missed.used == 0


def test_a_shared_slot_is_computed_once() -> None:
    missed = store()
    put(missed, [4, 5, 6, 7, 12])  # the shared block, and one of the second sequence alone
    assert found(missed, [4, 5]) == [(0, 0, 4, 0), (0, 1, 5, 1), (0, 2, 6, 2), (0, 3, 7, 3), (1, 4, 12, 4)]


def test_padding_is_nobodys() -> None:
    missed = store()
    put(missed, [-1, 8])
    assert found(missed, [12, 12]) == [(0, 4, 8, 1)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), unique=True, min_size=1), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_batches_cover_every_token_once_and_in_order(tokens: list[tuple[int, int]], limit: int) -> None:
    tokens.sort()
    sequence, position = np.array(tokens).T
    missed = Missed(sequence, position, np.arange(len(tokens)), np.arange(len(tokens)))
    covered: list[int] = []
    for batch in batches(missed.runs(), max_tokens=limit, max_runs=2):
        assert len(batch) <= 2
        assert (batch[:, 1] - batch[:, 0]).sum() <= limit
        assert batch[0, 0] == len(covered)
        for start, end in batch.tolist():
            assert len(set(sequence[start:end])) == 1
            assert (np.diff(position[start:end]) == 1).all()
            covered += range(start, end)
    assert covered == list(range(len(tokens)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hidden_states_keep_their_type(dtype: torch.dtype) -> None:
    missed = store()
    missed.put(torch.tensor([8]), torch.tensor([5]), torch.ones(1, 3, dtype=dtype))
    ids, hidden = missed.inputs(torch.tensor([0]))
    assert ids.tolist() == [5]
    assert hidden.dtype == dtype
