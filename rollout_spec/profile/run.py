"""Measures a profile: two engines, with and without the drafter, round after round over the batches; resumable."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rollout_spec import provenance
from rollout_spec.bench.arms import ArmSpec
from rollout_spec.bench.engine_process import EngineProcess
from rollout_spec.config import Config, ConfigError, DrafterConfig, PolicyConfig
from rollout_spec.control.policy import StepResult
from rollout_spec.control.sweep import Sweep, spread_out
from rollout_spec.files import write_json
from rollout_spec.model import resolve
from rollout_spec.profile import grid, probe
from rollout_spec.profile.acceptance import Acceptance, count
from rollout_spec.profile.cell import Cell, TimedStep, cells, worst_error
from rollout_spec.profile.level import level, prompt_tokens, rows
from rollout_spec.profile.record import Profile, acceptance_of
from rollout_spec.simulate.acceptance_curve import AcceptanceCurve
from rollout_spec.workload import Group, build_workload

OFF = ArmSpec("off", "off", None, None)
# Acceptance is measured on prompts and lengths that no benchmark of this seed has.
HELD_OUT_REPEAT = 2_000_000
# The long context is measured at so many batch sizes, and takes this many rounds.
LONG_BATCHES, LONG_ROUNDS = 3, 3
# So many rounds say whether a curve bends, and so many how far they differ.
FIRST_ROUNDS, ENOUGH_ROUNDS = 2, 3
# The held-out rollout has so many times the sequences that run at once, if the workload has: slots are refilled there.
ROLLOUT_FILLS = 3
# ... and responses of at most so many tokens: a profile is a matter of minutes, also for those who generate 32k.
ROLLOUT_TOKENS = 512
# Steps of the engine without a drafter in each round, and those of a round that are warm-up.
OFF_STEPS, WARM_UP = 10, 2
# Of the tokens that the cache holds a batch may take this share.
CACHE_SHARE = 0.9


class Profiler:
    """One profile in one file. Everything is checked before the first engine starts."""

    def __init__(self, config: Config, out: Path) -> None:
        """Raises ConfigError on a bad model or drafter, a file of another set-up, or contexts beyond the engine's."""
        self.config, self.out = config, out
        self.options = config.profile
        self.k_max = config.drafter.k_max
        self.ks = self.options.ks or spread_out(self.k_max)
        self.sizes = self.options.batches or grid.candidates(config.engine.max_num_seqs)
        self.long = self.options.long_context or 3 * config.engine.max_model_len // 4
        room = 8 * (self.k_max + 2)
        if max(self.options.context, self.long) + room > config.engine.max_model_len:
            raise ConfigError(
                f"profile.context {self.options.context} or long_context {self.long} leaves fewer than {room} tokens "
                f"to generate within engine.max_model_len {config.engine.max_model_len}; lower it, or raise that"
            )
        resolve(config.model)
        if config.drafter.model:
            resolve(config.drafter.model)
        self.fingerprint = provenance.fingerprint(config.model_dump(mode="json"), ignore=("profile.rounds", "bench"))
        self.partial = out.with_name(f"{out.stem}.partial.json")
        self.state = self._resume()
        self.logs = out.with_name(f"{out.stem}.logs")

    def run(self) -> Profile:
        """Measure what is missing. Each round is kept as soon as it is measured."""
        with tempfile.TemporaryDirectory(prefix="rollout_spec_") as folder:
            self.trace = Path(folder) / "trace.jsonl"
            self._step_times()
            if "acceptance" not in self.state:
                self.state["acceptance"] = dataclasses.asdict(self._acceptance(Path(folder) / "acceptance.jsonl"))
                self._keep()
            given = self.config.drafter.synthetic_acceptance is not None
            if self.options.acceptance_prompts and not given and "rollout" not in self.state:
                self._rollouts(Path(folder) / "rollout.jsonl")
                self._keep()
        profile = self._profile()
        profile.save(self.out)
        self.partial.unlink(missing_ok=True)
        return profile

    def _step_times(self) -> None:
        if self.state.get("complete"):
            return
        say("starting two engines: with the drafter, and without")
        sweep = PolicyConfig(name="sweep", ks=self.ks)
        spec = ArmSpec("sweep", "fixed", eager(self.config.drafter), sweep)
        with ExitStack() as stack:
            engine, plain = self._start(stack, spec, self.trace), self._start(stack, OFF)
            for each in (engine, plain):
                each.wait_ready()
            about = engine.call(probe.describe)
            self._same_engine(about["engine"])
            self.state["engine"] = about["engine"]
            self._measure(engine, plain, int(CACHE_SHARE * about["kv_tokens"]))
            self.state["complete"] = True
            self._keep()

    def _start(self, stack: ExitStack, spec: ArmSpec, trace: Path | None = None) -> EngineProcess:
        engine = EngineProcess(self.config, spec, self.logs / f"{spec.name}.log", trace)
        stack.callback(engine.close)
        return engine

    def _measure(self, engine: EngineProcess, plain: EngineProcess, cache: int) -> None:
        """The first rounds batch by batch, for they say which are worth measuring; then round by round over all of
        them, so that a machine that is slow for a minute is so for all alike."""
        measured: dict[int, list[Cell]] = {}
        with tqdm(unit="round", dynamic_ncols=True) as bar:
            bar.update(sum(self.state["rounds"].values()))

            def to_round(size: int, kind: str, number: int) -> None:
                context = min(self.options.context, cache // size - 8 * (self.k_max + 2))
                if kind == "long":
                    context = self.long
                while context > 0 and self.state["rounds"].get(f"{size} {kind}", 0) < number:
                    bar.set_description(f"batch {size}, {context} tokens of context")
                    self._round(engine, size, context, kind, plain)
                    bar.update()

            todo = list(self.options.batches or grid.first(self.sizes))
            while (size := todo.pop(0) if todo else self._next(measured)) is not None:
                to_round(size, "short", min(FIRST_ROUNDS, self.options.rounds))
                measured[size] = self._cells(size, "short")
            last = {(size, "short"): self.options.rounds for size, found in measured.items() if found}
            last |= {(size, "long"): LONG_ROUNDS for size in self._long_sizes(measured, cache)}
            for number in range(1, max(last.values(), default=0) + 1):
                for (size, kind), rounds in last.items():
                    if number <= rounds and not self._sure(size, kind, number - 1):
                        to_round(size, kind, number)

    def _sure(self, size: int, kind: str, rounds: int) -> bool:
        return rounds >= ENOUGH_ROUNDS and worst_error(self._cells(size, kind)) < self.options.error

    def _next(self, measured: dict[int, list[Cell]]) -> int | None:
        if self.options.batches:
            return None
        return grid.next_size(self.sizes, measured, self.options.bend)

    def _long_sizes(self, measured: dict[int, list[Cell]], cache: int) -> list[int]:
        fit = sorted(size for size, found in measured.items() if found and size * (self.long + 64) <= cache)
        picks = np.linspace(0, len(fit) - 1, min(LONG_BATCHES, len(fit))).round().astype(int)
        return [fit[i] for i in dict.fromkeys(picks.tolist())]

    def _round(self, engine: EngineProcess, size: int, context: int, kind: str, plain: EngineProcess) -> None:
        """A round of a sweep, and steps of the engine without a drafter. The first steps are thrown away as warm-up."""
        state, key = self.state, f"{size} {kind}"
        number = state["rounds"].get(key, 0)
        seed = self.options.seed + 1000 * size + number
        steps = Sweep(self.ks).round_steps
        decodes, prefills = engine.call(probe.sweep, self.trace, size, context, steps + WARM_UP, seed)
        found = [TimedStep.of(*pair, number) for pair in pairwise(decodes[WARM_UP - 1 :])]
        state["samples"].setdefault(key, []).extend(list(sample) for sample in found)
        if kind == "short":  # long prompts cost more a token
            state["prefill"] += [_prefill(step) for step in prefills if not step.decode]
            off = plain.call(probe.plain, size, context, OFF_STEPS, seed)[WARM_UP:]
            state["off"].setdefault(str(size), []).extend(off)
        state["rounds"][key] = number + 1
        self._keep()

    def _cells(self, size: int, kind: str) -> list[Cell]:
        return cells(size, [TimedStep(*values) for values in self.state["samples"].get(f"{size} {kind}", [])])

    def _acceptance(self, trace: Path) -> Acceptance:
        """With the user's own drafter on prompts of the workload; what vLLM was told, where it is told."""
        synthetic = self.config.drafter.synthetic_acceptance
        if synthetic is not None:
            survival = AcceptanceCurve.from_positions(synthetic, self.k_max).survival
            return Acceptance(survival, (1.0,) * self.k_max, 0, "given (drafter.synthetic_acceptance)")
        if not self.options.acceptance_prompts:
            return Acceptance()
        say("measuring acceptance on held-out prompts")
        prompts = max(1, self.options.acceptance_prompts // self.config.workload.n)
        load = self.config.workload.model_copy(update={"num_prompts": prompts})
        groups = held_out(build_workload(load, self.options.seed, HELD_OUT_REPEAT).groups, load.num_prompts)
        fixed = PolicyConfig(name="fixed", k=self.k_max)
        with ExitStack() as stack:
            engine = self._start(stack, ArmSpec("acceptance", "fixed", self.config.drafter, fixed), trace)
            engine.wait_ready()
            steps = engine.call(probe.rollout, trace, groups)
        source = f"{len(groups)} prompts of workload {load.name!r}, seed {self.options.seed}, held out"
        return count(steps, self.k_max, source)

    def _rollouts(self, trace: Path) -> None:
        """A held-out one without a drafter and with the configured policy, each twice and in turn, for the machine's
        pace must not come between them."""
        say("measuring a held-out rollout, with the drafter and without")
        policy = self.config.policy.model_copy(update={"profile": None})  # it is not there yet
        groups = self._rollout()
        with ExitStack() as stack:
            spec = ArmSpec("rollout", "fixed", self.config.drafter, policy)
            engine, plain = self._start(stack, spec, trace), self._start(stack, OFF)
            for each in (engine, plain):
                each.wait_ready()
            off = rows(plain.call(probe.plain_rollout, groups))
            found = rows(engine.call(probe.rollout, trace, groups))
            found += rows(engine.call(probe.rollout, trace, groups))
            off += rows(plain.call(probe.plain_rollout, groups))
        self.state |= {"rollout": found, "off_rollout": off}

    def _rollout(self) -> list[Group]:
        """Of the workload's own lengths, a few times what runs at once if it has as much: what a rollout takes beside
        its steady steps."""
        prompts = ROLLOUT_FILLS * self.config.engine.max_num_seqs // self.config.workload.n
        load = self.config.workload.model_copy(
            update={"num_prompts": max(1, min(self.config.workload.num_prompts, prompts))}
        )
        groups = build_workload(load, self.options.seed, HELD_OUT_REPEAT + 1).groups[: load.num_prompts]
        most = min(ROLLOUT_TOKENS, self.config.sampling.max_tokens)
        return [capped(group, most) for group in groups]

    def _profile(self) -> Profile:
        """Levels are of the same minutes as the cells, or of none where measuring them was left out."""
        state = self.state
        found = [cell for key in state["samples"] for cell in self._cells(int(key.split()[0]), key.split()[1])]
        if not found:
            raise ConfigError(f"profile: no batch gave a steady step; the engines' logs are in {self.logs}")
        profile = Profile(
            provenance=provenance.collect(),
            engine=state["engine"],
            k_max=self.k_max,
            max_num_seqs=self.config.engine.max_num_seqs,
            cells=sorted(found, key=lambda cell: (cell.batch, cell.context, cell.k)),
            off={
                int(size): float(np.median(seconds))
                for size, seconds in sorted(state["off"].items(), key=lambda item: int(item[0]))
                if seconds
            },
            prefill_token_seconds=prefill_rate(state["prefill"], min(c.seconds for c in found if c.k == 0)),
            acceptance=acceptance_of(state["acceptance"]),
            config=self.config.model_dump(mode="json"),
        )
        times, rollout = profile.step_times(), state.get("rollout", [])
        reading = prompt_tokens(rollout) * profile.prefill_token_seconds  # with and without a drafter the same prompts
        off = level(state.get("off_rollout", []), times.without_drafter(), 1, reading) if profile.off else None
        return dataclasses.replace(profile, rollout_level=level(rollout, times, self.k_max, reading), off_level=off)

    def _resume(self) -> dict[str, Any]:
        fresh = {"fingerprint": self.fingerprint, "samples": {}, "rounds": {}, "off": {}, "prefill": []}
        if not self.partial.exists():
            return fresh
        try:
            state: dict[str, Any] = json.loads(self.partial.read_text("utf-8"))
            same = state["fingerprint"] == self.fingerprint
            if missing := fresh.keys() - state.keys():
                raise KeyError(*missing)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.partial}: damaged ({error}); delete it to measure afresh") from error
        if not same:
            raise ConfigError(f"{self.partial}: was begun with another configuration; delete it, or give another --out")
        return state

    def _same_engine(self, engine: dict[str, str]) -> None:
        before = self.state.get("engine", engine)
        if before != engine:
            other = [
                f"{key} {before.get(key)!r}, now {engine[key]!r}" for key in engine if before.get(key) != engine[key]
            ]
            raise ConfigError(f"{self.partial}: was begun on another engine ({'; '.join(other)}); delete it")

    def _keep(self) -> None:
        write_json(self.partial, self.state)


def eager(drafter: DrafterConfig) -> DrafterConfig:
    """The drafter, so set that one that copies finds as many drafts as it is asked for: full drafts are timed."""
    suffix = drafter.suffix.model_copy(update={"min_token_prob": 0.0, "max_spec_factor": 16.0})
    return drafter.model_copy(update={"prompt_lookup_min": 1, "suffix": suffix})


def _prefill(step: StepResult) -> list[float]:
    return [float(step.prefill_tokens), step.seconds]


def held_out(groups: Sequence[Group], most: int) -> list[Group]:
    """At most so many groups; imposed lengths become the longest one, for it is long responses that are drafted."""
    groups = list(groups)[:most]
    longest = max((max(group.output_tokens) for group in groups if group.output_tokens), default=None)
    if longest is None:
        return groups
    return [dataclasses.replace(group, output_tokens=(longest,) * group.n) for group in groups]


def capped(group: Group, most: int) -> Group:
    """Imposed lengths of at most so many tokens; where none are imposed, `most` for all."""
    lengths = group.output_tokens or (most,) * group.n
    return dataclasses.replace(group, output_tokens=tuple(min(length, most) for length in lengths))


def prefill_rate(steps: Sequence[Sequence[float]], base: float) -> float:
    """Seconds a prompt token, from [tokens, seconds] of steps that held nothing else; `base`: those of an empty step.

    The median over the larger ones: small steps cost what a decode costs, and the first one warms up.
    """
    largest = max((tokens for tokens, _ in steps), default=0.0)
    rates = [max(seconds - base, 0.0) / tokens for tokens, seconds in steps if tokens >= largest / 2]
    return float(np.median(rates)) if rates else 0.0


def say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
