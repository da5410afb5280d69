from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# For a checkout whose editable install is older than the package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integrations"))

import jobs


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray for the tests of a module: eight logical CPUs, two logical GPUs."""
    with jobs.ray_session(num_cpus=8, num_gpus=2) as address:
        yield address


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"
