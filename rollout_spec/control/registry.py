"""Policies by name. A new one is a new file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollout_spec.config import PolicyConfig
from rollout_spec.control.fixed import Fixed, Table, Threshold
from rollout_spec.control.goodput import Goodput
from rollout_spec.control.policy import Policy

POLICIES: Mapping[str, Callable[[PolicyConfig, int], Policy]] = {
    "off": lambda config, k_max: Fixed(0),
    "fixed": lambda config, k_max: Fixed(config.k),
    "threshold": lambda config, k_max: Threshold(config.threshold, config.k),
    "table": lambda config, k_max: Table(config.table or []),
    "goodput": lambda config, k_max: Goodput(k_max),
}


def make_policy(config: PolicyConfig | Mapping[str, Any], k_max: int) -> Policy:
    """The policy that `config` names, for at most `k_max` draft tokens; raises pydantic's ValidationError."""
    if not isinstance(config, PolicyConfig):
        config = PolicyConfig.model_validate(config)
    return POLICIES[config.name](config, k_max)
