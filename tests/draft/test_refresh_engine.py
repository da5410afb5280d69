"""A policy that moves under a running engine: its head's drafts are refused, and accepted again after a refresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chain import PROMPT, WORDS, Moved
from fresh import run_fresh
from refreshing import DRAFT, OPTIONS, K
from tiny import BEGIN

from rollout_spec.config import SamplingConfig, parse_config
from rollout_spec.rollout.draft_refresh import DraftRefresh

PROMPTS = [[BEGIN, *(WORDS[(7 * i + 5 * j) % len(WORDS)] for j in range(PROMPT - 1))] for i in range(48)]


def follow(before: Path, after: Path, head: Path) -> dict[str, Any]:
    """Acceptance lengths that vLLM counts: of the head's own policy, of the moved one, and after a refresh."""
    from rollout_spec.rollout.worker import RolloutWorker

    config = parse_config(
        {
            "model": str(before),
            "engine": {
                "dtype": "float32",
                "max_model_len": 96,
                "max_num_seqs": 16,
                "kv_cache_gib": 0.25,
                "extra": {"skip_tokenizer_init": True},
            },
            "drafter": {"method": "eagle3", "model": str(head), "k_max": K},
            "policy": {"name": "fixed", "k": K},
            "draft": DRAFT.model_dump(),
            "refresh": OPTIONS.model_dump() | {"policy": "every", "every": 1},
        }
    )
    sampling = SamplingConfig(temperature=1.0, max_tokens=40, logprobs=False)
    found: dict[str, Any] = {}
    with RolloutWorker(config) as worker, DraftRefresh(worker) as refresh:

        def rollout(name: str) -> None:
            made = worker.generate(PROMPTS, sampling=sampling, output_tokens=[[40]] * len(PROMPTS))
            drafts = sum(each.speculation.draft_steps for each in made if each.speculation)
            accepted = sum(each.speculation.accepted_tokens for each in made if each.speculation)
            found[name] = 1 + accepted / drafts
            refresh.after_rollout(made)

        rollout("own")
        worker.update_weights(after, 1)
        rollout("moved")
        refresh.after_update(after)
        rollout("still")  # a refresh begins with what is known now
        refresh.wait(500)
        rollout("refreshed")
        found |= refresh.metrics()
        found["draft version"] = worker.draft_version
    return found


@pytest.mark.engine
def test_a_refresh_brings_acceptance_back_in_the_running_engine(moved: Moved, first_head: Path) -> None:
    found = run_fresh(follow, moved.before, moved.after, first_head)
    assert found["own"] > 2.3
    assert found["moved"] < 1.5
    assert found["still"] < 1.5
    assert found["refreshed"] > found["moved"] + 0.8
    assert found["draft version"] == 1
    assert found["rollout_spec/refresh_done"] == 1
    # What the refresher promised of the new head is what the engine then accepts.
    assert found["refreshed"] == pytest.approx(found["rollout_spec/refresh_predicted_after"], rel=0.15)
