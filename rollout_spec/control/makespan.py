"""Which request will finish last: expected remaining length, from earlier epochs and from siblings.

When nothing waits a rollout ends with its longest response, so those expected to be longest should start first
(longest processing time first, Graham 1969) and get the drafts. A prompt's responses have like lengths: those of
earlier epochs, and of siblings in the same group that have finished already. Pure bookkeeping, no engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Sequence
from itertools import accumulate

# Responses of a prompt that are remembered: older ones came from an older policy.
MEMORY = 16
# Prompts that are remembered, the one that finished longest ago dropped first: about 0.7 kB each.
PROMPTS = 32768
# A prompt's own mean counts like the mean of all after this many responses.
WEIGHT = 2.0
# Responses of all prompts that are remembered, for the mean of all and for what is left of a long response.
ALL_MEMORY = 2048
# Nothing known: a response is expected to be this long.
UNKNOWN = 1000.0


class Lengths:
    """Lengths in tokens of finished responses, by prompt. `cap`: no response is longer than this."""

    def __init__(self, cap: int | None = None, prompts: int = PROMPTS) -> None:
        self.cap = cap
        self._prompts = prompts
        self._own: dict[Hashable, list[int]] = {}  # the prompt that finished last at the end
        self._all: deque[int] = deque(maxlen=ALL_MEMORY)
        self._sum = 0
        # Of all, ascending, and [i]: the sum from i on. Made when asked for after a change.
        self._ascending: list[int] = []
        self._sums: list[int] = []

    @property
    def mean(self) -> float:
        """Of all responses that are remembered, in tokens."""
        return self._sum / len(self._all) if self._all else UNKNOWN

    @property
    def known(self) -> bool:
        """Whether any response has been seen."""
        return bool(self._all)

    def __len__(self) -> int:
        """Prompts that are remembered."""
        return len(self._own)

    def finished(self, prompt: Hashable, tokens: int) -> None:
        own = self._own.pop(prompt, [])
        own.append(tokens)
        del own[:-MEMORY]
        self._own[prompt] = own
        if len(self._own) > self._prompts:
            del self._own[next(iter(self._own))]
        if len(self._all) == ALL_MEMORY:
            self._sum -= self._all[0]
        self._all.append(tokens)
        self._sum += tokens
        self._ascending = []

    def forget(self, prompt: Hashable) -> None:
        """No more responses to `prompt` will be asked for; what it says of all others stays."""
        self._own.pop(prompt, None)

    def expected(self, prompt: Hashable) -> float:
        """Tokens of a response to `prompt` before it starts."""
        own = self._own.get(prompt, ())
        return (sum(own) + WEIGHT * self.mean) / (len(own) + WEIGHT)

    def remaining(self, prompt: Hashable, so_far: int) -> float:
        """Tokens still to come, given those there are: of the responses that got this far, the mean of the rest."""
        own = [length - so_far for length in self._own.get(prompt, ()) if length > so_far]
        rest = (sum(own) + WEIGHT * self._overall(so_far)) / (len(own) + WEIGHT)
        return min(rest, float(max(self.cap - so_far, 0))) if self.cap is not None else rest

    def _overall(self, so_far: int) -> float:
        """As `remaining`, of a prompt that is not known. Logarithmic: it is asked for each request of a batch."""
        if not self._all:
            return max(1.0, UNKNOWN - so_far)
        if not self._ascending:
            self._ascending = sorted(self._all)
            self._sums = list(accumulate(reversed(self._ascending)))[::-1]
        low = bisect_right(self._ascending, so_far)
        if low == len(self._ascending):
            # Beyond all that was seen, a heavy tail has about as much before it as behind it.
            return max(1.0, 0.5 * so_far)
        return self._sums[low] / (len(self._ascending) - low) - so_far


def prompt_key(token_ids: Sequence[int]) -> int:
    """What a prompt is remembered by, within this process."""
    return hash(tuple(token_ids))


def longest_first(prompts: Sequence[Hashable], lengths: Lengths) -> list[int]:
    """Indices of `prompts` in the order to admit them; those alike keep their order."""
    expected = {prompt: lengths.expected(prompt) for prompt in set(prompts)}
    return sorted(range(len(prompts)), key=lambda i: -expected[prompts[i]])
