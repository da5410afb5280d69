"""Policies by name. A new one is a new file and one line here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollout_spec.config import ConfigError, PolicyConfig
from rollout_spec.control.aimd import Aimd
from rollout_spec.control.bandit import Bandit
from rollout_spec.control.budget import Budget
from rollout_spec.control.fixed import Fixed, Table, Threshold
from rollout_spec.control.goodput import Goodput
from rollout_spec.control.policy import Policy
from rollout_spec.control.step_times import StepTimes
from rollout_spec.control.sweep import Sweep, spread_out

POLICIES: Mapping[str, Callable[[PolicyConfig, int, StepTimes | None], Policy]] = {
    "off": lambda config, k_max, prior: Fixed(0),
    "fixed": lambda config, k_max, prior: Fixed(config.k),
    "threshold": lambda config, k_max, prior: Threshold(config.threshold, config.k),
    "table": lambda config, k_max, prior: Table(config.table or []),
    "goodput": lambda config, k_max, prior: Goodput(k_max, prior),
    "budget": lambda config, k_max, prior: Budget(k_max, prior),
    "aimd": lambda config, k_max, prior: Aimd(k_max, config.k),
    "bandit": lambda config, k_max, prior: Bandit(k_max),
    "sweep": lambda config, k_max, prior: Sweep(config.ks or spread_out(k_max)),
}


def make_policy(config: PolicyConfig | Mapping[str, Any], k_max: int, prior: StepTimes | None = None) -> Policy:
    """The policy that `config` names, for at most `k_max` draft tokens; raises pydantic's ValidationError.

    `prior`: step times to start from, of a profile or a roofline; by default those in the file `config.profile`.
    Raises ConfigError if that file cannot be used.
    """
    if not isinstance(config, PolicyConfig):
        config = PolicyConfig.model_validate(config)
    if prior is None and config.profile is not None:
        prior = load_step_times(config.profile)
    return POLICIES[config.name](config, k_max, prior)


def load_step_times(path: str) -> StepTimes:
    """Step times from a JSON file: a profile, or the bare table; ConfigError says what is wrong with it."""
    try:
        return StepTimes.from_mapping(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"policy.profile {path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"policy.profile {path}: {error}") from error
