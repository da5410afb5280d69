"""The policies that are compared on one fleet, each with what a careful user would have given it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from rollout_spec.config import ConfigError, PolicyConfig
from rollout_spec.control.policy import Policy
from rollout_spec.control.registry import POLICIES, make_policy
from rollout_spec.control.step_times import StepTimes
from rollout_spec.simulate.fleet import Fleet, Oracle

# What people fill in who have measured nothing.
HAND_TABLE = [(1, 4, 5), (5, 8, 3), (9, 1024, 0)]
Maker = Callable[[], Policy] | Oracle


def make(name: str, fleet: Fleet, prior: StepTimes | None, ridge: float | None = None) -> Maker:
    """`oracle`, or POLICY[:K]. A table is computed from the prior, a threshold from the ridge point over K + 1."""
    if name == "oracle":
        return Oracle()
    kind, _, argument = name.partition(":")
    if kind not in POLICIES or not (argument or "3").isdigit():
        raise ConfigError(
            f"simulate.policies: {name!r} is not one of oracle, {', '.join(POLICIES)}, with :K if you like"
        )
    k_max = fleet.k_max
    k = min(int(argument or 3), k_max)
    threshold = max(1, round((ridge or 64.0) / (k + 1)))
    table = table_of(prior, fleet) if prior is not None else [(lo, hi, min(t, k_max)) for lo, hi, t in HAND_TABLE]
    config = PolicyConfig.model_validate({"name": kind, "k": k, "threshold": threshold, "table": table})
    return lambda: make_policy(config, k_max, prior)


def table_of(times: StepTimes, fleet: Fleet) -> list[tuple[int, int, int]]:
    """Best K by batch from a profile and the acceptance at the start: vLLM's table, as measured once."""
    length = fleet.acceptance.mean_length(np.ones(1), np.ones(1))
    bounds = [*times.batch, 2 * times.batch[-1]]
    rows = []
    for lo, hi in pairwise(bounds):
        best = int(np.argmax(length / np.array(times.by_k(lo, fleet.k_max, 1000.0))))
        rows.append((lo, hi - 1, best))
    return rows
