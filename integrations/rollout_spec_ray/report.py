"""What a job made, from its output directory alone: is it complete, how long did it take, what did speculation do."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollout_spec.config import ConfigError
from rollout_spec.control.tail import tail_seconds
from rollout_spec_ray.store import QUARANTINED, REJECTED, Store

REPORT_SCHEMA = "rollout-spec/ray-report/1"
COLUMNS = [
    "prompt_id",
    "sample_id",
    "num_tokens",
    "finish_reason",
    "policy_version",
    "started_at",
    "finished_at",
    "draft_steps",
    "draft_tokens",
    "accepted_tokens",
    "engine",
    "attempt",
]
# Prompts and rows named in the text.
NAMED = 5


def report(store: Store) -> dict[str, Any]:
    """Plain values. ConfigError if there is no job, or a part is damaged."""
    job = store.read_job()
    if job is None:
        raise ConfigError(f"{store.place.uri}: no output of a rollout job is there (no job.json)")
    tables = list(store.read(COLUMNS))
    rows = pa.concat_tables(tables) if tables else pa.table({name: [] for name in COLUMNS})
    rejected, aside = store.read_lines(REJECTED), store.read_lines(QUARANTINED)
    count, distinct = len(rows), 0
    if count:
        distinct = len(rows.group_by(["prompt_id", "sample_id"]).aggregate([]))
    refused = int(pc.sum(pc.equal(rows["finish_reason"], "error")).as_py() or 0) if count else 0
    return {
        "schema": REPORT_SCHEMA,
        "complete": distinct == job["sequences"] and not (rejected or aside or refused),
        "sequences": {
            "asked": job["sequences"],
            "finished": distinct,
            "missing": job["sequences"] - distinct,
            "twice": count - distinct,
            "refused_by_vllm": refused,
        },
        "rows_rejected": rejected,
        "prompts_set_aside": aside,
        "tokens": _spread(rows["num_tokens"]) if count else None,
        "finish_reasons": _counts(rows, "finish_reason"),
        "policy_versions": _counts(rows, "policy_version"),
        "speculation": _speculation(rows) if count else None,
        "attempts": [_attempt(one, rows) for one in job["attempts"]],
    }


def write(store: Store, result: dict[str, Any]) -> None:
    """`report.json` and `report.txt` into the output directory."""
    store.write_text("report.json", json.dumps(result, indent=1) + "\n")
    store.write_text("report.txt", render(result) + "\n")


def render(result: dict[str, Any]) -> str:
    sequences = result["sequences"]
    lines = [f"{sequences['finished']} of {sequences['asked']} sequences are there, {sequences['twice']} twice."]
    if sequences["missing"]:
        lines[0] += f" {sequences['missing']} are missing."
    if sequences["refused_by_vllm"]:
        lines.append(f"{sequences['refused_by_vllm']} were refused by vLLM (finish_reason 'error', with the reason).")
    rejected, aside = result["rows_rejected"], result["prompts_set_aside"]
    lines += [f"rejected: row {row['row']}: {row['problem']}" for row in rejected[:NAMED]]
    lines += [f"set aside: prompt {row['prompt_id']!r}: {row['problem']}" for row in aside[:NAMED]]
    if len(rejected) > NAMED or len(aside) > NAMED:
        lines.append(f"in all {len(rejected)} rows rejected and {len(aside)} prompts set aside")
    if result["tokens"]:
        tokens = result["tokens"]
        lines.append(
            f"Tokens: {tokens['total']}; a response has {tokens['median']:.0f} (median), {tokens['p90']:.0f} (90 %), "
            f"{tokens['max']} (longest)."
        )
        lines.append("Ended by: " + ", ".join(f"{name} {n}" for name, n in result["finish_reasons"].items()))
        lines.append("Policy versions: " + ", ".join(f"{name}: {n}" for name, n in result["policy_versions"].items()))
    spec = result["speculation"]
    if spec and spec["draft_steps"]:
        lines.append(
            f"Drafts: {spec['draft_tokens']} tokens, {spec['accepted_tokens']} accepted; "
            f"{spec['acceptance_length']:.2f} tokens a step with drafts."
        )
    for one in result["attempts"]:
        lines.append(_attempt_line(one))
        lines += [
            f"  engine {number}: {engine['sequences']} sequences, {engine['tokens']} tokens, its last after "
            f"{engine['last_finished_s']:.1f} s"
            for number, engine in one["engines"].items()
        ]
    return "\n".join(lines)


def _attempt_line(one: dict[str, Any]) -> str:
    if not one["sequences"]:
        return f"Attempt {one['attempt']}: {one['outcome']}, no sequence finished."
    repeated = f", {one['repeated']} repeated after {one['restarts']} deaths of engines" if one["restarts"] else ""
    moved = f", {one['moved']} moved between engines" if one["moved"] else ""
    return (
        f"Attempt {one['attempt']}: {one['outcome']}; {one['sequences']} sequences in {one['makespan_s']:.1f} s, "
        f"{one['tokens_per_second']:.0f} tokens/s, tail {one['tail_s']:.1f} s{repeated}{moved}."
    )


def _attempt(record: dict[str, Any], rows: pa.Table) -> dict[str, Any]:
    """Times are from when the first of its sequences was handed to an engine."""
    result: dict[str, Any] = {
        "attempt": record["attempt"],
        "outcome": record.get("outcome", "killed"),
        "restarts": record.get("engine_restarts", 0),
        "repeated": record.get("sequences_lost_and_repeated", 0),
        "moved": record.get("sequences_moved", 0),
        "queue": record.get("queue"),
        "sequences": 0,
        "engines": {},
    }
    if not len(rows):
        return result
    mine = rows.filter(pc.equal(rows["attempt"], record["attempt"]))
    if not len(mine):
        return result
    began = pc.min(mine["started_at"]).as_py()
    ends = np.sort(mine["finished_at"].to_numpy()) - began
    tokens = int(pc.sum(mine["num_tokens"]).as_py())
    engines = {}
    for number in sorted(pc.unique(mine["engine"]).to_pylist()):
        own = mine.filter(pc.equal(mine["engine"], number))
        engines[str(number)] = {
            "sequences": len(own),
            "tokens": int(pc.sum(own["num_tokens"]).as_py()),
            "last_finished_s": pc.max(own["finished_at"]).as_py() - began,
        }
    return result | {
        "sequences": len(mine),
        "makespan_s": float(ends[-1]),
        "tokens_per_second": tokens / max(float(ends[-1]), 1e-9),
        "tail_s": tail_seconds(ends),
        "engines": engines,
    }


def _speculation(rows: pa.Table) -> dict[str, Any]:
    total = {name: int(pc.sum(rows[name]).as_py() or 0) for name in ("draft_steps", "draft_tokens", "accepted_tokens")}
    steps = total["draft_steps"]
    return total | {"acceptance_length": 1 + total["accepted_tokens"] / steps if steps else None}


def _spread(column: pa.ChunkedArray) -> dict[str, Any]:
    values = column.to_numpy()
    return {
        "total": int(values.sum()),
        "median": float(np.median(values)),
        "p90": float(np.quantile(values, 0.9)),
        "max": int(values.max()),
    }


def _counts(rows: pa.Table, name: str) -> dict[str, int]:
    if not len(rows):
        return {}
    counted = sorted(pc.value_counts(rows[name]).to_pylist(), key=lambda one: str(one["values"]))
    return {str(one["values"]): one["counts"] for one in counted}
