"""Metrics of a worker and of a fleet: vLLM's counters, verl's two rates, and the controllers' state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def worker_metrics(vllm_metrics: Iterable[Any], status: Mapping[str, Any] | None) -> dict[str, float]:
    """Flat name -> value. `status` is the plug-in's last status, None without the plug-in.

    verl's rates: `rollout/spec_accept_rate` = accepted / draft tokens, `rollout/spec_accept_length` = 1 + accepted /
    drafts, where a draft is one sequence in one verification step (vLLM's own mean acceptance length).
    """
    result: dict[str, float] = {}
    for metric in vllm_metrics:
        if hasattr(metric, "value"):
            result[metric.name] = result.get(metric.name, 0.0) + float(metric.value)
        elif metric.name.endswith("_per_pos"):
            for position, value in enumerate(metric.values):
                key = f"{metric.name}/{position}"
                result[key] = result.get(key, 0.0) + float(value)
    drafts = result.get("vllm:spec_decode_num_drafts", 0.0)
    tokens = result.get("vllm:spec_decode_num_draft_tokens", 0.0)
    accepted = result.get("vllm:spec_decode_num_accepted_tokens", 0.0)
    if drafts:
        result["rollout/spec_accept_rate"] = accepted / tokens
        result["rollout/spec_accept_length"] = 1 + accepted / drafts
    if status is not None:
        result |= _controller(status)
    return result


def _controller(status: Mapping[str, Any]) -> dict[str, float]:
    result = {
        "rollout_spec/k": float(status["k"]),
        "rollout_spec/controller_failed": float(status["failed"]),
    }
    lows = [1] + [high + 1 for high in status["buckets"]]
    for low, steps, seconds in zip(lows, status["steps_by_bucket_and_k"], status["seconds_by_bucket"], strict=True):
        total = sum(steps)
        if total:
            mean = sum(k * count for k, count in enumerate(steps)) / total
            result[f"rollout_spec/mean_k/live_from_{low}"] = mean
            result[f"rollout_spec/seconds/live_from_{low}"] = seconds
    for name, value in status["policy"].items():
        result[f"rollout_spec/{name}"] = float(value)
    return result


def fleet_metrics(now: Mapping[str, Mapping[str, Any]], before: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """What several engines did between two readings of their statuses, by engine; those without a `before` are new.

    Counters are added up over the engines, what the controllers estimate is averaged, the tail is the longest one,
    and weight updates are those that every engine has seen since its start.
    verl's two rates are of all drafts together.
    """
    gained = [gain(status, before.get(engine)) for engine, status in now.items()]
    result = {"rollout_spec/engines": float(len(gained))}
    if not gained:
        return result
    total: dict[str, Any] = {name: _add([one[name] for one in gained]) for name in COUNTERS}
    policies = [status["policy"] for status in now.values() if status["policy"]]
    state = {
        "k": sum(status["k"] for status in now.values()) / len(now),
        "failed": any(status["failed"] for status in now.values()),
        "buckets": next(iter(now.values()))["buckets"],
        "policy": _mean(policies),
    }
    result |= _controller({**total, **state})
    result["rollout_spec/tail_seconds"] = max(one["tail_seconds"] for one in gained)
    result["rollout_spec/weight_updates"] = float(min(status["weight_updates"] for status in now.values()))
    drafted, accepted = sum(total["drafted_per_position"]), sum(total["accepted_per_position"])
    if drafted:
        result["rollout/spec_accept_rate"] = accepted / drafted
        result["rollout/spec_accept_length"] = 1 + accepted / total["drafted_per_position"][0]
    return result


# What only grows in a status, as numbers, lists of numbers or lists of such lists.
COUNTERS = (
    "steps_by_bucket_and_k",
    "seconds_by_bucket",
    "drafted_per_position",
    "accepted_per_position",
    "speculated_sequence_steps",
    "tail_seconds",
)


def gain(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The COUNTERS of what happened between two statuses of an engine; `before` None: since its start."""
    return {name: _minus(now[name], before[name]) if before else now[name] for name in COUNTERS}


def _minus(now: Any, before: Any) -> Any:
    if isinstance(now, list):
        return [_minus(a, b) for a, b in zip(now, before, strict=True)]
    return now - before


def _add(values: Sequence[Any]) -> Any:
    if isinstance(values[0], list):
        return [_add(column) for column in zip(*values, strict=True)]
    return sum(values)


def _mean(policies: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Averages; of deviations (`_sd`) that of the average."""
    result = {}
    for name in policies[0] if policies else ():
        values = [policy[name] for policy in policies if name in policy]
        if name.endswith("_sd"):
            result[name] = math.sqrt(sum(value * value for value in values)) / len(values)
        else:
            result[name] = sum(values) / len(values)
    return result
