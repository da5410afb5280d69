"""The controller as the engine runs it: guarded, counted, and readable from another process."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.config import PolicyConfig
from rollout_spec.control.policy import Decision, Policy, StepResult, StepView
from rollout_spec.control.registry import make_policy
from rollout_spec.control.tail import Tail
from rollout_spec.engine import overrides, sampler_check
from rollout_spec.engine.identity import load_profile
from rollout_spec.engine.prior import FOR_POLICIES, roofline_prior
from rollout_spec.engine.responses import ResponseLog
from rollout_spec.engine.step_trace import StepTrace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.rollout_spec")

# Our part of vLLM's `additional_config`.
SETTINGS_KEY = "rollout_spec"
# The status file is rewritten at most this often (seconds), and whenever the engine drains.
STATUS_EVERY = 1.0
# Upper ends of the live-batch buckets in the metrics; the last is open.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ControlLoop:
    """Asks the policy, feeds it, and never lets it harm the engine: after a fault K stays 0."""

    def __init__(
        self,
        policy: Policy,
        k_max: int,
        status_file: str | None = None,
        static_k: int | None = None,
        trace_file: str | None = None,
        draft_file: str | None = None,
        responses_file: str | None = None,
    ) -> None:
        """status_file: `{pid}` in it is this process, for who starts several engines with the same settings; so in
        draft_file and responses_file.
        trace_file: every step is appended to it, a JSON line each (see `step_trace`). draft_file: replaced by who
        refreshes the draft, since vLLM has no call that would bring the news to a scheduler in any process.
        responses_file: each response that has ended is appended to it (see `responses`).
        """
        self.policy = policy
        self.k_max = k_max
        self.zeros = (0,) * k_max
        self.must_check_sampling = not sampler_check.kernel_is_right()
        self._static = None if static_k is None else Decision(static_k, "data parallel")
        self._status = None if status_file is None else Path(own(status_file))
        self._trace = None if trace_file is None else StepTrace(trace_file)
        self._draft = None if draft_file is None else DraftFile(own(draft_file))
        self._responses = None if responses_file is None else ResponseLog(Path(own(responses_file)))
        self._failed = False
        self._k = 0
        self._written = 0.0
        self._steps = [[0] * (k_max + 1) for _ in range(len(BUCKETS) + 1)]
        self._seconds = [0.0] * (len(BUCKETS) + 1)
        self._drafted = [0] * k_max
        self._accepted = [0] * k_max
        self._greedy_drafted = [0] * k_max
        self._greedy_accepted = [0] * k_max
        self._speculated = 0
        self._tail = Tail()
        self._alive = 0
        self._updated = False  # no step since the last weight update
        self._updates = self._refreshes = self._preemptions = 0
        if self._status is not None:
            self._write()  # who looks for us finds us, and not what an engine of the same name left
            self._written = 0.0

    @classmethod
    def from_vllm(cls, config: VllmConfig) -> ControlLoop | None:
        """The loop for an engine; None where the engine has no drafter or none of our settings."""
        settings = (config.additional_config or {}).get(SETTINGS_KEY)
        k_max = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
        if settings is None or not k_max:
            return None
        overrides.require(config.speculative_config.method, deferring=settings.get("draft_buffer_mib") != 0)
        options = PolicyConfig.model_validate(settings.get("policy", {}))
        prior = None
        if options.profile is not None:
            prior = load_profile(options.profile, config)
            logger.info("rollout_spec: starts from the step times of the profile %s", options.profile)
        elif options.name in FOR_POLICIES:
            prior = roofline_prior(config, k_max)
        policy = make_policy(options, k_max, prior)
        static_k = None
        if config.parallel_config.data_parallel_size > 1:
            logger.warning("rollout_spec: data parallel ranks must agree on K, so K stays %d as in vLLM", k_max)
            static_k = k_max
        files = {name: settings.get(name) for name in ("status_file", "trace_file", "draft_file", "responses_file")}
        return cls(policy, k_max, static_k=static_k, **files)

    @property
    def wants_requests(self) -> bool:
        """At this step the policy wants to know who is in the batch, and who had what accepted."""
        return bool(getattr(self.policy, "wants_requests", False))

    @property
    def learns_lengths(self) -> bool:
        """The policy asks for single requests at all, so that it pays to remember how long responses get."""
        return hasattr(self.policy, "wants_requests")

    def decide(self, view: StepView) -> Decision:
        self._alive = view.decode + view.waiting
        if self._draft is not None and self._draft.replaced():
            self.draft_refreshed()
        if self._failed or view.sampling:
            decision = Decision(0, "controller failed" if self._failed else "unsafe sampler")
        elif self._static is not None:
            decision = self._static
        else:
            try:
                decision = self._within_limits(self.policy.decide(view))
            except Exception:  # a policy's fault must cost speed, never a sample
                self._fail("choose K")
                decision = Decision(0, "controller failed")
        self._k = decision.k
        return decision

    def observe(self, result: StepResult) -> None:
        if self._trace is not None:
            self._trace.write(result)
        self._updated = False
        if result.decode:
            self._tail.step(self._alive, result.seconds)
            bucket = bucket_of(result.decode + result.prefills)  # one that decodes beside new ones is no tail
            self._steps[bucket][result.k] += 1
            self._seconds[bucket] += result.seconds
        if result.speculated:
            for position in range(result.k):
                self._drafted[position] += result.drafted[position]
                self._accepted[position] += result.accepted[position]
                if result.greedy:
                    self._greedy_drafted[position] += result.drafted[position]
                    self._greedy_accepted[position] += result.accepted[position]
            self._speculated += result.speculated
        if not self._failed:
            try:
                self.policy.observe(result)
            except Exception:  # see `decide`
                self._fail("learn from a step")
        if self._status is not None and time.monotonic() - self._written > STATUS_EVERY:
            self._write()

    def policy_updated(self) -> None:
        """New target weights. Trainers reset the prefix cache several times around one update: it counts once."""
        if self._updated:
            return
        self._updated = True
        self._updates += 1
        self._tell("policy_updated", "take in a weight update")
        if self._status is not None:
            self._write()

    def draft_refreshed(self) -> None:
        self._refreshes += 1
        self._tell("draft_refreshed", "take in a refreshed draft")

    def responded(self, ended: Iterable[Request]) -> None:
        """These have ended by themselves or at their cap."""
        if self._responses is not None:
            self._responses.write(ended)

    def preempted(self, requests: int) -> None:
        """So many lost their place for want of KV cache, and are computed anew."""
        self._preemptions += requests

    def _tell(self, event: str, what: str) -> None:
        """Call the policy's method for an event, if it has one."""
        told = getattr(self.policy, event, None)
        if told is not None and not self._failed:
            try:
                told()
            except Exception:  # see `decide`
                self._fail(what)

    def idle(self) -> None:
        """The engine has drained: leave the last word in the status file."""
        self._tail.drained()
        if self._status is not None:
            self._write()

    def status(self) -> dict[str, Any]:
        """Counters since start; arrays are by draft position, tables by live-batch bucket and K.

        `greedy_..`: the part of steps in which all sequences were at temperature 0.
        """
        return {
            "k": self._k,
            "k_max": self.k_max,
            "failed": self._failed,
            "sampler_ok": not self.must_check_sampling,
            "buckets": list(BUCKETS),
            "steps_by_bucket_and_k": self._steps,
            "seconds_by_bucket": self._seconds,
            "drafted_per_position": self._drafted,
            "accepted_per_position": self._accepted,
            "greedy_drafted_per_position": self._greedy_drafted,
            "greedy_accepted_per_position": self._greedy_accepted,
            "speculated_sequence_steps": self._speculated,
            "tail_seconds": self._tail.seconds,
            "weight_updates": self._updates,
            "draft_refreshes": self._refreshes,
            "preemptions": self._preemptions,
            "policy": self._policy_metrics(),
        }

    def _within_limits(self, decision: Decision) -> Decision:
        if type(decision.k) is int and 0 <= decision.k <= self.k_max and not decision.per_request:
            return decision
        per_request = {rid: max(int(k), 0) for rid, k in (decision.per_request or {}).items()}
        return Decision(min(max(int(decision.k), 0), self.k_max), decision.reason, per_request)

    def _policy_metrics(self) -> dict[str, float]:
        """Those that JSON can hold."""
        if self._failed:
            return {}
        try:
            values = {name: float(value) for name, value in self.policy.metrics().items()}
        except Exception:  # see `decide`
            self._fail("report its metrics")
            return {}
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _fail(self, what: str) -> None:
        self._failed = True
        logger.exception("rollout_spec: the controller failed to %s; speculation stays off in this engine", what)

    def _write(self) -> None:
        assert self._status is not None
        self._written = time.monotonic()
        partial = self._status.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(self.status()))
            partial.replace(self._status)
        except OSError as error:
            logger.warning("rollout_spec: metrics stop, %s cannot be written: %s", self._status, error)
            self._status = None


class DraftFile:
    """A file that is replaced whole with each new draft. Looking costs a microsecond."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    def replaced(self) -> bool:
        """Since the last call; the first one, too, if the file is there."""
        try:
            stat = os.stat(self._path)  # noqa: PTH116 - every step looks, and Path.stat takes three times as long
        except OSError:
            return False
        seen, self._seen = self._seen, (stat.st_ino, stat.st_mtime_ns)
        return seen != self._seen


def own(path: str) -> str:
    """The path of this process."""
    return path.replace("{pid}", str(os.getpid()))


def bucket_of(decode: int) -> int:
    """Index of the live-batch bucket: BUCKETS[i-1] < decode <= BUCKETS[i]."""
    return min(max(decode - 1, 0).bit_length(), len(BUCKETS))
