"""The actor: one `RolloutWorker`, stepped by a thread of its own, so that the engine never waits for the driver.

The driver's calls leave work and fetch what has finished; the thread does all that touches the engine, from its start
on, because OpenMP's threads belong to the thread that starts them. An engine that fails ends its process: Ray starts a
new one, and a half-broken vLLM is never asked again. Only a configuration that can't work is answered with an error.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import ray

from rollout_spec.config import Config, ConfigError, parse_config
from rollout_spec.engine.requests import prompt_token_ids
from rollout_spec.rollout.resident import Mode
from rollout_spec.rollout.types import Rollout
from rollout_spec_ray.drafts import Response, Shared
from rollout_spec_ray.pace import Pace, Window
from rollout_spec_ray.rows import Label, as_table

# `serve` returns after so many seconds at most, so that the driver sees progress and can stop.
TURN = 1.0
# .. and not before so many, unless the engine runs out of work: fewer, larger turns for the driver of a large pool.
SHORTEST_TURN = 0.05
# Between two looks at the engine's counters (seconds).
LOOK = 1.0
# For the store of shared drafts to answer (seconds); without them the engine drafts from its own.
PATIENCE = 1.0
# Blocks of prompts kept by an engine.
BLOCKS = 64
FAILED = 70  # exit code of an engine's process, after which Ray starts another


class Worker(Protocol):
    """What the actor uses of `RolloutWorker`."""

    @property
    def policy_version(self) -> int: ...
    @property
    def draft_version(self) -> int: ...
    @property
    def num_unfinished(self) -> int: ...
    @property
    def takes_in_flight(self) -> bool: ...
    @property
    def tokenizer(self) -> Any: ...

    def submit(self, prompts: Any, n: int = 1, sampling: Any = None, output_tokens: Any = None) -> list[str]: ...
    def resume(self, rollouts: Any, sampling: Any = None, output_tokens: Any = None) -> list[str]: ...
    def tokens_so_far(self) -> dict[str, int]: ...
    def step(self) -> None: ...
    def take(self, request_id: str) -> Rollout | None: ...
    def abort(self, request_ids: Any = None) -> list[Rollout]: ...
    def update_weights(self, *args: Any, **options: Any) -> None: ...
    def remember_drafts(self, prompt_token_ids: Any, responses: Any) -> None: ...
    def controller_status(self) -> dict[str, Any] | None: ...
    def metrics(self) -> dict[str, float]: ...
    def close(self) -> None: ...


MakeWorker = Callable[[Config], Worker]


class Weights(NamedTuple):
    """Folders that every node can read, and the versions of what is in them. None: what the configuration names."""

    policy: str | None = None
    policy_version: int = 0
    draft: str | None = None
    draft_version: int = 0


class Restarted(RuntimeError):  # noqa: N818 - what happened
    """The process that was meant is gone: Ray has put another in its place, which has not been started."""


class Home(NamedTuple):
    """Where an actor's process is."""

    incarnation: str  # another one after each restart
    node: str
    pid: int
    cores: tuple[int, ...]


class Begun(NamedTuple):
    """A sequence that an engine has given up, to go on in another."""

    prompt: int
    sample: int
    started_at: float
    rollout: Rollout
    """Aborted, with its tokens so far."""


class Errand(NamedTuple):
    """A `work.Piece` with what the engine needs to know of it."""

    prompt: int
    prompt_id: str
    digest: int
    samples: tuple[int, ...]
    block: Any
    """Reference to a block of prompts, each as JSON [prompt, output_tokens] ..."""
    row: int
    """... and which of them."""
    begun: Begun | None = None
    """What there is of it, if it is one sample."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What an engine has to say."""

    finished: list[tuple[int, int, int | None]]
    """(prompt, sample, tokens): tokens is None for one that vLLM refused."""
    table: Any
    """The same as rows of the output; None if nothing has finished."""
    live: int
    """Sequences in the engine, and commands that it hasn't come to yet."""
    stalled: float
    """Seconds since the engine last came out of a step, while it has work."""
    tokens: float
    """Generated since the start."""
    k: float | None
    lengths: tuple[int, ...] = ()
    """Tokens so far of the responses that were live a moment ago ..."""
    prompts: float = 0.0
    """... and the mean of their prompts'."""
    windows: tuple[Window, ...] = ()
    """How fast it went since the last turn."""
    given: tuple[Begun, ...] = ()
    """What it gives up, as it was asked to."""


class EngineActor:
    """Calls: `home`, then `start`, then `serve` again and again, `update` between two of them."""

    def __init__(
        self, number: int, attempt: int, config: Mapping[str, Any], make_worker: MakeWorker, drafts: Any = None
    ) -> None:
        """drafts: the actor around a `drafts.DraftStore`; None: no history is shared."""
        self._number, self._attempt = number, attempt
        self._drafts = drafts
        self._reminded: set[int] = set()  # serials of responses that came from there
        self._config, self._make_worker = dict(config), make_worker
        self._incarnation = uuid.uuid4().hex
        self._blocks: OrderedDict[Any, list[bytes]] = OrderedDict()
        self._cond = threading.Condition()
        self._inbox: deque[Callable[[Worker], None]] = deque()
        self._labels: dict[str, Label] = {}
        self._finished: list[tuple[Label, Rollout]] = []
        self._given: list[Begun] = []
        self._lengths: tuple[int, ...] = ()
        self._prompts = 0.0
        self._windows: list[Window] = []
        self._status: dict[str, Any] | None = None
        self._takes_in_flight = False
        self._thread: threading.Thread | None = None
        self._seen = time.monotonic()
        self._tokens = 0.0
        self._k: float | None = None
        self._versions = (0, 0)
        self._stopping = False

    def home(self) -> Home:
        context = ray.get_runtime_context()
        return Home(self._incarnation, context.get_node_id(), os.getpid(), tuple(sorted(os.sched_getaffinity(0))))

    def status(self) -> tuple[str, dict[str, Any] | None]:
        """Of its controller, a moment ago, and of which incarnation that is."""
        return self._incarnation, self._status

    def start(self, cores: Sequence[int], seed: int, weights: Weights) -> bool:
        """Load the engine, bound to these cores ([]: wherever), with these weights. ConfigError if it can't be.

        Returns whether its weights can change while sequences run.
        One that runs already drops what it has: the driver has lost sight of it.
        """
        if self._thread is None:
            if cores:
                os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
                os.environ["OMP_NUM_THREADS"] = str(len(cores))
            config = parse_config(self._config)
            config = config.model_copy(update={"engine": config.engine.model_copy(update={"seed": seed})})
            ready: Future[None] = Future()
            self._thread = threading.Thread(target=self._run, args=(config, cores, ready), name="engine", daemon=True)
            self._thread.start()
            ready.result()
        else:
            self._ask(self._forget)
        try:
            self.update(self._incarnation, weights, "drained")
        except ConfigError as error:  # of the weights, which others may have taken: not of the configuration
            raise RuntimeError(str(error)) from error
        return self._takes_in_flight

    def serve(
        self, incarnation: str, errands: Sequence[Errand], versions: tuple[int, int], enough: int, give: int = 0
    ) -> Turn:
        """Begin the errands and wait for something to finish. enough: come back early with fewer sequences than this.
        give: first give up so many, those with the fewest tokens.

        Restarted if this is another process than `home` said, RuntimeError if its weights aren't of these versions
        (policy, draft).
        """
        self._check(incarnation)
        if self._versions != versions:
            raise RuntimeError(f"engine {self._number} has weights of version {self._versions}, not {versions}")
        if give:
            self._ask(lambda worker: self._give(worker, give))
        now = time.time()
        begin = [(errand, self._content(errand)) for errand in errands]
        if begin:
            shared = self._shared([errand.digest for errand in errands])
            self._put(lambda worker: self._remind(worker, shared))
            self._put(lambda worker: self._begin(worker, begin, now))
        began = time.monotonic()
        with self._cond:
            while (waited := time.monotonic() - began) < TURN:
                idle = (not self._labels and not self._inbox) or bool(self._given)
                few = bool(self._finished) and len(self._labels) < enough
                if idle or few or (self._finished and waited >= SHORTEST_TURN):
                    break
                self._cond.wait(SHORTEST_TURN if self._finished else TURN - waited)
            finished, self._finished = self._finished, []
            given, self._given = tuple(self._given), []
            windows, self._windows = tuple(self._windows), []
            live = len(self._labels) + len(self._inbox)
        table = as_table(finished, self._number, self._attempt, time.time()) if finished else None
        self._share(finished)
        keys = [
            (label.prompt, label.sample_id, None if rollout.finish_reason == "error" else len(rollout.token_ids))
            for label, rollout in finished
        ]
        stalled = time.monotonic() - self._seen if live else 0.0
        return Turn(keys, table, live, stalled, self._tokens, self._k, self._lengths, self._prompts, windows, given)

    def update(self, incarnation: str, weights: Weights, mode: Mode) -> None:
        """Put in what is not there yet. ConfigError where it doesn't fit (the old weights stay), or Restarted."""
        self._check(incarnation)

        def change(worker: Worker) -> None:
            options: dict[str, Any] = {}
            if weights.policy is not None and worker.policy_version != weights.policy_version:
                options |= {"weights": weights.policy, "policy_version": weights.policy_version}
            if weights.draft is not None and worker.draft_version != weights.draft_version:
                options |= {"draft": weights.draft, "draft_version": weights.draft_version}
            if options:
                worker.update_weights(**options, mode=mode)
            self._versions = (worker.policy_version, worker.draft_version)

        self._ask(change)

    def stop(self) -> None:
        """End the engine; the actor can't be used afterwards."""
        if self._thread is not None:
            self._stopping = True
            self._ask(lambda worker: worker.close())

    # -- in the driver's calls

    def _check(self, incarnation: str) -> None:
        if incarnation != self._incarnation:
            raise Restarted(f"engine {self._number} died while nobody spoke to it")

    def _content(self, errand: Errand) -> tuple[Any, Any]:
        block = self._blocks.pop(errand.block, None)
        if block is None:
            block = ray.get(errand.block)
        self._blocks[errand.block] = block
        if len(self._blocks) > BLOCKS:
            self._blocks.popitem(last=False)
        prompt, output_tokens = json.loads(block[errand.row])
        return prompt, output_tokens

    def _shared(self, digests: list[int]) -> dict[int, Shared]:
        """What others responded to these prompts; nothing if the store doesn't answer."""
        if self._drafts is None:
            return {}
        try:
            return dict(ray.get(self._drafts.of.remote(digests, self._incarnation), timeout=PATIENCE))
        except ray.exceptions.RayError:
            return {}

    def _share(self, finished: Sequence[tuple[Label, Rollout]]) -> None:
        if self._drafts is not None and finished:
            responses = [
                Response(label.digest, rollout.prompt_token_ids, rollout.token_ids, rollout.policy_version)
                for label, rollout in finished
                if rollout.token_ids
            ]
            self._drafts.add.remote(self._incarnation, responses)

    def _put(self, command: Callable[[Worker], None]) -> None:
        with self._cond:
            if not self._inbox and not self._labels:  # it slept
                self._seen = time.monotonic()
            self._inbox.append(command)
            self._cond.notify_all()

    def _ask(self, command: Callable[[Worker], None]) -> None:
        """Run it between two steps and wait for it; its ConfigError is raised here, anything else ends the process."""
        answer: Future[None] = Future()

        def run(worker: Worker) -> None:
            try:
                command(worker)
            except ConfigError as error:
                answer.set_exception(error)
            else:
                answer.set_result(None)

        self._put(run)
        answer.result()

    # -- in the engine's thread

    def _run(self, config: Config, cores: Sequence[int], ready: Future[None]) -> None:
        try:
            if cores:  # of this thread, and of those that it starts: vLLM binds those of its own processes only
                os.sched_setaffinity(0, cores)
            try:
                worker = self._make_worker(config)
            except ConfigError as error:
                ready.set_exception(error)
                return
            self._takes_in_flight = worker.takes_in_flight
            ready.set_result(None)
            looked, pace = 0.0, Pace()
            while True:
                with self._cond:
                    while not self._inbox and not self._labels:
                        self._cond.wait()
                    commands = list(self._inbox)
                self._seen = began = time.monotonic()
                for command in commands:
                    command(worker)
                    with self._cond:
                        self._inbox.popleft()
                if self._stopping:
                    return
                live = worker.num_unfinished
                worker.step()
                self._seen = time.monotonic()
                pace.step(live, self._seen - began)
                ended = self._collect(worker)
                if self._seen - looked > LOOK or (ended and not self._labels):
                    looked = self._seen
                    self._look(worker, pace)
                elif ended:
                    self._measure(worker)
        except BaseException:  # whatever it was, the engine can't be trusted any more
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(FAILED)

    def _remind(self, worker: Worker, shared: dict[int, Shared]) -> None:
        for prompt, responses in shared.values():
            new = {
                serial: kept.token_ids.tolist() for serial, kept in responses.items() if serial not in self._reminded
            }
            if new:
                self._reminded.update(new)
                worker.remember_drafts(prompt.tolist(), list(new.values()))

    def _begin(self, worker: Worker, errands: Sequence[tuple[Errand, tuple[Any, Any]]], now: float) -> None:
        for errand, (prompt, output_tokens) in errands:
            if errand.begun is not None:
                self._go_on(worker, errand, errand.begun, output_tokens)
                continue
            lengths = None if output_tokens is None else [[output_tokens[one] for one in errand.samples]]
            token_ids, problem = _tokenised(worker, prompt)
            labels = [
                Label(errand.prompt, errand.prompt_id, one, errand.digest, now, len(token_ids))
                for one in errand.samples
            ]
            if problem:
                refused = Rollout(0, 0, [], [], None, "error", worker.policy_version, None, problem)
                with self._cond:
                    self._finished += [(label, refused) for label in labels]
                    self._cond.notify_all()
                continue
            ids = worker.submit([token_ids], len(labels), output_tokens=lengths)
            with self._cond:
                self._labels.update(zip(ids, labels, strict=True))

    def _go_on(self, worker: Worker, errand: Errand, begun: Begun, output_tokens: Any) -> None:
        tokens = len(begun.rollout.prompt_token_ids)
        label = Label(errand.prompt, errand.prompt_id, begun.sample, errand.digest, begun.started_at, tokens)
        lengths = None if output_tokens is None else [output_tokens[begun.sample]]
        (name,) = worker.resume([begun.rollout], output_tokens=lengths)
        with self._cond:
            self._labels[name] = label

    def _give(self, worker: Worker, count: int) -> None:
        """Those with the fewest tokens: whoever takes them has to read them again."""
        lengths = worker.tokens_so_far()
        names = sorted(self._labels, key=lambda name: lengths.get(name, 0))[:count]
        worker.abort(names)
        ended = [(name, worker.take(name)) for name in names]
        with self._cond:
            for name, rollout in ended:
                label = self._labels.pop(name)
                assert rollout is not None
                if rollout.finish_reason == "abort":
                    self._given.append(Begun(label.prompt, label.sample_id, label.started_at, rollout))
                else:
                    self._finished.append((label, rollout))
        self._measure(worker)

    def _look(self, worker: Worker, pace: Pace) -> None:
        """At the engine's counters."""
        metrics = worker.metrics()
        tokens = metrics.get("vllm:generation_tokens", 0.0)
        window = pace.close(tokens - self._tokens)
        self._tokens, self._k = tokens, metrics.get("rollout_spec/k")
        self._status = worker.controller_status()
        if window is not None:
            with self._cond:
                self._windows.append(window)
        self._measure(worker)

    def _measure(self, worker: Worker) -> None:
        self._lengths = tuple(worker.tokens_so_far().values())
        prompts = [label.prompt_tokens for label in self._labels.values()]
        self._prompts = sum(prompts) / len(prompts) if prompts else 0.0

    def _collect(self, worker: Worker) -> bool:
        """Whether anything has ended."""
        if worker.num_unfinished == len(self._labels):
            return False
        done = [(name, rollout) for name in self._labels if (rollout := worker.take(name)) is not None]
        with self._cond:
            self._finished += [(self._labels.pop(name), rollout) for name, rollout in done]
            self._cond.notify_all()
        return True

    def _forget(self, worker: Worker) -> None:
        worker.abort()
        for name in self._labels:
            worker.take(name)
        with self._cond:
            self._labels.clear()
            self._finished.clear()
            self._given.clear()


def _tokenised(worker: Worker, prompt: Any) -> tuple[list[int], str]:
    """Token ids, and the problem where there are none for it."""
    try:
        return prompt_token_ids(lambda: worker.tokenizer, prompt), ""
    except Exception as error:  # a tokenizer's or a chat template's: of this prompt alone
        return [], f"not tokenised: {error}"


def make_rollout_worker(config: Config) -> Worker:
    """The real engine; with policy "off" a vLLM that has no drafter."""
    from rollout_spec.engine.launch import engine_arguments
    from rollout_spec.rollout.worker import RolloutWorker

    if config.policy.name == "off":
        return RolloutWorker(config, arguments=engine_arguments(config, drafter=None, policy=None))
    return RolloutWorker(config)
