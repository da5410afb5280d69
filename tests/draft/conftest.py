from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from chain import Moved, make_moved
from refreshing import DRAFT, OPTIONS, K, finish, kept

from rollout_spec.draft.refresher import Refresher


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, for what needs a model's folder and no sense in it."""
    return tiny.make_target(tmp_path_factory.mktemp("tiny_target"))


@pytest.fixture(scope="session")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Moved:
    """A policy and the one it became, trained in seconds; not to be written to."""
    return make_moved(tmp_path_factory.mktemp("moved"))


@pytest.fixture(scope="session")
def first_head(moved: Moved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the first policy, made of the untrained head by a refresh."""
    refresher = Refresher(tmp_path_factory.mktemp("first_head"), OPTIONS, DRAFT)
    refresher.start(moved.before, moved.untrained, kept(moved.samples_before), K, 0)
    outcome = finish(refresher)
    assert outcome.head is not None, outcome.problem
    return outcome.head
