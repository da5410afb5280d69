"""Responses that one engine made serve as drafts on all: an actor keeps them, by prompt and policy version, in bounded
memory. What is drafted never changes what is sampled, so that a lost or late answer costs speed only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Responses to a prompt that are handed out, the newest.
HANDED = 16


class Response(NamedTuple):
    digest: int  # of the prompt
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    policy_version: int


class Kept(NamedTuple):
    origin: str
    token_ids: NDArray[np.int32]


class Shared(NamedTuple):
    """What is known of a prompt."""

    prompt_token_ids: NDArray[np.int32]
    responses: dict[int, Kept]  # by serial number, in the order they came


class DraftStore:
    """Kept up to `max_tokens`; the oldest policy version goes first, of one version what came first."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens = 0
        self._max_tokens = max_tokens
        self._prompts: dict[int, Shared] = {}
        self._order: list[tuple[int, int, int]] = []  # (policy version, serial, digest), a heap
        self._serial = 0

    def add(self, origin: str, responses: Iterable[Response]) -> None:
        """origin: who made them and needs no reminding."""
        for digest, prompt_token_ids, token_ids, version in responses:
            prompt = self._prompts.get(digest)
            if prompt is None:
                prompt = self._prompts[digest] = Shared(np.array(prompt_token_ids, dtype=np.int32), {})
            self._serial += 1
            prompt.responses[self._serial] = Kept(origin, np.array(token_ids, dtype=np.int32))
            heapq.heappush(self._order, (version, self._serial, digest))
            self.tokens += len(token_ids)
            while self.tokens > self._max_tokens:
                self._drop()

    def add_table(self, origin: str, table: Any) -> None:
        """The same from rows of an output."""
        names = ("prompt_digest", "prompt_token_ids", "token_ids", "policy_version")
        columns = [table[name].to_pylist() for name in names]
        self.add(origin, (Response(*row) for row in zip(*columns, strict=True) if row[2]))

    def of(self, digests: Sequence[int], origin: str) -> dict[int, Shared]:
        """Of each prompt the newest responses that others than `origin` made; prompts without any are left out."""
        found = {}
        for digest in digests:
            prompt = self._prompts.get(digest)
            if prompt is None:
                continue
            others = {serial: kept for serial, kept in prompt.responses.items() if kept.origin != origin}
            if others:
                newest = dict(list(others.items())[-HANDED:])
                found[digest] = Shared(prompt.prompt_token_ids, newest)
        return found

    def _drop(self) -> None:
        _, serial, digest = heapq.heappop(self._order)
        prompt = self._prompts[digest]
        self.tokens -= len(prompt.responses.pop(serial).token_ids)
        if not prompt.responses:
            del self._prompts[digest]
