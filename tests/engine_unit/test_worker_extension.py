"""The copy of an update's weights, and the fingerprint of a draft, of a worker that has nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rollout_spec.engine.worker_extension import WorkerExtension


def update(worker: WorkerExtension, value: float) -> None:
    """In two pieces, from memory that the trainer writes over afterwards."""
    tensors = {name: torch.full((2,), value) for name in ("a", "b")}
    for name, tensor in tensors.items():
        worker.rollout_spec_copy_weights([(name, tensor)])
        tensor.zero_()
    worker.rollout_spec_end_copy()


def test_only_the_update_that_was_asked_for_is_copied(tmp_path: Path) -> None:
    worker, file = WorkerExtension(), tmp_path / "model.safetensors"
    update(worker, 1.0)
    assert not file.exists()
    worker.rollout_spec_copy_next_update(str(file))
    update(worker, 2.0)
    update(worker, 3.0)
    assert {name: tensor.tolist() for name, tensor in load_file(file).items()} == {"a": [2.0] * 2, "b": [2.0] * 2}


def test_a_copy_that_cannot_be_written_costs_no_update(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = WorkerExtension()
    (tmp_path / "file").write_text("")
    worker.rollout_spec_copy_next_update(str(tmp_path / "file" / "model.safetensors"))
    update(worker, 1.0)
    assert "could not be copied" in caplog.text


def test_the_fingerprint_is_the_drafts() -> None:
    """Not that of the layers that it has from the target, which every update of the policy changes."""
    worker, own, target = WorkerExtension(), nn.Linear(2, 2), nn.Linear(2, 2)
    draft = nn.Sequential(target, own)
    worker.model_runner = SimpleNamespace(get_model=lambda: target, drafter=SimpleNamespace(model=draft))
    before = worker.rollout_spec_fingerprint()
    nn.init.zeros_(target.weight)
    assert worker.rollout_spec_fingerprint() == before
    nn.init.ones_(own.weight)
    assert worker.rollout_spec_fingerprint() != before
    assert worker.rollout_spec_fingerprint() > 0
    worker.model_runner = SimpleNamespace(get_model=lambda: target, drafter=None)
    assert worker.rollout_spec_fingerprint() == 0
