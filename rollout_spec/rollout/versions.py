"""Which weights are in the engine, and which of them made which tokens of the requests that run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollout_spec.rollout.types import Span


@dataclass(frozen=True, slots=True)
class Versions:
    """What the engine holds now. Versions are the caller's numbers; `targets` counts updates of the target."""

    policy: int = 0
    draft: int = 0
    targets: int = 0

    def updated(self, policy: int | None, draft: int | None) -> Versions:
        """After an update of the target (policy given), the draft (draft given) or both."""
        new = replace(self, policy=self.policy if policy is None else policy)
        new = replace(new, draft=self.draft if draft is None else draft)
        return new if policy is None else replace(new, targets=self.targets + 1)

    @property
    def cache_salt(self) -> str:
        """Prefix-cache blocks of one salt never serve requests of another: whatever stays in the cache after an
        update while requests ran, no later request is answered from it. A count, since versions may come again.
        """
        return f"weights-{self.targets}"

    def span(self, start: int) -> Span:
        return Span(start, self.policy, self.draft)

    def resumed(self, spans: tuple[Span, ...], made: int) -> tuple[Span, ...]:
        """Spans of a response that goes on under these versions after `made` tokens."""
        return spans if spans and spans[-1] == self.span(spans[-1].start) else extend(spans, self.span(made))


def extend(spans: tuple[Span, ...], span: Span) -> tuple[Span, ...]:
    """`spans` and one more; it replaces a last one that had no token."""
    return (*(spans[:-1] if spans and spans[-1].start == span.start else spans), span)
