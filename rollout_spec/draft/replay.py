"""The latest rollouts, to train a head on: bounded in tokens, the long ones not drowned by the short ones.

Responses fall into strata by length, from a power of two to the next. Where there are too many tokens, the stratum that
has most of them gives up its oldest response, so that all strata tend to the same share. On disk it is a file of JSON
lines that grows by appending and is rewritten when half of it is no longer needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from rollout_spec.draft.samples import Sample
from rollout_spec.files import write_whole


class Kept(NamedTuple):
    sample: Sample
    policy_version: int

    @property
    def size(self) -> int:
        return len(self.sample.prompt) + len(self.sample.response)

    def line(self) -> str:
        return json.dumps({"policy_version": self.policy_version, **asdict(self.sample)}) + "\n"


class Replay:
    """Sizes count tokens, prompts included. Policy versions are the caller's numbers; a newer one is larger."""

    def __init__(self, max_tokens: int, max_versions: int, path: Path | None = None) -> None:
        """path: the file to go on from and to keep it in; None: in memory only."""
        self._max_tokens, self._max_versions, self._path = max_tokens, max_versions, path
        self._strata: dict[int, list[Kept]] = {}  # each in order of policy version, then of arrival
        self._lines = 0
        self.tokens = 0
        if path is not None and path.exists():
            self._take_in(_read(path))
            self._rewrite()  # a torn last line must not swallow the next

    def __len__(self) -> int:
        return sum(map(len, self._strata.values()))

    def __iter__(self) -> Iterator[Kept]:
        for stratum in self._strata.values():
            yield from stratum

    @property
    def versions(self) -> list[int]:
        return sorted({kept.policy_version for kept in self})

    def add(self, samples: Iterable[Sample], policy_version: int) -> int:
        """Tokens of those that were taken in; empty responses and those larger than the whole buffer are not."""
        new = [Kept(sample, policy_version) for sample in samples if sample.response]
        new = [kept for kept in new if kept.size <= self._max_tokens]
        self._take_in(new)
        if self._path is not None and new:
            self._lines += len(new)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(kept.line() for kept in new)
            if self._lines > 2 * len(self):
                self._rewrite()
        return sum(kept.size for kept in new)

    def forget_from(self, policy_version: int) -> None:
        """Drop what this version and later ones sampled: a trainer went back to an earlier checkpoint."""
        for stratum in self._strata.values():
            stratum[:] = [kept for kept in stratum if kept.policy_version < policy_version]
        self._strata = {length: stratum for length, stratum in self._strata.items() if stratum}
        self.tokens = sum(kept.size for kept in self)
        self._rewrite()

    def draw(self, tokens: int) -> list[Kept]:
        """The newest of each stratum, in turn from the one that has given least, up to `tokens` in all."""
        left = {length: list(stratum) for length, stratum in self._strata.items()}
        given = dict.fromkeys(left, 0)
        drawn: list[Kept] = []
        while left:
            length = min(left, key=lambda each: (given[each], each))
            kept = left[length].pop()
            if not left[length]:
                del left[length]
            if sum(given.values()) + kept.size > tokens:
                left.pop(length, None)
                continue
            given[length] += kept.size
            drawn.append(kept)
        return drawn

    def _take_in(self, samples: Iterable[Kept]) -> None:
        for kept in samples:
            stratum = self._strata.setdefault(len(kept.sample.response).bit_length(), [])
            at = len(stratum)
            while at and stratum[at - 1].policy_version > kept.policy_version:  # a straggler of an older policy
                at -= 1
            stratum.insert(at, kept)
        oldest = self.versions[-self._max_versions :][:1]
        sizes = {}
        for length, stratum in self._strata.items():
            stratum[:] = [kept for kept in stratum if kept.policy_version >= oldest[0]]
            sizes[length] = sum(kept.size for kept in stratum)
        while sum(sizes.values()) > self._max_tokens:
            fullest = max(sizes, key=sizes.__getitem__)
            sizes[fullest] -= self._strata[fullest].pop(0).size
        self._strata = {length: stratum for length, stratum in self._strata.items() if stratum}
        self.tokens = sum(sizes.values())

    def _rewrite(self) -> None:
        if self._path is not None:
            write_whole(self._path, "".join(kept.line() for kept in sorted(self, key=lambda kept: kept.policy_version)))
            self._lines = len(self)


def _read(path: Path) -> Iterator[Kept]:
    """The lines that are whole."""
    for line in path.read_text("utf-8").splitlines():
        try:
            tree = json.loads(line)
            version = tree.pop("policy_version")
            yield Kept(Sample(**tree), version)
        except (ValueError, TypeError, KeyError, AttributeError):  # torn by a crash
            continue
