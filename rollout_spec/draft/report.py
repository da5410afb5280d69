"""A head's figures as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_spec.draft.checkpoint import SavedHead


def predictions_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each temperature and K."""
    lines = ["predicted on held-out prompts, bonus token included", " T     K  acceptance length  P(first j accepted)"]
    for row in rows:
        survival = " ".join(f"{value:.2f}" for value in row["survival"])
        lines.append(f"{row['temperature']:<5g} {row['k']:>2}  {row['acceptance_length']:>17.2f}  {survival}")
    return "\n".join(lines)


def judgement_table(result: Mapping[str, Any]) -> str:
    """The predictions, and the engine's figures where there are some."""
    parts = [predictions_table(result["predicted"])]
    if result["measured"]:
        parts.append(
            "\nin vLLM at a fixed K, on held-out prompts; predicted on the same responses\n"
            " T     K   measured  predicted  difference  verifications"
        )
    parts += [
        f"{row['temperature']:<5g} {row['k']:>2} {row['acceptance_length']:>10.2f} {row['predicted']:>10.2f}"
        f" {row['difference']:>+11.1%} {row['drafts']:>14}"
        for row in result["measured"]
    ]
    return "\n".join(parts)


def describe(saved: SavedHead) -> str:
    """Shape and provenance."""
    shape, known = saved.head.shape, saved.provenance
    size = sum(parameter.numel() for parameter in saved.head.parameters())
    head = (
        f"EAGLE-3 head, {size / 1e6:.2f}M parameters, features of layers {list(shape.aux_layers)}, "
        f"{shape.draft_vocab_size} of {shape.vocab_size} tokens"
    )
    if not known:
        return head + "\nno provenance: not trained by rollout-spec"
    target, trained = known["target"], known["trained"]
    versions = known["versions"]
    lines = [
        head,
        f"target: {target['model']} (fingerprint {target['fingerprint']}, policy version {target['policy_version']})",
        f"trained on {known['response_tokens']} tokens of {known['responses']} responses, "
        f"{trained['passes']:.1f} passes, {trained['seconds'] / 60:.1f} min"
        + (f", from {known['init']}" if known["init"] else ""),
        f"draft vocabulary: {known['vocabulary_coverage']:.1%} of held-out tokens",
        f"made {known['time']}, revision {(known['git'] or {}).get('revision')}",
        f"with torch {versions['torch']}, transformers {versions['transformers']}, vllm {versions['vllm']}",
        predictions_table(known["acceptance"]),
    ]
    return "\n".join(lines)
