"""The benchmark: every arm's engine up, then the arms in turn, repeat after repeat."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from rollout_spec import provenance
from rollout_spec.bench import table
from rollout_spec.bench.arms import ArmSpec, parse_arms
from rollout_spec.bench.engine_process import EngineFailed, EngineProcess
from rollout_spec.bench.results import Results
from rollout_spec.config import Config, ConfigError
from rollout_spec.model import resolve
from rollout_spec.workload import Group, Workload, build_workload, describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Warm-up prompts and lengths come from repeats that no measured run has.
WARM_UP_REPEAT = 1_000_000


class Benchmark:
    """One benchmark in one output directory. Everything is checked before the first engine starts."""

    def __init__(self, config: Config, out: Path) -> None:
        """Raises ConfigError on bad arms, model, workload, prompts beyond the context, or results of another set-up."""
        self.config = config
        self.out = out
        self.arms = parse_arms(config)
        self.model = resolve(config.model)
        for drafter in {arm.drafter.model for arm in self.arms if arm.drafter and arm.drafter.model}:
            resolve(drafter)
        self.workloads = [build_workload(config.workload, config.bench.seed, r) for r in range(config.bench.repeats)]
        check_context(self.workloads, config, load_tokenizer(str(self.model)))
        self.path = out / "results.json"
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: is no directory ({error.strerror}); give another") from error
        record = provenance.collect() | {
            "config_fingerprint": provenance.fingerprint(config.model_dump(mode="json")),
            "config": config.model_dump(mode="json"),
        }
        self.results = Results.resume(self.path, record, self._describe())
        for arm in self.arms:
            self.results.add_arm(arm.name, arm.kind, arm.drafter_name)

    def run(self) -> list[str]:
        """Run what is missing and save after each run; returns a sentence for each arm that failed."""
        todo = [arm for arm in self.arms if self.results.missing(arm.name, self.config.bench.repeats)]
        failures: list[str] = []
        engines: dict[str, EngineProcess] = {}
        try:
            for arm in todo:
                self._start(arm, engines, failures)
            self._measure(engines, failures)
        finally:
            for engine in engines.values():
                engine.close()
        return failures

    def _start(self, arm: ArmSpec, engines: dict[str, EngineProcess], failures: list[str]) -> None:
        say(f"starting and warming up: {arm.name}" + (f" with {arm.drafter_name}" if arm.drafter else ""))
        engine = EngineProcess(self.config, arm, self.out / "logs" / f"{arm.name.replace(':', '-')}.log")
        try:
            engine.wait_ready()
            if self.config.bench.warmup_tokens:
                engine.warm_up(warm_up_groups(self.config))
            engines[arm.name] = engine
        except EngineFailed as error:
            failures.append(str(error))
            say(failures[-1])
            engine.close()

    def _measure(self, engines: dict[str, EngineProcess], failures: list[str]) -> None:
        plan = list(self._plan(engines))
        total = sum(self.workloads[repeat].num_samples for _, repeat in plan)
        with tqdm(total=total, unit="seq", dynamic_ncols=True, smoothing=0.05, disable=not total) as bar:
            for name, repeat in plan:
                if name not in engines:
                    continue
                bar.set_description(f"repeat {repeat + 1}/{self.config.bench.repeats} {name}")
                try:
                    run = engines[name].run(self.workloads[repeat].groups, repeat, bar.update)
                except EngineFailed as error:
                    failures.append(str(error))
                    say(failures[-1])
                    engines.pop(name).close()
                    continue
                self.results.add_run(name, run)
                self.results.save(self.path)
                if all(not self.results.missing(arm, repeat + 1) for arm in engines):
                    bar.clear()
                    say(f"\nafter repeat {repeat + 1} of {self.config.bench.repeats}:\n{table.render(self.results)}")

    def _plan(self, engines: dict[str, EngineProcess]) -> Iterator[tuple[str, int]]:
        """Arms in turn: the first one rotates and the direction changes, so that no arm always follows the same one."""
        names = list(engines)
        for repeat in range(self.config.bench.repeats if names else 0):
            first = repeat % len(names)
            forwards = names[first:] + names[:first]
            for name in [forwards[0], *reversed(forwards[1:])] if repeat % 2 else forwards:
                if repeat in self.results.missing(name, self.config.bench.repeats):
                    yield name, repeat

    def _describe(self) -> dict[str, Any]:
        config, first = self.config, self.workloads[0]
        lengths = [length for load in self.workloads for group in load.groups for length in group.output_tokens or ()]
        return {
            "name": first.name,
            "model": config.model,
            "num_prompts": len(first.groups),
            "num_samples": first.num_samples,
            "n": max(group.n for group in first.groups),
            "max_num_seqs": config.engine.max_num_seqs,
            "temperature": config.sampling.temperature,
            "seed": config.bench.seed,
            "source": dict(first.source),
            "imposed_lengths": dataclasses.asdict(describe(lengths)) if lengths else None,
        }


def warm_up_groups(config: Config) -> list[Group]:
    """Generated prompts, one for each sequence of a full batch, with lengths that drain it evenly."""
    count = config.engine.max_num_seqs
    workload = config.workload.model_copy(update={"name": "natural", "num_prompts": count, "n": 1})
    groups = build_workload(workload, config.bench.seed, WARM_UP_REPEAT).groups
    tokens = config.bench.warmup_tokens
    return [
        dataclasses.replace(group, output_tokens=(max(1, tokens * (index + 1) // count),))
        for index, group in enumerate(groups)
    ]


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: value {model!r}: its tokenizer cannot be loaded: {error}") from error
    return tokenizer


def check_context(workloads: Sequence[Workload], config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """ConfigError for the first prompt that, with its response, does not fit engine.max_model_len."""
    from rollout_spec.engine.requests import prompt_token_ids

    limit = config.engine.max_model_len
    for workload in workloads:
        for group in workload.groups:
            prompt = len(prompt_token_ids(lambda: tokenizer, group.prompt))
            longest = max(group.output_tokens) if group.output_tokens else config.workload.max_tokens
            if prompt + longest > limit:
                raise ConfigError(
                    f"workload: prompt {group.prompt_id!r} has {prompt} tokens and a response of up to {longest}, "
                    f"together beyond engine.max_model_len {limit}; raise it or shorten them"
                )


def say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
