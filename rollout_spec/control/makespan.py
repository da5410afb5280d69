"""Which request will finish last: expected remaining length, from earlier epochs and from siblings.

When nothing waits a rollout ends with its longest response, so those expected to be longest should start first
(longest processing time first, Graham 1969) and get the drafts. A prompt's responses have like lengths: those of
earlier epochs, and of siblings in the same group that have finished already. Pure bookkeeping, no engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from statistics import fmean

# Responses of a prompt that are remembered: older ones came from an older policy.
MEMORY = 16
# A prompt's own mean counts like the mean of all after this many responses.
WEIGHT = 2.0
# Responses of all prompts that are remembered, for the mean of all and for what is left of a long response.
ALL_MEMORY = 2048
# Nothing known: a response is expected to be this long.
UNKNOWN = 1000.0


class Lengths:
    """Lengths in tokens of finished responses, by prompt."""

    def __init__(self, cap: int | None = None) -> None:
        self.cap = cap
        self._own: dict[Hashable, deque[int]] = {}
        self._all: deque[int] = deque(maxlen=ALL_MEMORY)

    def finished(self, prompt: Hashable, tokens: int) -> None:
        self._own.setdefault(prompt, deque(maxlen=MEMORY)).append(tokens)
        self._all.append(tokens)

    def expected(self, prompt: Hashable) -> float:
        """Tokens of a response to `prompt` before it starts."""
        overall = fmean(self._all) if self._all else UNKNOWN
        own = self._own.get(prompt, ())
        return (sum(own) + WEIGHT * overall) / (len(own) + WEIGHT)

    def remaining(self, prompt: Hashable, so_far: int) -> float:
        """Tokens still to come, given those there are: of the responses that got this far, the mean of the rest."""
        own = [length - so_far for length in self._own.get(prompt, ()) if length > so_far]
        longer = [length - so_far for length in self._all if length > so_far]
        # Beyond all that was seen, a heavy tail has about as much before it as behind it.
        overall = fmean(longer) if longer else max(1.0, 0.5 * so_far) if self._all else max(1.0, UNKNOWN - so_far)
        rest = (sum(own) + WEIGHT * overall) / (len(own) + WEIGHT)
        return min(rest, float(max(self.cap - so_far, 0))) if self.cap is not None else rest


def longest_first(prompts: Sequence[Hashable], lengths: Lengths) -> list[int]:
    """Indices of `prompts` in the order to admit them; those alike keep their order."""
    expected = {prompt: lengths.expected(prompt) for prompt in set(prompts)}
    return sorted(range(len(prompts)), key=lambda i: -expected[prompts[i]])


def tail(remaining: Iterable[float], share: float = 0.5) -> list[int]:
    """Indices of the requests that set the makespan: those with at least `share` of the longest remaining length."""
    values = list(remaining)
    most = max(values, default=0.0)
    return [i for i, value in enumerate(values) if value >= share * most]
