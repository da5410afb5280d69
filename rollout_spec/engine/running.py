"""The sequences that decode: how much context they have, and how many tokens each is expected to generate still."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.request import RequestStatus

from rollout_spec.control.makespan import UNKNOWN, Lengths, prompt_key
from rollout_spec.control.policy import LENGTH_SD

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Context is counted anew after this many steps. In between it is added up: counting 256 sequences takes 15 us.
RECOUNT_STEPS = 16
# It is counted at once when more than one sequence in this many came or left unseen (preempted, passed over).
TOLERANCE = 16
# Expected lengths are made anew when a step has passed for each this many of them, so that a step costs about as
# much as this many; and for a small batch after this many steps.
REFRESH_SHARE, REFRESH_LEAST = 4, 4
# Ended by itself or at its cap: what other ends (aborted, failed) leave is no length of a response.
WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class _Bounds(NamedTuple):
    """What a request's parameters say of its response; equal bounds tell its length."""

    prompt: int  # key
    least: int  # tokens
    most: int


class _Left(NamedTuple):
    """What a request is expected to generate still."""

    tokens: float
    sure: bool


class Remaining(NamedTuple):
    """As in `StepView`."""

    tokens: tuple[float, ...]
    """One a request."""
    sd: float
    """Deviation of their logarithm."""


NOTHING = Remaining((), LENGTH_SD)


class Running:
    """Told by the scheduler who joins, generates and finishes. Sums are of prompt and generated tokens."""

    def __init__(self, max_model_len: int) -> None:
        self.context = 0  # tokens, of all sequences that decode together
        self._max_model_len = max_model_len
        self._requests: dict[str, Request] = {}
        self._sampling: set[str] = set()  # those at a temperature above 0
        self._count = 0  # sequences that `context` is the sum of
        self._age = 0  # steps since it was counted
        self._lengths = Lengths()
        self._bounds: dict[str, _Bounds] = {}
        self._left: dict[str, _Left] = {}
        self._left_age = 0
        self._last: tuple[Sequence[str], Remaining] = ((), NOTHING)

    @property
    def greedy(self) -> bool:
        """All of them are at temperature 0."""
        return not self._sampling

    def finished(self, names: Iterable[str], learn: bool) -> list[Request]:
        """These are gone; `learn`: their lengths are remembered for others of the same prompt.

        Returns those that ended by themselves or at their cap.
        """
        whole = []
        for name in names:
            request, bounds = self._requests.pop(name, None), self._bounds.pop(name, None)
            if request is None:  # it never decoded
                continue
            self._sampling.discard(name)
            self.context -= request.num_tokens
            self._count -= 1
            if request.status not in WHOLE:
                continue
            whole.append(request)
            if learn:
                prompt = prompt_key(request.prompt_token_ids or ()) if bounds is None else bounds.prompt
                self._lengths.finished(prompt, request.num_output_tokens)
        return whole

    def preempted(self, name: str) -> None:
        """Its prompt is computed anew."""
        if self._requests.pop(name, None) is not None:
            self._sampling.discard(name)
            self._age = RECOUNT_STEPS

    def settle(self, scheduled: Iterable[str], decode: int) -> None:
        """A step begins in which `decode` of the `scheduled` requests decode; the others compute their prompts."""
        self._age += 1
        if self._age < RECOUNT_STEPS and abs(self._count - decode) * TOLERANCE <= decode:
            return
        requests = self._requests
        tokens = [requests[name].num_tokens for name in scheduled if name in requests]
        self.context, self._count, self._age = sum(tokens), len(tokens), 0

    def join(self, name: str, request: Request) -> None:
        """With this step its prompt is computed; from the next on it decodes."""
        self._requests[name] = request
        if request.sampling_params is None or request.sampling_params.temperature > 0:
            self._sampling.add(name)
        self.context += request.num_tokens
        self._count += 1

    def remaining(self, names: Sequence[str]) -> Remaining:
        """Tokens that each of `names` will still generate. Asked every step."""
        self._left_age += 1
        if self._left_age >= max(len(names) // REFRESH_SHARE, REFRESH_LEAST):
            self._left_age = 0
            self._left = {}
        elif names == self._last[0]:
            return self._last[1]
        left = self._left
        for name in names:
            if name not in left:
                left[name] = self._expect(name)
        known = [left[name] for name in names]
        doubtful = sum(not each.sure for each in known) / max(len(known), 1)
        self._last = (names, Remaining(tuple([each.tokens for each in known]), LENGTH_SD * doubtful))
        return self._last[1]

    def _expect(self, name: str) -> _Left:
        request = self._requests.get(name)
        if request is None:
            return _Left(UNKNOWN, sure=False)
        bounds = self._bounds.get(name)
        if bounds is None:
            bounds = self._bounds[name] = self._bounds_of(request)
        so_far = request.num_output_tokens
        # A sequence that runs has at least one token to go.
        most = float(max(bounds.most - so_far, 1))
        if bounds.least == bounds.most:
            return _Left(most, sure=True)
        rest = self._lengths.remaining(bounds.prompt, so_far)
        # Expected to run into its cap: that is a length known exactly.
        return _Left(most, sure=True) if rest >= most else _Left(max(rest, bounds.least - so_far, 1.0), sure=False)

    def _bounds_of(self, request: Request) -> _Bounds:
        params = request.sampling_params
        most = min(request.max_tokens, self._max_model_len - request.num_prompt_tokens)
        least = 0
        if params is not None:
            endless = params.ignore_eos and not params.stop and not params.stop_token_ids
            least = most if endless else min(params.min_tokens, most)
        return _Bounds(prompt_key(request.prompt_token_ids or ()), least, most)
