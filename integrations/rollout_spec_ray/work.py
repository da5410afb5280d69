"""What is still to be generated, and who generates it. Pure bookkeeping: no Ray, no engine, no prompt's content.

Engines pull. They are given prompts expected to have the longest responses first (`control.makespan`), all samples of
a prompt together, so that they share its prefix. A group is split only when it doesn't fit; the rest then waits for the
same engine until nothing else is left for the others. When all that waits would fit into the pool at once, nobody takes
more than an even share.

When an engine dies, all that it held is suspect. Suspects run apart, in an engine that holds nothing else, in companies
that shrink with every death (a quarter, a quarter of that, .., one): what killed it is found in few deaths, and nobody
is blamed for a neighbour. A prompt whose engine died `tries` times, the last time with this prompt alone, is set aside.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollout_spec.control.makespan import Lengths

# Companies of suspects shrink by this with every death.
SHRINK = 4
# The heap is ordered anew when the mean length of all has changed by this factor: it stands for what isn't known.
DRIFT = 1.25
# No prompt's index: what is known of all.
ANY = -1


class Piece(NamedTuple):
    """Samples of one prompt for one engine."""

    prompt: int  # the index it was added under
    samples: tuple[int, ...]


@dataclass(slots=True)
class Cost:
    """Of the bookkeeping itself."""

    operations: int = 0
    seconds: float = 0.0


class Work:
    """Prompts are indices from 0 on."""

    def __init__(self, lengths: Lengths, *, capacity: int, tries: int = 3, longest_first: bool = True) -> None:
        """capacity: sequences that an engine may hold."""
        self.waiting = 0  # sequences
        self.live = 0
        self.finished = 0
        self.quarantined: dict[int, tuple[int, ...]] = {}  # prompt -> samples that were not generated
        self.lost = 0  # sequences that had to be handed out again
        self.cost = Cost()
        self._lengths = lengths
        self._capacity, self._tries, self._longest_first = capacity, tries, longest_first
        self._todo: dict[int, tuple[int, ...]] = {}  # samples that wait
        self._heap: list[tuple[float, int]] = []  # (-expected, prompt); may hold outdated entries
        self._entry: dict[int, float] = {}  # the entry that counts
        self._mean = max(lengths.mean, 1.0)
        self._held: dict[int, int] = {}  # engine -> prompt whose rest waits for it
        self._of: dict[int, set[tuple[int, int]]] = {}  # engine -> (prompt, sample) that it holds
        self._deaths: dict[int, int] = {}
        self._suspects: dict[int, None] = {}  # prompts that wait, all their samples, to run apart
        self._apart: set[int] = set()  # engines that hold suspects
        self._on_trial: dict[int, int] = {}  # suspect -> the engine that holds some of it
        self._coming: dict[int, list[tuple[int, int]]] = {}  # engine -> (prompt, sample) that have left another
        self.begun: dict[tuple[int, int], Any] = {}  # of those that have moved, until they end

    def add(self, prompt: int, samples: Iterable[int]) -> None:
        """Samples to generate, in addition to what is there of this prompt."""
        new = tuple(samples)
        if new:
            self._wait(prompt, new)

    @property
    def done(self) -> bool:
        return not self.waiting and not self.live

    def held_by(self, engine: int) -> int:
        """Sequences that the engine has."""
        return len(self._of.get(engine, ()))

    def take(self, engine: int, engines: int) -> list[Piece]:
        """What `engine` starts now; [] if there is nothing for it. engines: how many share the work, it included."""
        began = time.perf_counter()
        held = self._of.setdefault(engine, set())
        if not held:
            self._apart.discard(engine)
        moved = self._coming.pop(engine, [])
        held.update(moved)
        pieces: list[Piece] = []
        if engine not in self._apart:
            suspects = [] if held else [one for one in self._suspects if one not in self._on_trial]
            pieces = self._take_suspects(engine, suspects) if suspects else self._take(engine, engines)
        for piece in pieces:
            held.update((piece.prompt, sample) for sample in piece.samples)
            self.waiting -= len(piece.samples)
            self.live += len(piece.samples)
        self._count(began)
        return [Piece(prompt, (sample,)) for prompt, sample in moved] + pieces

    def finish(self, engine: int, prompt: int, sample: int, tokens: int | None) -> bool:
        """A sequence has ended; tokens: its length, None if that says nothing of its prompt. False: it isn't the
        engine's (any more), and must not be counted."""
        began = time.perf_counter()
        held = self._of.get(engine, set())
        if (prompt, sample) not in held:
            return False
        held.discard((prompt, sample))
        self.live -= 1
        self.finished += 1
        self._deaths.pop(prompt, None)
        self._on_trial.pop(prompt, None)
        self.begun.pop((prompt, sample), None)
        if prompt in self._suspects:  # this prompt kills no engine
            del self._suspects[prompt]
            self._push(prompt)
        if tokens is not None:
            # Remembered by prompt only while a sibling waits; else for the mean of all.
            waits = prompt in self._todo
            self._lengths.finished(prompt if waits else None, tokens)
            if waits and prompt in self._entry:
                self._push(prompt)
        self._count(began)
        return True

    def may_move(self, engine: int) -> bool:
        """Sequences may leave the engine and come to it: it holds no suspects."""
        return engine not in self._apart or not self.held_by(engine)

    def move(self, source: int, prompt: int, sample: int, target: int, begun: Any) -> None:
        """A live sequence, of which `begun` is there, goes on in another engine, which is given it by `take`."""
        self._of[source].remove((prompt, sample))
        self._coming.setdefault(target, []).append((prompt, sample))
        self.begun[prompt, sample] = begun

    def coming(self, engine: int) -> int:
        """Sequences on their way to the engine."""
        return len(self._coming.get(engine, ()))

    def remaining(self, so_far: int) -> float:
        """Expected tokens still to come of a response that has so many."""
        return self._lengths.remaining(ANY, so_far)

    def engine_died(self, engine: int, *, blame: bool = True) -> list[int]:
        """All that the engine held waits again. Returns prompts that are set aside for it.

        blame: it may have died of them; not when its whole node went.
        """
        held = self._of.pop(engine, set())
        self._apart.discard(engine)
        self._release(engine)
        for prompt, sample in self._coming.pop(engine, ()):  # it never had them
            self.live -= 1
            self._wait(prompt, (sample,))
        samples: dict[int, list[int]] = {}
        for prompt, sample in sorted(held):
            samples.setdefault(prompt, []).append(sample)
        self.live -= len(held)
        self.lost += len(held)
        aside = []
        for prompt, again in samples.items():
            self._on_trial.pop(prompt, None)
            if prompt in self.quarantined:  # while these were in another engine
                self.quarantined[prompt] += tuple(again)
                continue
            if blame:
                self._deaths[prompt] = self._deaths.get(prompt, 0) + 1
            if blame and self._deaths[prompt] >= self._tries and len(samples) == 1:
                aside.append(prompt)
                waiting = self._todo.pop(prompt, ())
                self.waiting -= len(waiting)
                self._suspects.pop(prompt, None)
                self._entry.pop(prompt, None)
                self._drop_hold(prompt)
                self.quarantined[prompt] = (*waiting, *again)
            else:
                self._wait(prompt, tuple(again))
        return aside

    # -- taking

    def _take(self, engine: int, engines: int) -> list[Piece]:
        held = len(self._of[engine])
        room = self._capacity - held
        even = -(-(self.waiting + self.live) // max(engines, 1))
        quota = min(room, max(even - held, 0))
        pieces: list[Piece] = []
        while quota > 0:
            prompt = self._next(engine)
            if prompt is None:
                break
            todo = self._todo[prompt]
            last = len(todo) == self.waiting - sum(len(piece.samples) for piece in pieces)
            # The last group is shared out; any other goes whole where it fits.
            count = quota if last and engines > 1 else room
            taken, rest = todo[:count], todo[count:]
            pieces.append(Piece(prompt, taken))
            room -= len(taken)
            quota -= len(taken)
            if rest:
                self._todo[prompt] = rest
                self._held[engine] = prompt
            else:
                del self._todo[prompt]
                if prompt not in self._deaths:
                    self._lengths.forget(prompt)
        return pieces

    def _next(self, engine: int) -> int | None:
        """The prompt to take from now, out of the heap; its samples stay in `_todo`."""
        if engine in self._held:
            return self._held.pop(engine)
        self._reorder()
        while self._heap:
            minus, prompt = heapq.heappop(self._heap)
            if self._entry.get(prompt) == minus and prompt in self._todo:
                del self._entry[prompt]
                return prompt
        if self._held:  # nothing else is left
            other = max(self._held, key=lambda one: self._lengths.expected(self._held[one]))
            return self._held.pop(other)
        return None

    def _take_suspects(self, engine: int, suspects: list[int]) -> list[Piece]:
        """A company of `suspects`, those with the most deaths; no prompt is on trial in two engines."""
        self._apart.add(engine)
        most = max(self._deaths[prompt] for prompt in suspects)
        room = 1 if most >= self._tries - 1 else max(1, self._capacity // SHRINK**most)
        pieces = []
        for prompt in [one for one in suspects if self._deaths[one] == most]:
            self._on_trial[prompt] = engine
            taken, rest = self._todo[prompt][:room], self._todo[prompt][room:]
            pieces.append(Piece(prompt, taken))
            room -= len(taken)
            if rest:
                self._todo[prompt] = rest
            else:
                del self._todo[prompt], self._suspects[prompt]
            if room <= 0:
                break
        return pieces

    # -- waiting

    def _wait(self, prompt: int, samples: tuple[int, ...]) -> None:
        self.waiting += len(samples)
        before = self._todo.get(prompt)
        self._todo[prompt] = samples if before is None else tuple(sorted((*before, *samples)))
        if self._deaths.get(prompt):
            self._entry.pop(prompt, None)
            self._drop_hold(prompt)
            self._suspects[prompt] = None
        elif prompt not in self._held.values() and prompt not in self._entry:
            self._push(prompt)

    def _push(self, prompt: int) -> None:
        minus = -self._lengths.expected(prompt) if self._longest_first else float(prompt)
        if self._entry.get(prompt) != minus:
            self._entry[prompt] = minus
            heapq.heappush(self._heap, (minus, prompt))

    def _reorder(self) -> None:
        mean = max(self._lengths.mean, 1.0)
        if self._longest_first and not 1 / DRIFT < mean / self._mean < DRIFT:
            self._mean = mean
            self._entry = {prompt: -self._lengths.expected(prompt) for prompt in self._entry}
            self._heap = [(minus, prompt) for prompt, minus in self._entry.items()]
            heapq.heapify(self._heap)

    def _drop_hold(self, prompt: int) -> None:
        for engine in [engine for engine, one in self._held.items() if one == prompt]:
            del self._held[engine]

    def _release(self, engine: int) -> None:
        if engine in self._held:
            self._push(self._held.pop(engine))

    def _count(self, began: float) -> None:
        self.cost.operations += 1
        self.cost.seconds += time.perf_counter() - began
