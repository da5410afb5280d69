"""DraftRefresh: keeps the draft head of a RolloutWorker in step with its policy, in a trainer's loop.

refresh = DraftRefresh(worker)
for step in range(steps):
    refresh.after_rollout(rollouts := worker.generate(prompts, n=8))
    ...  # train; weights = model.state_dict(), or a folder
    worker.update_weights(weights, step + 1)
    refresh.after_update(weights)
refresh.close()

The training runs beside all this in its own process. Nothing touches the engine but these calls, so that a new head
goes in between two engine steps; whatever goes wrong costs a warning and a metric, and the old head stays.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, Self

from rollout_spec.config import Config, ConfigError, RefreshConfig
from rollout_spec.draft.refresh_policy import RefreshDecision, RefreshView, RolloutSeen, make_refresh_policy
from rollout_spec.draft.refresher import Outcome, Refresher, process_cores
from rollout_spec.draft.replay import Replay
from rollout_spec.draft.samples import Sample
from rollout_spec.files import write_json
from rollout_spec.model import resolve
from rollout_spec.rollout.meter import seen_between
from rollout_spec.rollout.policy_folder import policy_folder
from rollout_spec.rollout.types import Rollout
from rollout_spec.rollout.weights import Weights

logger = logging.getLogger("vllm.rollout_spec")

# Draft tokens at which the old head and the new are compared, or the drafter's k_max.
JUDGED_K = 3
NEWEST = "newest.json"


class Drafting(Protocol):
    """What is asked of a RolloutWorker, or of whatever else holds the engines of one policy: see there."""

    @property
    def config(self) -> Config: ...
    @property
    def policy_version(self) -> int: ...
    @property
    def draft_version(self) -> int: ...
    @property
    def num_unfinished(self) -> int: ...
    @property
    def takes_in_flight(self) -> bool: ...
    def controller_status(self) -> dict[str, Any] | None: ...
    def refresh_draft(self, weights: Weights, draft_version: int) -> None: ...


class DraftRefresh:
    """Calls come from whoever calls the worker, not while one of its calls runs."""

    def __init__(self, worker: Drafting, config: Config | None = None) -> None:
        """config: by default the worker's. With `refresh.folder`, goes on with the rollouts and the head kept there.

        Raises ConfigError if the drafter is not an EAGLE-3 head in a folder.
        """
        self._worker, self._config = worker, config or worker.config
        drafter, self._options = self._config.drafter, self._config.refresh
        if drafter.method != "eagle3" or not drafter.model or not Path(drafter.model).is_dir():
            raise ConfigError(
                f"drafter.method {drafter.method!r}, drafter.model {drafter.model!r}: a refresh trains an EAGLE-3 head "
                "on; name the folder of one"
            )
        self._head = Path(drafter.model)
        self._target: Weights | None = str(resolve(self._config.model))
        self._stack = ExitStack()
        self._staged = ExitStack()
        folder = self._options.folder or self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout_spec_"))
        self._folder = Path(folder)
        self.replay = Replay(
            self._options.buffer_tokens, self._options.buffer_versions, self._folder / "rollouts.jsonl"
        )
        self._refresher = Refresher(self._folder, self._options, self._config.draft)
        self._policy = make_refresh_policy(self._options)
        self._seen: list[RolloutSeen] = []
        self._mark = worker.controller_status()
        self._mixed = False  # two heads drafted in the rollout that runs
        self._updates = self._tokens = self._failures = 0
        self._cost = expected_cost(self._options)
        self._last = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._figures: dict[str, float] = {}
        self.decision = RefreshDecision(False, "none", "nothing was asked yet")
        """The last one."""
        self.wants_weights = False
        """A refresh is due and waits for an update that comes with the policy's weights."""
        self._go_on()

    @property
    def head(self) -> Path:
        """The folder of the head in the engine."""
        return self._head

    @property
    def running(self) -> bool:
        """A refresh is running."""
        return self._refresher.running

    # -- what a trainer calls

    def after_rollout(self, rollouts: Iterable[Rollout], temperature: float | None = None) -> RefreshDecision:
        """Take rollouts in, put in a head that is ready, decide whether to begin another.

        temperature: that they were sampled at; by default the configuration's.
        """
        self.add(rollouts, temperature)
        status = self._worker.controller_status()
        if status is not None:
            seen = seen_between(self._mark, status)
            if seen.seconds > 0 and not self._mixed:
                self._seen.append(seen)
            self._mark, self._mixed = status, False
        return self._decide()

    def after_update(self, weights: Weights | None) -> None:
        """The worker has new weights of the policy. They are read (tensors: copied) only when a refresh begins.

        None, where it takes effort to get at them: then a refresh that is due waits, and `wants_weights` asks for them.
        """
        self._target = weights
        self._updates += 1
        self._collect()

    def between_steps(self) -> None:
        """For who steps the engine: a head goes in while requests run, and `drain` begins in the tail."""
        if self._options.policy == "drain" and not self._refresher.running:
            self._decide()
        else:
            self._collect()

    def add(self, rollouts: Iterable[Rollout], temperature: float | None = None) -> None:
        """Take rollouts in as they come; those given here are not given to `after_rollout` again."""
        at = self._config.sampling.temperature if temperature is None else temperature
        for rollout in rollouts:
            if rollout.finish_reason in ("stop", "length"):
                self._tokens += self.replay.add([_sample(rollout, at)], rollout.policy_version)

    def metrics(self) -> dict[str, float]:
        """`rollout_spec/refresh_*`: what was decided, and why, how often; what it cost and what heads promise."""
        values: dict[str, float] = {
            "running": float(self._refresher.running),
            "updates": float(self._updates),
            "new_tokens": float(self._tokens),
            "buffer_tokens": float(self.replay.tokens),
            "buffer_responses": float(len(self.replay)),
            "cost_seconds": self._cost,
            "gain_seconds": self.decision.gain,
            "acceptance": self.decision.acceptance,
            "best_acceptance": self.decision.best,
            **dict.fromkeys(("begun", "done", "failed", "total_cost_seconds"), 0.0),
            **self._figures,
            **{name: float(count) for name, count in self._counts.items()},
        }
        return {f"rollout_spec/refresh_{name}": value for name, value in values.items() if math.isfinite(value)}

    def wait(self, seconds: float) -> None:
        """Wait for a running refresh, at most so long, and put its head in."""
        until = time.monotonic() + seconds
        while self._refresher.running and time.monotonic() < until:
            self._collect()
            time.sleep(0.05)

    def close(self) -> None:
        """End a running refresh. Idempotent; the worker goes on."""
        self._refresher.close()
        self._staged.close()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside

    def _decide(self) -> RefreshDecision:
        self._collect()
        if self._refresher.running:
            self.decision = RefreshDecision(False, "running", "a refresh is running")
        else:
            self.decision = self._policy.decide(
                RefreshView(
                    rollouts=tuple(self._seen),
                    updates=self._updates,
                    tokens=self._tokens,
                    cost=self._cost,
                    failures=self._failures,
                    elapsed=time.monotonic() - self._last,
                    live=self._worker.num_unfinished,
                    room=self._config.engine.max_num_seqs,
                )
            )
        self.wants_weights = self.decision.refresh and self._target is None
        if self.wants_weights:
            self.decision = replace(self.decision, refresh=False, code="no_weights")
        if self.decision.refresh or not self._worker.num_unfinished:  # not each step of a rollout
            self._counts[f"reason/{self.decision.code}"] += 1
            self._note("decision", asdict(self.decision))
        if self.decision.refresh:
            self._begin()
        return self.decision

    def _begin(self) -> None:
        assert self._target is not None
        self._counts["begun"] += 1
        self._updates = self._tokens = 0
        samples = self.replay.draw(self._options.tokens)
        try:
            target = self._staged.enter_context(policy_folder(self._target, Path(str(resolve(self._config.model)))))
            k = min(JUDGED_K, self._config.drafter.k_max)
            self._refresher.start(target, self._head, samples, k, self._worker.policy_version)
        except (ConfigError, OSError) as error:
            self._fail(f"could not begin: {error}")

    def _collect(self) -> None:
        """Put a finished head in, unless requests run that could not bear it."""
        if not self._refresher.running or (self._worker.num_unfinished and not self._worker.takes_in_flight):
            return
        outcome = self._refresher.poll()
        if outcome is None:
            return
        self._staged.close()
        self._cost, self._last = outcome.cost, time.monotonic()
        self._figures["seconds"] = outcome.seconds
        self._figures["total_cost_seconds"] = self._figures.get("total_cost_seconds", 0.0) + outcome.cost
        if outcome.before is not None and outcome.after is not None:
            self._figures |= {"predicted_before": outcome.before, "predicted_after": outcome.after}
        if outcome.head is None:
            self._fail(outcome.problem)
        else:
            self._push(outcome, outcome.head)

    def _push(self, outcome: Outcome, head: Path) -> None:
        version, began = self._worker.draft_version + 1, time.monotonic()
        try:
            self._worker.refresh_draft(head, version)
        except (ConfigError, RuntimeError) as error:  # UpdateFailed is one: then the old head is in force
            self._fail(f"the new head could not be loaded: {error}")
            return
        write_json(self._folder / NEWEST, {"head": str(head.relative_to(self._folder)), "draft_version": version})
        self._head, self._failures = head, 0
        self._seen.clear()
        self._mixed = self._worker.num_unfinished > 0
        self._mark = self._worker.controller_status()
        self._counts["done"] += 1
        self._figures["push_seconds"] = time.monotonic() - began
        self._note("refreshed", {**asdict(outcome), "head": str(head), "draft_version": version})

    def _fail(self, problem: str) -> None:
        self._staged.close()
        self._failures += 1
        self._counts["failed"] += 1
        logger.warning("draft refresh: %s; the old head (version %d) stays", problem, self._worker.draft_version)
        self._note("failed", {"problem": problem})

    def _note(self, event: str, what: dict[str, Any]) -> None:
        """One line in the folder's record."""
        plain = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in what.items()}
        line = {"event": event, "policy_version": self._worker.policy_version, "time": time.time(), **plain}
        with (self._folder / "record.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _go_on(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        newest = self._folder / NEWEST
        if not newest.exists():
            return
        try:
            known = json.loads(newest.read_text("utf-8"))
            head = self._folder / known["head"]
            self._worker.refresh_draft(head, int(known["draft_version"]))
        except (ValueError, KeyError, TypeError, RuntimeError) as error:  # ConfigError is a ValueError
            self._fail(f"the head of {newest} could not be loaded: {error}")
            return
        self._head, self._mark = head, self._worker.controller_status()


def expected_cost(options: RefreshConfig) -> float:
    """Seconds of all cores, before one was measured: the training's, as if the rest came for nothing."""
    return options.seconds * min(options.threads / len(process_cores()), 1.0)


def _sample(rollout: Rollout, temperature: float) -> Sample:
    prompt = hashlib.blake2b(repr(rollout.prompt_token_ids).encode(), digest_size=8).hexdigest()
    ended = rollout.finish_reason == "stop"
    return Sample(prompt, rollout.prompt_token_ids, rollout.token_ids, temperature, ended)
