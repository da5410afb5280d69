"""A small storm; the large one, of 200 updates, is experiments/weights_under_fire."""

from __future__ import annotations

from pathlib import Path

import fire
import verdict
from fresh import run_fresh


def test_every_token_is_that_of_the_version_it_names(tmp_path: Path) -> None:
    fire.make_models(tmp_path, targets=2, heads=3)
    result = run_fresh(fire.storm, tmp_path, updates=36, targets=2, heads=3, seed=1)
    found = verdict.check(tmp_path, result)
    assert found["wrong"] == []
    assert found["spans"] > 20
    assert found["told_apart"] > 0.9
    assert found["drafts_told_apart"] > 0.2
    assert result["left_in_shared_memory"] == []
    done = result["done"]
    assert done["updates abort_resume while requests run"] > 0
    assert done["updates in_flight while requests run"] > 0
    assert sum(count for what, count in done.items() if what.startswith("refused")) > 3
    assert result["metrics"]["rollout_spec/controller_failed"] == 0
