"""Worker metrics: vLLM's counters under vLLM's names, verl's two rates, and the controller's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
