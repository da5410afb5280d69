"""What was asked for, by index. The driver keeps ids and digests; prompts themselves lie in Ray's object store."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ray

from rollout_spec.workload.workload import Group
from rollout_spec_ray.engine import Begun, Errand
from rollout_spec_ray.prompts import digest
from rollout_spec_ray.work import Piece

# Prompts of an object: few enough to be sent whole for one of them.
BLOCK = 64


class Catalogue:
    """Prompts are added once, in the order of their file."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.digests = array("q")
        self.samples = array("q")
        self._blocks: list[Any] = []
        self._open: list[bytes] = []

    def add(self, group: Group) -> None:
        self.ids.append(group.prompt_id)
        self.digests.append(digest(group))
        self.samples.append(group.n)
        self._open.append(json.dumps([group.prompt, group.output_tokens]).encode())
        if len(self._open) == BLOCK:
            self._put()

    def close(self) -> None:
        """After the last `add`."""
        if self._open:
            self._put()

    def __len__(self) -> int:
        return len(self.ids)

    def errands(self, pieces: Iterable[Piece], begun: Mapping[tuple[int, int], Begun]) -> Iterator[Errand]:
        """begun: by (prompt, sample), what there is already of some."""
        for prompt, samples in pieces:
            block, row = divmod(prompt, BLOCK)
            what = (self.ids[prompt], self.digests[prompt])
            new = tuple(sample for sample in samples if (prompt, sample) not in begun)
            if new:
                yield Errand(prompt, *what, new, self._blocks[block], row)
            for sample in samples:
                if there := begun.get((prompt, sample)):
                    yield Errand(prompt, *what, (sample,), self._blocks[block], row, there)

    def _put(self) -> None:
        self._blocks.append(ray.put(self._open))
        self._open = []
