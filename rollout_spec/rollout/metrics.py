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
    and weight updates and draft refreshes are those that every engine has seen since its start.
    verl's two rates are of the drafts above temperature 0, which is training; those at it (validation) are beside them,
    under `rollout_spec/greedy_..`.
    """
    gained = [gain(status, before.get(engine)) for engine, status in now.items()]
    result = {"rollout_spec/engines": float(len(gained))}
    if not gained:
        return result
    total = added(gained)
    policies = [status["policy"] for status in now.values() if status["policy"]]
    state = {
        "k": sum(status["k"] for status in now.values()) / len(now),
        "failed": any(status["failed"] for status in now.values()),
        "buckets": next(iter(now.values()))["buckets"],
        "policy": _mean(policies),
    }
    result |= _controller({**total, **state})
    result["rollout_spec/tail_seconds"] = max(one["tail_seconds"] for one in gained)
    for name in ("weight_updates", "draft_refreshes"):
        result[f"rollout_spec/{name}"] = float(min(status[name] for status in now.values()))
    result["rollout_spec/preemptions"] = float(total["preemptions"])
    result |= _rates("rollout/spec", *sampled(total))
    result |= _rates("rollout_spec/greedy", total["greedy_drafted_per_position"], total["greedy_accepted_per_position"])
    return result


# What only grows in a status, as numbers, lists of numbers or lists of such lists.
COUNTERS = (
    "steps_by_bucket_and_k",
    "seconds_by_bucket",
    "drafted_per_position",
    "accepted_per_position",
    "greedy_drafted_per_position",
    "greedy_accepted_per_position",
    "speculated_sequence_steps",
    "tail_seconds",
    "preemptions",
)


def gain(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The COUNTERS of what happened between two statuses of an engine; `before` None: since its start."""
    return {name: _minus(now[name], before[name]) if before else now[name] for name in COUNTERS}


def sampled(counts: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Of a status or a gain: tokens drafted and accepted above temperature 0, by position."""
    return (
        _minus(counts["drafted_per_position"], counts["greedy_drafted_per_position"]),
        _minus(counts["accepted_per_position"], counts["greedy_accepted_per_position"]),
    )


def _rates(prefix: str, drafted: Sequence[int], accepted: Sequence[int]) -> dict[str, float]:
    """By position; nothing without a draft."""
    if not drafted[0]:
        return {}
    return {
        f"{prefix}_accept_rate": sum(accepted) / sum(drafted),
        f"{prefix}_accept_length": 1 + sum(accepted) / drafted[0],
    }


def _minus(now: Any, before: Any) -> Any:
    if isinstance(now, list):
        return [_minus(a, b) for a, b in zip(now, before, strict=True)]
    return now - before


def added(gains: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The COUNTERS of several gains together."""
    return {name: _add([one[name] for one in gains]) for name in COUNTERS}


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
