"""Tests with real vLLM engines: marked `engine`, each engine in a process of its own (see `fresh`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from rollout_spec.model import DEFAULT_MODEL, resolve


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The default model, with trained weights."""
    return Path(resolve(DEFAULT_MODEL))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: broad next-token laws, steps of 2 ms."""
    folder = tmp_path_factory.mktemp("tiny_model")
    return tiny.make_target(folder, num_hidden_layers=2, tie_word_embeddings=False)
