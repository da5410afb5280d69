"""The rows of the output, one a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from rollout_spec.rollout.types import Rollout

SPAN = pa.struct([("start", pa.int32()), ("policy_version", pa.int64()), ("draft_version", pa.int64())])
SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample_id", pa.int32()),
        ("prompt_digest", pa.int64()),  # of what was asked under this id
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),  # of each token, under the policy that sampled it; null if not asked for
        ("num_tokens", pa.int32()),
        ("finish_reason", pa.string()),  # stop, length; error: vLLM refused it
        ("error", pa.string()),
        ("policy_version", pa.int64()),  # of the last token
        ("draft_version", pa.int64()),
        ("spans", pa.list_(SPAN)),  # which versions made which tokens, by start
        ("started_at", pa.float64()),  # seconds since 1970, handed to the engine
        ("finished_at", pa.float64()),
        ("draft_steps", pa.int64()),  # null without a drafter; of a moved sequence, since it moved
        ("draft_tokens", pa.int64()),
        ("accepted_tokens", pa.int64()),
        ("engine", pa.int32()),
        ("attempt", pa.int32()),  # which start of the job
    ]
)
KEYS = ["prompt_id", "sample_id", "prompt_digest", "num_tokens", "finish_reason"]


@dataclass(frozen=True, slots=True)
class Label:
    """What the engine doesn't know of a sequence."""

    prompt: int
    """Index in the queue; not written."""
    prompt_id: str
    sample_id: int
    digest: int
    started_at: float
    prompt_tokens: int = 0
    """How many; the rollout has them."""


def as_table(finished: Sequence[tuple[Label, Rollout]], engine: int, attempt: int, now: float) -> pa.Table:
    rows = []
    for label, rollout in finished:
        stats = rollout.speculation
        last = rollout.spans[-1] if rollout.spans else None
        rows.append(
            {
                "prompt_id": label.prompt_id,
                "sample_id": label.sample_id,
                "prompt_digest": label.digest,
                "prompt_token_ids": rollout.prompt_token_ids,
                "token_ids": rollout.token_ids,
                "logprobs": rollout.logprobs,
                "num_tokens": len(rollout.token_ids),
                "finish_reason": rollout.finish_reason,
                "error": rollout.error,
                "policy_version": rollout.policy_version,
                "draft_version": last.draft_version if last else 0,
                "spans": [
                    {"start": s.start, "policy_version": s.policy_version, "draft_version": s.draft_version}
                    for s in rollout.spans
                ],
                "started_at": label.started_at,
                "finished_at": now,
                "draft_steps": stats.draft_steps if stats else None,
                "draft_tokens": stats.draft_tokens if stats else None,
                "accepted_tokens": stats.accepted_tokens if stats else None,
                "engine": engine,
                "attempt": attempt,
            }
        )
    return pa.Table.from_pylist(rows, schema=SCHEMA)
