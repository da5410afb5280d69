"""A draft head that follows the policy of a pool, trained on in an actor with resources of its own.

The driver tells the actor what has finished and which weights are wanted; the actor asks the engines how they did.
Heads are folders in `refresh.folder`, which every node must be able to read. Whatever goes wrong costs a line in the
log, and the old head stays.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import ray

from rollout_spec.config import Config, ConfigError, parse_config
from rollout_spec.rollout.draft_refresh import DraftRefresh
from rollout_spec.rollout.gains import Gains
from rollout_spec.rollout.types import Rollout
from rollout_spec_ray.engine import Weights
from rollout_spec_ray.pool import Pool

# Seconds between what the driver tells the actor.
EVERY = 2.0
# For an engine to say how it did (seconds); one that is silent is left out this time.
PATIENCE = 2.0
COLUMNS = ["prompt_token_ids", "token_ids", "finish_reason", "policy_version"]


class News(NamedTuple):
    head: str | None
    """Folder of the newest head; None: the configuration's."""
    draft_version: int
    metrics: dict[str, float]


class Heads:
    """In place of engines (`draft_refresh.Drafting`): notes which head they are to get, which the pool then does."""

    num_unfinished = 0
    takes_in_flight = True

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy_version = self.draft_version = 0
        self.newest: Path | None = None
        self.gains = Gains(sampled_only=config.sampling.temperature > 0)

    def controller_status(self) -> dict[str, Any] | None:
        return self.gains.status

    def refresh_draft(self, weights: Any, draft_version: int) -> None:
        self.newest, self.draft_version = Path(weights), draft_version


class RefreshActor:
    def __init__(self, config: Mapping[str, Any], engines: Sequence[Any]) -> None:
        """engines: handles of `EngineActor`s. Goes on with what `refresh.folder` has."""
        self._config = parse_config(dict(config))
        self._engines = list(engines)
        self._heads = Heads(self._config)
        self._refresh = DraftRefresh(self._heads)
        self._before: dict[str, Any] = {}
        self._tokens = 0

    def tell(self, finished: pa.Table | None, policy: tuple[str, int] | None, in_force: int) -> News:
        """finished: rows of the output. policy: a new one that is wanted, folder and version. in_force: the version of
        the head in all engines; no refresh begins before it is the newest, since that removes those before."""
        settled = in_force >= self._heads.draft_version
        if policy is not None:
            if settled:
                self._decide()  # on what the one before has made
            self._heads.policy_version = policy[1]
            self._refresh.after_update(Path(policy[0]))
        if finished is not None:
            rollouts = [_rollout(row) for row in finished.select(COLUMNS).to_pylist()]
            self._refresh.add(rollouts)
            self._tokens += sum(len(one.token_ids) for one in rollouts)
        if settled and self._tokens >= self._config.refresh.min_tokens:
            self._decide()
        elif settled:
            self._refresh.between_steps()
        head = self._heads.newest
        return News(None if head is None else str(head), self._heads.draft_version, self._refresh.metrics())

    def _decide(self) -> None:
        now = self._statuses()
        self._heads.gains.took(now, self._before)
        self._before, self._tokens = {**self._before, **now}, 0
        self._refresh.after_rollout([])

    def _statuses(self) -> dict[str, Any]:
        calls = [engine.status.remote() for engine in self._engines]
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=PATIENCE)
        found = {}
        for call in answered:
            try:
                name, status = ray.get(call)
            except ray.exceptions.RayError:  # it died
                continue
            if status is not None:
                found[name] = status
        return found


class Waiting:
    """What has finished since the actor last listened: the newest `limit` tokens, prompts included, since its buffer
    holds no more, and it may be silent for long."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tables: deque[tuple[pa.Table, int]] = deque()  # and their tokens
        self._tokens = 0

    def add(self, table: pa.Table) -> None:
        lengths = [pc.list_value_length(table[name]) for name in ("prompt_token_ids", "token_ids")]
        tokens = sum(pc.sum(one).as_py() or 0 for one in lengths)
        self._tables.append((table, tokens))
        self._tokens += tokens
        while self._tokens > self._limit and len(self._tables) > 1:
            self._tokens -= self._tables.popleft()[1]

    def take(self) -> pa.Table | None:
        """All of it, oldest first."""
        tables = [table for table, _ in self._tables]
        self._tables.clear()
        self._tokens = 0
        return pa.concat_tables(tables) if tables else None


class Refresh:
    """The driver's side: `add` what finishes, `policy` for each new one, `tick` now and then."""

    def __init__(self, pool: Pool, say: Callable[[str], object] = print) -> None:
        """Raises ConfigError where there is no head to train on or no folder for heads."""
        check(pool.config)
        self.metrics: dict[str, float] = {}
        self._pool, self._say = pool, say
        self._actor = (
            ray.remote(RefreshActor)
            .options(num_cpus=pool.config.refresh.threads, max_restarts=-1)
            .remote(pool.config.model_dump(mode="json"), [seat.handle for seat in pool.seats])
        )
        self._waiting = Waiting(pool.config.refresh.buffer_tokens)
        self._policy: tuple[str, int] | None = None
        self._call: Any = None
        self._told = 0.0
        self._news: News | None = None
        self._offered = 0
        self._theirs = False

    def add(self, table: pa.Table) -> None:
        self._waiting.add(table.select(COLUMNS))

    def policy(self, weights: Weights) -> Weights:
        """These weights are wanted next. Returns them with the head that the pool has, unless they bring one."""
        if weights.policy is not None:
            self._policy = (weights.policy, weights.policy_version)
        if weights.draft:  # whoever trains the policy brings heads too: ours would only be in their way
            self._theirs = True
            return weights
        now = self._pool.wanted
        return weights._replace(draft=now.draft, draft_version=now.draft_version)

    def tick(self) -> None:
        """Hear what the actor has to say, tell it what is new; a new head is wanted once all engines are settled."""
        if self._call is not None and ray.wait([self._call], timeout=0)[0]:
            call, self._call = self._call, None
            try:
                self._hear(ray.get(call))
            except ray.exceptions.RayError as error:
                self._say(f"draft refresh: {str(error).strip().splitlines()[-1]}; the head stays")
        if self._news is not None and self._pool.settled and not self._theirs:
            news, self._news = self._news, None
            self._offered = news.draft_version
            self._pool.want(
                self._pool.wanted._replace(draft=news.head, draft_version=news.draft_version),
                "in_flight" if self._pool.takes_in_flight else "drained",
            )
        now = time.monotonic()
        if self._call is None and now - self._told > EVERY:
            in_force = self._pool.wanted.draft_version if self._pool.settled else 0
            self._call = self._actor.tell.remote(self._waiting.take(), self._policy, in_force)
            self._policy, self._told = None, now

    def close(self) -> None:
        """End the actor, and a training that runs in it."""
        ray.kill(self._actor)

    def _hear(self, news: News) -> None:
        self.metrics = news.metrics
        if news.head is not None and news.draft_version > self._offered and not self._theirs:
            self._say(f"draft refresh: version {news.draft_version} of the head is ready")
            self._news = news


def check(config: Config) -> None:
    """ConfigError where no head can be refreshed."""
    if config.drafter.method != "eagle3":
        raise ConfigError(f"drafter.method {config.drafter.method!r}: a refresh trains an EAGLE-3 head on")
    if not config.refresh.folder:
        raise ConfigError(
            "refresh.folder: not set; name a folder that every node can read, for the heads that a refresh makes, or "
            "set refresh.policy=never"
        )


def _rollout(row: Mapping[str, Any]) -> Rollout:
    return Rollout(
        0, 0, row["prompt_token_ids"], row["token_ids"], None, row["finish_reason"], row["policy_version"], None
    )
