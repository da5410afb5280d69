"""All engines: placed and restarted by Ray, fed from one queue, kept on the right weights.

Each engine has at most one call under way, so that a call that fails says exactly what was lost with it: everything the
queue says that the engine holds. Ray restarts the actor; before it serves again it is loaded with the weights that are
wanted now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group

from rollout_spec.config import Config, ConfigError
from rollout_spec.control.makespan import Lengths
from rollout_spec.rollout.resident import Mode
from rollout_spec_ray.balance import Balance, Load, Move
from rollout_spec_ray.catalogue import Catalogue
from rollout_spec_ray.drafts import DraftStore
from rollout_spec_ray.engine import Home, MakeWorker, Restarted, Turn, Weights, make_rollout_worker
from rollout_spec_ray.failures import PoolFailed, WeightsRefused
from rollout_spec_ray.seat import Seat, Stage, make_seat
from rollout_spec_ray.work import Work

# Seconds between looks at time limits while no engine answers.
TICK = 0.5
# A call of `serve` returns by itself within a second; one that takes longer than an engine may stall is lost.
CALL = 30.0
# Who made the responses of earlier epochs.
EARLIER = "earlier"
# Between questions to an engine that Ray is starting (seconds).
SHORT = 0.1
# For engines to end by themselves (seconds).
FAREWELL = 20.0


class Pool:
    """Not thread-safe: one driver, one thread."""

    def __init__(
        self,
        config: Config,
        *,
        attempt: int = 1,
        make_worker: MakeWorker = make_rollout_worker,
        earlier: Iterable[Any] = (),
        say: Callable[[str], object] = print,
    ) -> None:
        """Ask Ray, which must be running, for the engines; they load in the background.

        earlier: tables of output rows, whose responses may serve as drafts.
        """
        self.config = config
        self.options = config.ray
        self.generated = 0.0  # tokens, of unfinished sequences too
        self.restarts = 0
        self.moved = 0  # sequences that went on in another engine
        self._balance = Balance()
        self._attempt, self._say = attempt, say
        self._wanted = self._before = Weights()
        self._mode: Mode = "drained"
        self._starts = 0
        self._cores: dict[tuple[str, int], int] = {}  # (node, core) -> seat
        self._placed = time.monotonic()  # an engine was at least loading
        batch = config.engine.max_num_seqs
        self.backlog = -(-batch // 8) if self.options.backlog is None else self.options.backlog
        self.capacity = batch + self.backlog
        self._drafts = self._store(earlier)
        self.seats = [
            make_seat(config, number, attempt, make_worker, self._drafts) for number in range(self.options.engines)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(
        self,
        work: Work,
        catalogue: Catalogue,
        on_finished: Callable[[Any], object],
        on_aside: Callable[[int, str], object],
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        """Until the work is done. on_finished gets tables of output rows, each sequence once; on_aside a prompt that
        was set aside and why; tick is called about every turn.

        Raises PoolFailed if no engine is left, ConfigError if the configuration can't work, and WeightsRefused, after
        which it may be called again and goes on with the weights before.
        """
        while not work.done:
            self._turn(work, catalogue, on_finished, on_aside)
            tick()

    def wait(self, seconds: float = 0.0) -> None:
        """Until all engines are up, or one is and so many seconds have passed."""
        until = time.monotonic() + seconds
        nothing, catalogue = Work(Lengths(), capacity=1), Catalogue()
        while any(seat.stage in ("placing", "loading") for seat in self.seats):
            if self.up and time.monotonic() > until:
                return
            self._turn(nothing, catalogue)

    def want(self, weights: Weights, mode: Mode = "drained") -> None:
        """From now on no engine begins a sequence with other weights than these. What runs is treated by `mode`, as
        in `RolloutWorker.update_weights`; drained: each engine finishes what it has first."""
        if weights != self._wanted:
            self._before, self._wanted = self._wanted, weights
        self._mode = mode

    def update_weights(self, weights: Weights, mode: Mode = "drained") -> None:
        """As `want`, and wait until every engine that is up has them; for a trainer, between two rollouts.

        WeightsRefused if they don't fit: the old ones are wanted again, by all.
        """
        self.wait()
        self.want(weights, mode)
        nothing, catalogue = Work(Lengths(), capacity=1), Catalogue()
        while any(seat.stage in ("serving", "updating") and seat.weights != weights for seat in self.seats):
            self._turn(nothing, catalogue)

    def close(self) -> None:
        """End all engines and give back what they held."""
        up = [seat for seat in self.seats if seat.stage in ("serving", "updating")]
        farewells = [seat.handle.stop.remote() for seat in up]
        if farewells:
            ray.wait(farewells, num_returns=len(farewells), timeout=FAREWELL)
        for seat in self.seats:
            self._leave(seat)
        if self._drafts is not None:
            ray.kill(self._drafts)

    @property
    def up(self) -> int:
        """Engines that can generate."""
        return sum(seat.stage in ("serving", "updating") for seat in self.seats)

    @property
    def wanted(self) -> Weights:
        """What every engine has, or will have."""
        return self._wanted

    @property
    def settled(self) -> bool:
        """Every engine that can generate has the weights that are wanted."""
        return all(seat.weights == self._wanted for seat in self.seats if seat.stage in ("serving", "updating"))

    @property
    def takes_in_flight(self) -> bool:
        """Weights can change while sequences run, in every engine that can generate."""
        return all(seat.takes_in_flight for seat in self.seats if seat.stage in ("serving", "updating"))

    @property
    def k(self) -> float | None:
        """Mean K of the engines now; None where no controller tells."""
        known = [seat.k for seat in self.seats if seat.k is not None and seat.stage == "serving"]
        return sum(known) / len(known) if known else None

    # -- placing

    def _store(self, earlier: Iterable[Any]) -> Any:
        """The actor that keeps responses for all to draft from; None where no drafter has a use for them."""
        drafter = self.config.drafter
        useful = drafter.method == "suffix" and drafter.suffix.max_history_tokens and self.config.policy.name != "off"
        if not useful or not self.options.shared_drafts:
            return None
        # One that dies comes back empty, and fills again.
        store = ray.remote(DraftStore).options(num_cpus=0, max_restarts=-1).remote(self.options.shared_drafts)
        for table in earlier:
            store.add_table.remote(EARLIER, table)
        return store

    def _bind(self, seat: Seat, home: Home) -> tuple[int, ...]:
        """Cores of its node that no other engine is bound to; none where there aren't enough, or GPUs do the work."""
        self._cores = {core: number for core, number in self._cores.items() if number != seat.number}
        if self.options.gpus_per_engine:
            return ()
        free = [core for core in home.cores if (home.node, core) not in self._cores]
        mine = tuple(free[: self.options.cpus_per_engine])
        if len(mine) < self.options.cpus_per_engine:
            return ()
        self._cores |= {(home.node, core): seat.number for core in mine}
        return mine

    def _seed(self) -> int:
        """Another one for every start: engines of one seed would sample the same noise."""
        self._starts += 1
        return int(
            np.random.SeedSequence([self.config.engine.seed, self._attempt, self._starts]).generate_state(1)[0] >> 1
        )

    # -- calls

    def _turn(
        self,
        work: Work,
        catalogue: Catalogue,
        on_finished: Callable[[Any], object] = lambda table: None,
        on_aside: Callable[[int, str], object] = lambda prompt, why: None,
    ) -> None:
        """Give everyone something to do, and hear those that have something to say."""
        now = time.monotonic()
        move = self._best_move(work)
        for seat in self.seats:
            if seat.call is None and seat.stage == "serving":
                self._send(seat, work, catalogue, move if move and move.source == seat.number else None)
            elif seat.call is None and seat.stage == "placing" and now >= seat.again:
                self._call(seat, "placing", seat.handle.home.remote())
        for seat in self._answered():
            self._answer(seat, work, on_finished, on_aside)
        self._check_time()

    def _call(self, seat: Seat, stage: Stage, call: Any) -> None:
        seat.stage, seat.call, seat.since = stage, call, time.monotonic()

    def _best_move(self, work: Work) -> Move | None:
        """What is worth moving now, between engines of which all is known."""
        if not self.options.move or work.waiting or any(seat.giving_to is not None for seat in self.seats):
            return None
        loads = []
        for seat in self.seats:
            if seat.stage != "serving" or not work.may_move(seat.number):
                continue
            held, turn = work.held_by(seat.number), seat.turn
            if seat.weights != self._wanted or work.coming(seat.number):
                return None
            if held and (turn is None or len(turn.lengths) != held):  # it has not looked since
                return None
            loads.append(Load(seat.number, turn.lengths if held and turn else (), turn.prompts if turn else 0.0))
        return self._balance.best(loads, work.remaining)

    def _send(self, seat: Seat, work: Work, catalogue: Catalogue, move: Move | None) -> None:
        """Give an engine that is ready what it does next; nothing if there is nothing."""
        errands = []
        if seat.weights != self._wanted:
            if not (self._mode == "drained" and work.held_by(seat.number)):
                self._renew(seat, work)
                return
        else:
            sharing = sum(other.stage in ("serving", "updating", "loading") for other in self.seats)
            pieces = work.take(seat.number, sharing)
            # What other weights have begun is begun anew.
            ours = {key: b for key, b in work.begun.items() if b.rollout.policy_version == seat.weights.policy_version}
            errands = list(catalogue.errands(pieces, ours))
        if errands or work.held_by(seat.number):
            enough = self.capacity - self.backlog + bool(self.backlog) if work.waiting else 0
            versions = (seat.weights.policy_version, seat.weights.draft_version)
            seat.turn = None if errands else seat.turn
            seat.giving_to = move.target if move else None
            give = move.sequences if move else 0
            self._call(seat, "serving", seat.handle.serve.remote(_process(seat), errands, versions, enough, give))

    def _renew(self, seat: Seat, work: Work) -> None:
        """Bring its weights to those that are wanted."""
        back = (seat.weights.policy and not self._wanted.policy) or (seat.weights.draft and not self._wanted.draft)
        if back:  # to those of the configuration, which only a start has
            work.engine_died(seat.number, blame=False)
            self._kill(seat)
            self._place(seat)
            return
        seat.coming = self._wanted
        self._call(seat, "updating", seat.handle.update.remote(_process(seat), self._wanted, self._mode))

    def _answered(self) -> list[Seat]:
        """Seats whose call has ended, after `TICK` at the latest."""
        calls = {seat.call: seat for seat in self.seats if seat.call is not None}
        patience = SHORT if any(seat.stage == "placing" and seat.call is None for seat in self.seats) else TICK
        if not calls:
            time.sleep(patience)
            return []
        ended, rest = ray.wait(list(calls), num_returns=1, timeout=patience)
        if ended and rest:
            ended += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return [calls[call] for call in ended]

    def _answer(
        self, seat: Seat, work: Work, on_finished: Callable[[Any], object], on_aside: Callable[[int, str], object]
    ) -> None:
        call, seat.call = seat.call, None
        try:
            value = ray.get(call)
        except ConfigError as raised:
            # Ray's own holds the remote traceback for a message; what a user reads is the cause.
            error = getattr(raised, "cause", raised)
            if seat.stage == "updating":
                self._refused(seat, error)
            elif self.up:
                self._say(f"engine {seat.number}: cannot be started and is given up. {error}")
                self._leave(seat)
            else:
                raise error from None
        except RayActorError as error:
            # Ray answers so while it starts another process; and a call may meet one that was just killed.
            if seat.stage == "placing" and (isinstance(error, ActorUnavailableError) or seat.killed is not None):
                seat.killed = seat.killed if isinstance(error, ActorUnavailableError) else None
                self._place(seat)
            else:
                self._died(seat, _why(error), work, on_aside)
        except Restarted as error:
            self._died(seat, _why(error), work, on_aside)
        except (RayTaskError, RayError) as error:  # it lives, but what it said is lost or can't be trusted
            self._kill(seat)
            self._died(seat, _why(error), work, on_aside)
        else:
            if seat.stage == "placing" and seat.killed == value.incarnation:  # it hasn't heard yet
                self._place(seat)
            elif seat.stage == "placing":
                seat.home, seat.coming, seat.killed = value, self._wanted, None
                seat.tokens, seat.k = 0.0, None
                seat.cores = self._bind(seat, value)
                start = seat.handle.start.remote(list(seat.cores), self._seed(), self._wanted)
                self._call(seat, "loading", start)
            elif seat.stage in ("loading", "updating"):
                seat.takes_in_flight = value if seat.stage == "loading" else seat.takes_in_flight
                seat.stage, seat.weights = "serving", seat.coming
            elif problem := self._served(seat, value, work, on_finished):
                self._kill(seat)
                self._died(seat, problem, work, on_aside)

    def _served(self, seat: Seat, turn: Turn, work: Work, on_finished: Callable[[Any], object]) -> str | None:
        """Take what an engine has to say; returns why it has to be restarted, if it has."""
        self.generated += max(turn.tokens - seat.tokens, 0.0)
        seat.tokens, seat.k, seat.turn = turn.tokens, turn.k, turn
        for window in turn.windows:
            self._balance.measured(*window)
        mine = [work.finish(seat.number, prompt, sample, tokens) for prompt, sample, tokens in turn.finished]
        if any(mine):
            seat.deaths = 0
            on_finished(turn.table if all(mine) else turn.table.filter(mine))
        self._give(seat, turn, work)
        if turn.stalled > self.options.stall_seconds:
            return f"It made no step for {turn.stalled:.0f} s."
        if not turn.live and work.held_by(seat.number):
            return "It does not know what it was given."
        return None

    def _give(self, seat: Seat, turn: Turn, work: Work) -> None:
        """What it has given up is on its way to the engine that is to have it; back, if that one is down."""
        target, seat.giving_to = seat.giving_to, None
        if target is None or self.seats[target].stage != "serving":
            target = seat.number
        for one in turn.given:
            work.move(seat.number, one.prompt, one.sample, target, one)
        self.moved += len(turn.given) if target != seat.number else 0

    def _refused(self, seat: Seat, error: ConfigError) -> None:
        """Weights that don't fit: those before are wanted again, and whoever wanted others hears of it."""
        seat.stage = "serving"
        if seat.coming == self._wanted:
            self._wanted = self._before
            raise WeightsRefused(f"policy version {seat.coming.policy_version}: {error}") from error

    # -- deaths

    def _died(self, seat: Seat, why: str, work: Work, on_aside: Callable[[int, str], object]) -> None:
        held = work.held_by(seat.number)
        seat.turn = seat.giving_to = None
        # What an engine held may have killed it; it has not when its whole node went.
        blame = seat.home is not None and _alive(seat.home.node)
        aside = work.engine_died(seat.number, blame=blame)
        for prompt in aside:
            on_aside(prompt, why)
        seat.deaths = 0 if aside else seat.deaths + 1
        self.restarts += 1
        if seat.deaths > self.options.restarts:
            self._say(f"engine {seat.number}: died {seat.deaths} times in a row, it is given up. The last time: {why}")
            self._leave(seat)
        else:
            self._say(f"engine {seat.number}: lost with {held} sequences, Ray starts another. {why}")
            self._place(seat)

    def _check_time(self) -> None:
        now = time.monotonic()
        limits = {
            "loading": self.options.start_seconds,
            "updating": self.options.start_seconds,
            "serving": self.options.stall_seconds + CALL,
        }
        for seat in self.seats:
            if seat.call is not None and now - seat.since > limits.get(seat.stage, float("inf")):
                self._say(f"engine {seat.number}: {seat.stage} takes more than {limits[seat.stage]:.0f} s; restarted")
                seat.since = now
                self._kill(seat)
        if any(seat.stage in limits for seat in self.seats):
            self._placed = now
        if all(seat.stage == "gone" for seat in self.seats):
            raise PoolFailed("no engine is left: all were given up (see above)")
        if now - self._placed > self.options.start_seconds:
            raise PoolFailed(
                f"for {now - self._placed:.0f} s no engine could be placed: each needs {self.options.cpus_per_engine} "
                f"CPUs and {self.options.gpus_per_engine} GPUs of one node; the cluster has {_resources()}"
            )

    def _place(self, seat: Seat) -> None:
        """Ask, in a moment, where it is now."""
        seat.stage, seat.call, seat.again = "placing", None, time.monotonic() + SHORT

    def _kill(self, seat: Seat) -> None:
        """Its process; Ray starts another."""
        seat.killed = seat.home.incarnation if seat.home is not None else None
        ray.kill(seat.handle, no_restart=False)

    def _leave(self, seat: Seat) -> None:
        ray.kill(seat.handle)
        if seat.group is not None:
            remove_placement_group(seat.group)
        seat.stage, seat.call = "gone", None


def _process(seat: Seat) -> str:
    assert seat.home is not None
    return seat.home.incarnation


def _alive(node: str) -> bool:
    return any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())


def _resources() -> str:
    total = ray.cluster_resources()
    return ", ".join(f"{total.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))


def _why(error: Exception) -> str:
    """Ray's many lines in one: where it tells how the process ended, that; else the last one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "exit detail" in line or ("node" in line.lower() and "died" in line.lower())]
    return (told or lines or [type(error).__name__])[-1]
