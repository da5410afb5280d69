"""Refreshes that are waited for."""

from __future__ import annotations

import time

from rollout_spec.config import DraftConfig, RefreshConfig
from rollout_spec.draft.refresher import Outcome, Refresher
from rollout_spec.draft.replay import Kept
from rollout_spec.draft.samples import Sample

K = 3
# Passes end the training, not the clock, so that a busy machine trains the same head.
DRAFT = DraftConfig(max_passes=30, batch_tokens=1024)
OPTIONS = RefreshConfig(seconds=1e5, timeout=2e5, rate_share=2.0)


def kept(samples: list[Sample], version: int = 0) -> list[Kept]:
    return [Kept(sample, version) for sample in samples]


def finish(refresher: Refresher) -> Outcome:
    while (outcome := refresher.poll()) is None:
        time.sleep(0.05)
    assert not refresher.running
    assert refresher.poll() is None
    return outcome
