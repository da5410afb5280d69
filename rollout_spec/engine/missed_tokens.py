"""What a draft model did not see while K was 0: its inputs, kept by KV-cache slot until somebody needs them.

A slot is a place for one token in the KV cache: block x block size + offset. Keyed by slot, the store needs to know
nothing of requests: a token that is computed again (after a rejected draft, a preemption, or in a block that another
request got) takes the place of the one before, and sequences that share a prefix share what was missed of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Missed:
    """Missed tokens of a batch, by sequence and position; arrays of one length. A shared slot appears once."""

    sequence: NDArray[np.int64]  # row of the batch
    position: NDArray[np.int64]
    slot: NDArray[np.int64]
    row: NDArray[np.int64]  # of the store

    def __len__(self) -> int:
        return len(self.row)

    def runs(self) -> NDArray[np.int64]:
        """[runs, 2]: from and to of each stretch of neighbouring positions of one sequence."""
        new = np.diff(self.sequence, prepend=-1) != 0
        new |= np.diff(self.position, prepend=-1) != 1
        starts = np.flatnonzero(new)
        return np.stack([starts, np.append(starts[1:], len(self))], axis=1)


class MissedTokens:
    """A store of at most `capacity` draft inputs; the caller empties it when it is full."""

    def __init__(self, capacity: int, slots: int, block_size: int) -> None:
        """`slots` of the KV cache, `block_size` of them a block. The memory is taken at the first `put`."""
        self.capacity = capacity
        self.used = 0  # rows, those that were since replaced included
        self._slots = slots
        self._block_size = block_size
        self._hidden: torch.Tensor | None = None  # [capacity, width]
        self._input_ids: torch.Tensor | None = None  # [capacity]
        self._row_of_slot: torch.Tensor | None = None  # [slots + 1], -1: not missed; the last is for padding, slot -1

    def put(self, slots: torch.Tensor, input_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Keep one step: slots [tokens], the draft model's input_ids [tokens] and hidden [tokens, width].

        There must be room: `used + tokens <= capacity`.
        """
        if self._hidden is None:
            self._hidden = hidden.new_empty((self.capacity, hidden.shape[-1]))
            self._input_ids = input_ids.new_empty(self.capacity)
            self._row_of_slot = torch.full((self._slots + 1,), -1, dtype=torch.int32, device=slots.device)
        assert self._input_ids is not None
        assert self._row_of_slot is not None
        end = self.used + len(slots)
        self._hidden[self.used : end] = hidden
        self._input_ids[self.used : end] = input_ids
        self._row_of_slot[slots] = torch.arange(self.used, end, dtype=torch.int32, device=slots.device)
        self.used = end

    def seen(self, slots: torch.Tensor) -> None:
        """The draft model has computed these."""
        if self._row_of_slot is not None:
            self._row_of_slot[slots] = -1

    def clear(self) -> None:
        if self.used:
            assert self._row_of_slot is not None
            self._row_of_slot.fill_(-1)
        self.used = 0

    def of(self, block_table: torch.Tensor, until: torch.Tensor, longest: int) -> Missed:
        """What sequences missed before the position `until` [batch], each at most `longest` long.

        block_table [batch, blocks]. Waits for the device.
        """
        assert self._row_of_slot is not None
        longest = min(longest, block_table.shape[1] * self._block_size)
        positions = torch.arange(longest, device=block_table.device)
        slots = block_table[:, positions // self._block_size].long() * self._block_size + positions % self._block_size
        rows = self._row_of_slot[slots]
        wanted = (rows >= 0) & (positions < until[:, None])
        sequence, position = wanted.nonzero(as_tuple=True)
        slot = slots[wanted].cpu().numpy()
        first = np.sort(np.unique(slot, return_index=True)[1])
        return Missed(*(a[first] for a in (sequence.cpu().numpy(), position.cpu().numpy(), slot, _numpy(rows[wanted]))))

    def inputs(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids [rows] and hidden [rows, width]."""
        assert self._input_ids is not None
        assert self._hidden is not None
        return self._input_ids[rows], self._hidden[rows]


def batches(runs: NDArray[np.int64], max_tokens: int, max_runs: int) -> Iterator[NDArray[np.int64]]:
    """Runs [runs, 2] in order, cut into batches of at most so many tokens and runs; each batch [runs, 2]."""
    batch: list[tuple[int, int]] = []
    room = max_tokens
    for start, end in runs.tolist():
        while start < end:
            if not room or len(batch) == max_runs:
                yield np.array(batch)
                batch, room = [], max_tokens
            cut = min(end, start + room)
            batch.append((start, cut))
            room -= cut - start
            start = cut
    if batch:
        yield np.array(batch)


def _numpy(rows: torch.Tensor) -> NDArray[np.int64]:
    return rows.long().cpu().numpy()
