"""A tiny target on a toy grammar: predictable enough for a draft head to learn in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from grammar import save_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, for what needs a model's folder and no sense in it."""
    return save_target(tmp_path_factory.mktemp("tiny_target"), steps=0)
