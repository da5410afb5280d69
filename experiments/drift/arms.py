"""Heads that are not in the engine, and a history of responses: what each would have had accepted of the same text.

Speculation does not change the law of what is sampled, so that responses recorded with one head tell what another would
have been worth on them (`rollout_spec.draft.acceptance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.config import Config
from rollout_spec.draft.acceptance import acceptance_chances, predict
from rollout_spec.draft.checkpoint import load_head
from rollout_spec.draft.features import Target, extract
from rollout_spec.draft.loss import Shared
from rollout_spec.draft.samples import Sample
from rollout_spec.rollout.types import Rollout

FORWARD_TOKENS = 4096


class Shadow:
    """In place of a worker for a DraftRefresh whose head is not in the engine."""

    takes_in_flight = True
    num_unfinished = 0

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy_version = self.draft_version = 0
        self.head = Path(str(config.drafter.model))

    def controller_status(self) -> None:
        """Nothing is measured: it is for policies that do not ask."""

    def refresh_draft(self, weights: Path, draft_version: int) -> None:
        self.head, self.draft_version = weights, draft_version


def judge(
    policy: Path, heads: dict[str, Path], rollouts: Sequence[Rollout], temperature: float, k: int
) -> dict[str, Any]:
    """Acceptance length and P(first j accepted) of each head on these responses of the policy in the folder."""
    samples = [Sample("", r.prompt_token_ids, r.token_ids, temperature, True) for r in rollouts if len(r.token_ids) > 1]
    found = {}
    for name, tables in chances(policy, heads, samples, k).items():
        predicted = predict(tables, k)
        found[name] = {"acceptance_length": predicted.acceptance_length, "survival": list(predicted.survival)}
    return found


def chances(policy: Path, heads: dict[str, Path], samples: Sequence[Sample], k: int) -> dict[str, list[Any]]:
    """By head and response: `draft.acceptance.acceptance_chances`."""
    saved = {name: load_head(head) for name, head in heads.items()}
    first = next(iter(saved.values()))
    target = Target(policy, first.head.shape.aux_layers)
    features = extract(target, samples, FORWARD_TOKENS)
    found = {}
    for name, head in saved.items():
        shared = Shared.of(target.embedding, target.output, head.ids)
        found[name] = acceptance_chances(head.rounded(), shared, features, k, FORWARD_TOKENS)
    return found


class HistoryArm:
    """Suffix trees over earlier responses to the same prompt, K drafts at most, as `rollout_spec.engine.suffix` has
    them; a draft of one token's law is accepted where it is what was sampled."""

    def __init__(self, k: int, depth: int = 24, max_tokens: int = 2_000_000) -> None:
        from rollout_spec.engine.suffix import History

        self._k, self._depth, self._history = k, depth, History(depth, max_tokens)

    def judge(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """On these responses (one after the other, siblings included); then they are history."""
        drafts = accepted = 0
        for rollout in rollouts:
            key = np.array(rollout.prompt_token_ids, dtype=np.int32).tobytes()
            tokens = np.array(rollout.prompt_token_ids + rollout.token_ids, dtype=np.int32)
            found, hits = self._walk(tokens, len(rollout.prompt_token_ids), self._history.tree(key))
            drafts, accepted = drafts + found, accepted + hits
            sequence = self._history.open(key)
            self._history.extend(key, sequence, tokens[len(rollout.prompt_token_ids) :])
        return {"acceptance_length": 1 + accepted / drafts if drafts else 1.0, "drafts": drafts}

    def _walk(self, tokens: Any, start: int, past: Any) -> tuple[int, int]:
        """Verifications with a draft, and drafts accepted."""
        from arctic_inference.suffix_decoding._C import SuffixTree

        own, upto, at, drafts, accepted = SuffixTree(self._depth), 0, start + 1, 0, 0
        while at < len(tokens):
            own.extend_ndarray(0, tokens[upto:at])
            upto = at
            context = tokens[max(0, at - self._depth) : at]
            made = [tree.speculate_ndarray(context, self._k, 1.0, 0.0, 0.1, False) for tree in (own, past) if tree]
            draft = max(made, key=lambda each: each.score).token_ids
            hits = 0
            while hits < len(draft) and at + hits < len(tokens) and draft[hits] == tokens[at + hits]:
                hits += 1
            drafts, accepted = drafts + bool(len(draft)), accepted + hits
            at += hits + 1
        return drafts, accepted
