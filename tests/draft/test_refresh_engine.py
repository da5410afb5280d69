"""A policy that moves under a running engine: its head's drafts are refused, and accepted again after a refresh."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from moved import PROMPT, VOCABULARY, responses, trained, untrained_head

from rollout_spec.config import DraftConfig, RefreshConfig, SamplingConfig, parse_config
from rollout_spec.draft.refresher import Refresher
from rollout_spec.draft.replay import Kept
from rollout_spec.rollout.draft_refresh import DraftRefresh
from rollout_spec.rollout.recording import in_process

K, PASSES = 3, 30
PROMPTS = [[1, *(3 + (7 * i + 5 * j) % (VOCABULARY - 3) for j in range(PROMPT - 1))] for i in range(48)]


def first_head(before: Path, folder: Path) -> Path:
    samples = responses(before, 96, 1000)
    options = RefreshConfig(seconds=1e5, timeout=2e5, rate_share=2.0)
    refresher = Refresher(folder, options, DraftConfig(max_passes=PASSES, batch_tokens=1024))
    refresher.start(before, untrained_head(before, samples, folder / "none"), [Kept(s, 0) for s in samples], K, 0)
    while (outcome := refresher.poll()) is None:
        time.sleep(0.05)
    assert outcome.head is not None, outcome.problem
    return outcome.head


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
            "draft": {"max_passes": PASSES, "batch_tokens": 1024},
            "refresh": {"policy": "every", "every": 1, "seconds": 1e5, "timeout": 2e5, "rate_share": 2.0},
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
def test_a_refresh_brings_acceptance_back_in_the_running_engine(tmp_path: Path) -> None:
    before = trained(1, tmp_path / "before")
    after = trained(2, tmp_path / "after", start=before, steps=80)
    found = in_process(follow, before, after, first_head(before, tmp_path / "first"))
    assert found["own"] > 2.3
    assert found["moved"] < 1.5
    assert found["still"] < 1.5
    assert found["refreshed"] > found["moved"] + 0.8
    assert found["draft version"] == 1
    assert found["rollout_spec/refresh_done"] == 1
    # What the refresher promised of the new head is what the engine then accepts.
    assert found["refreshed"] == pytest.approx(found["rollout_spec/refresh_predicted_after"], rel=0.15)
