"""What the benchmark compares: a policy with a drafter, and the engine that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rollout_spec.config import K_MAX_LIMIT, Config, ConfigError, DrafterConfig, DrafterMethod, PolicyConfig

Kind = Literal["off", "fixed", "threshold", "table", "goodput", "budget", "aimd", "bandit"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FORMS = "off, fixed:K, threshold[:BATCH[:K]], table, goodput, budget, aimd, bandit; each but off may end in @DRAFTER"


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """One arm. Without a policy vLLM's own scheduler runs: off, a fixed K > 0, and vLLM's table."""

    name: str
    kind: Kind
    drafter: DrafterConfig | None
    policy: PolicyConfig | None
    vllm_table: list[tuple[int, int, int]] | None = None

    @property
    def drafter_name(self) -> str | None:
        return None if self.drafter is None else self.drafter.method


def parse_arms(config: Config) -> list[ArmSpec]:
    """The arms of `config.bench.arms`; ConfigError names the arm and what would be right."""
    arms = [parse_arm(text, config) for text in config.bench.arms]
    names = [arm.name for arm in arms]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise ConfigError(f"bench.arms: {double!r} is there twice")
    return arms


def parse_arm(text: str, config: Config) -> ArmSpec:
    spec, at, method = text.partition("@")
    name, *arguments = spec.split(":")
    kind = next((known for known in KINDS if known == name), None)
    if kind is None:
        raise ConfigError(f"bench.arms: {text!r}: unknown policy {name!r}; known are {FORMS}")
    limit = {"fixed": 1, "threshold": 2}.get(kind, 0)
    if len(arguments) > limit or (kind == "fixed" and not arguments) or (at and not method):
        raise ConfigError(f"bench.arms: {text!r}: the form is not one of {FORMS}")
    numbers = [_number(text, argument) for argument in arguments]
    if kind == "off":
        if method:
            raise ConfigError(f"bench.arms: {text!r}: off has no drafter; for K=0 with one loaded say fixed:0@{method}")
        return ArmSpec(text, "off", None, None)
    drafter = _drafter(text, method, config)
    if kind == "fixed":
        return _fixed(text, numbers[0], drafter)
    if kind == "table":
        table = config.bench.table
        k_max = max(k for _, _, k in table)
        if k_max == 0:
            raise ConfigError("bench.table: every K is 0; give at least one row with K > 0, or leave the arm out")
        return ArmSpec(text, "table", drafter.model_copy(update={"k_max": k_max}), None, table)
    if kind == "threshold":
        batch, k = [*numbers, *(config.policy.threshold, config.policy.k)[len(numbers) :]]
        if k > drafter.k_max:
            raise ConfigError(f"bench.arms: {text!r}: K={k} is above drafter.k_max {drafter.k_max}; raise k_max")
        return ArmSpec(text, "threshold", drafter, PolicyConfig(name="threshold", threshold=batch, k=k))
    return ArmSpec(text, kind, drafter, config.policy.model_copy(update={"name": kind}))


def _fixed(text: str, k: int, drafter: DrafterConfig) -> ArmSpec:
    if k > K_MAX_LIMIT:
        raise ConfigError(f"bench.arms: {text!r}: vLLM takes K up to {K_MAX_LIMIT}")
    if k == 0:
        # vLLM has no K=0 with a drafter loaded; the plug-in does, and this arm shows what that costs.
        return ArmSpec(text, "fixed", drafter, PolicyConfig(name="fixed", k=0))
    return ArmSpec(text, "fixed", drafter.model_copy(update={"k_max": k}), None)


def _drafter(text: str, method: str, config: Config) -> DrafterConfig:
    if not method or method == config.drafter.method:
        return config.drafter
    if method not in get_args(DrafterMethod):
        raise ConfigError(
            f"bench.arms: {text!r}: unknown drafter {method!r}; known are {', '.join(get_args(DrafterMethod))}"
        )
    if config.drafter.model is None and method not in ("ngram", "suffix", "mtp"):
        raise ConfigError(f"bench.arms: {text!r}: drafter {method!r} needs drafter.model")
    return config.drafter.model_copy(update={"method": method})


def _number(text: str, argument: str) -> int:
    if not argument.isdecimal():
        raise ConfigError(f"bench.arms: {text!r}: {argument!r} must be a whole number, 0 or more")
    return int(argument)
