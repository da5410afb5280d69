"""A draft length for each request, up by one while its drafts are accepted, down by one when they are not.

Source: seed 001 (speculative decoding in practice), section 3: "if last 3 iterations accepted >= k-1: k = min(k+1,
k_max); if last iteration accepted <= 1: k = max(k-1, 1)". It looks at acceptance only, never at cost.
"""

from __future__ import annotations

from rollout_spec.control.policy import Decision, StepResult, StepView

# Iterations in a row that must go well for one more draft token, as in the source.
RUN = 3


class Aimd:
    """Where the engine does not say which request accepted what, the batch counts as one request."""

    wants_requests = True

    def __init__(self, k_max: int, k: int) -> None:
        self.k_max = k_max
        self._first = min(max(k, 1), k_max)
        self._k: dict[str, int] = {}
        self._good: dict[str, int] = {}

    def decide(self, view: StepView) -> Decision:
        if not view.requests:
            return Decision(self._k.get("", self._first), "aimd")
        lengths = {request: self._k.get(request, self._first) for request in view.requests}
        if len(self._k) > 2 * len(lengths) + 64:
            self._k = {request: k for request, k in self._k.items() if request in lengths}
            self._good = {request: run for request, run in self._good.items() if request in lengths}
        return Decision(max(lengths.values()), "aimd", lengths)

    def observe(self, result: StepResult) -> None:
        if result.requests is not None:
            for request, (drafted, accepted) in result.requests.items():
                if drafted:
                    self._update(request, accepted)
        elif result.speculated:
            self._update("", round(sum(result.accepted) / result.speculated))

    def metrics(self) -> dict[str, float]:
        return {"mean_k": sum(self._k.values()) / len(self._k) if self._k else float(self._first)}

    def _update(self, request: str, accepted: int) -> None:
        k = self._k.get(request, self._first)
        run = self._good.get(request, 0) + 1 if accepted >= k - 1 else 0
        if run >= RUN:
            k, run = min(k + 1, self.k_max), 0
        if accepted <= 1:
            k = max(k - 1, 1)
        self._k[request], self._good[request] = k, run
