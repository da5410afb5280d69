"""What each token of a storm should have been: new engines are asked, one for each target (without speculation) and one
for each pair of target and head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fire import GREEDY, fire_engine
from fresh import run_fresh

from rollout_spec.rollout.types import Rollout

# A step may round differently in another batch: log-probabilities agree to this.
TOLERANCE = 2e-3

Query = tuple[tuple[int, ...], int]  # context, tokens to generate
Pair = tuple[int, int | None]  # target, head; None: without speculation


def check(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Compare every span with new engines; what was compared, and what was wrong.

    The other targets and heads are asked the same: `told_apart` is the share of spans (`drafts_told_apart` of
    responses) that would have been found wrong had the engine held another target (head).
    """
    spans: list[tuple[Rollout, int, Query, int]] = []
    drafts: list[tuple[Rollout, Query, int, int]] = []
    for request_id, rollout in result["rollouts"]:
        for start, end, version in spans_to_check(rollout, result["modes"]):
            query = (tuple(rollout.prompt_token_ids + rollout.token_ids[:start]), end - start)
            spans.append((rollout, start, query, result["targets"][version]))
        # Drafts are compared where one head made all of them, and none of its cache was another's.
        whole = len(rollout.spans) == 1 and rollout.finish_reason == "length" and request_id not in result["disturbed"]
        if whole and len(rollout.prompt_token_ids) < 100:
            span = rollout.spans[0]
            query = (tuple(rollout.prompt_token_ids), len(rollout.token_ids))
            drafts.append((rollout, query, result["targets"][span.policy_version], result["heads"][span.draft_version]))
    targets = sorted({target for *_, target in spans})
    heads = sorted({head for *_, head in drafts})
    wanted: dict[Pair, list[Query]] = {(t, None): sorted({query for _, _, query, _ in spans}) for t in targets}
    for target in sorted({target for _, _, target, _ in drafts}):
        wanted |= {(target, head): sorted({q for _, q, t, _ in drafts if t == target}) for head in heads}
    fresh = run_fresh(answers, folder, wanted)

    wrong: list[Any] = []
    errors, apart, drafts_apart = [0.0], [], []
    for rollout, start, query, target in spans:
        error = agree(rollout, start, fresh[target, None][query])
        if error is None or error > TOLERANCE:
            wrong.append(["tokens", target, error, rollout.token_ids[start:], fresh[target, None][query][0]])
        else:
            errors.append(error)
        others = [agree(rollout, start, fresh[other, None][query]) for other in targets if other != target]
        apart += [other is None or other > TOLERANCE for other in others]
    for rollout, query, target, head in drafts:
        if rollout.speculation != fresh[target, head][query][2]:
            wrong.append(["drafts", target, head, str(rollout.speculation), str(fresh[target, head][query][2])])
        drafts_apart += [rollout.speculation != fresh[target, h][query][2] for h in heads if h != head]
    return {
        "spans": len(spans),
        "tokens": sum(length for _, _, (_, length), _ in spans),
        "logprob_error": max(errors),
        "told_apart": sum(apart) / max(len(apart), 1),
        "drafts": len(drafts),
        "accepted": sum(rollout.speculation.accepted_tokens for rollout, *_ in drafts if rollout.speculation),
        "drafts_told_apart": sum(drafts_apart) / max(len(drafts_apart), 1),
        "wrong": wrong,
    }


def spans_to_check(rollout: Rollout, modes: list[str]) -> list[tuple[int, int, int]]:
    """(start, end, policy version) of what must be a fresh engine's: not what runs on over a stale cache."""
    spans: list[tuple[int, int, int]] = []
    ends = [span.start for span in rollout.spans[1:]] + [len(rollout.token_ids)]
    for span, end in zip(rollout.spans, ends, strict=True):
        if spans and spans[-1][2] == span.policy_version:
            spans[-1] = (spans[-1][0], end, span.policy_version)
        else:
            spans.append((span.start, end, span.policy_version))
    return [one for one in spans if one[0] < one[1] and (one[0] == 0 or modes[one[2]] != "in_flight")]


def answers(folder: Path, wanted: dict[Pair, list[Query]]) -> dict[Pair, dict[Query, Any]]:
    """Tokens, log-probabilities and draft statistics from a new engine for each pair, one after the other."""
    found: dict[Pair, dict[Query, Any]] = {}
    for (target, head), queries in wanted.items():
        lengths = [[length] for _, length in queries]
        with fire_engine(folder, target, head) as worker:
            rollouts = worker.generate(
                [list(context) for context, _ in queries], sampling=GREEDY, output_tokens=lengths
            )
        given = [(r.token_ids, r.logprobs, r.speculation) for r in rollouts]
        found[target, head] = dict(zip(queries, given, strict=True))
    return found


def agree(rollout: Rollout, start: int, answer: Any) -> float | None:
    """The largest difference of a log-probability; None where a token differs."""
    tokens, logprobs, _ = answer
    end = start + len(tokens)
    if rollout.token_ids[start:end] != tokens:
        return None
    return max(abs(a - b) for a, b in zip(rollout.logprobs[start:end], logprobs, strict=True))  # type: ignore[index]
