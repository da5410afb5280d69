"""After `update_weights` the engine is the new policy, caches included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fresh import engine, run_fresh

from rollout_spec.config import ConfigError, SamplingConfig
from rollout_spec.rollout.types import Rollout

GREEDY = SamplingConfig(temperature=0, max_tokens=24)
# Longer than two cache blocks (128 tokens on CPU), so that stale keys and values would be used if they were kept.
PROMPTS = [[100 + (7 * i + j) % 900 for i in range(300)] for j in range(3)]


@pytest.fixture(scope="module")
def moved_model(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model after an imagined training step: every tensor moved, the tied embedding most."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("moved")
    for file in smollm.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(1)
    weights = load_file(smollm / "model.safetensors")
    for name, tensor in weights.items():
        scale = 1.5 if "embed_tokens" in name else 1.0
        weights[name] = (tensor * scale * (1 + 0.02 * torch.randn(tensor.shape))).to(tensor.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def started_with(model: Path) -> list[Rollout]:
    with engine(model) as worker:
        return worker.generate(PROMPTS, sampling=GREEDY)


def updated(model: Path, moved: Path) -> dict[str, Any]:
    """Tensors of the moved model go in, updates that must be refused, and the folder of the first model again."""
    from safetensors.torch import load_file

    out: dict[str, Any] = {}
    with engine(model) as worker:
        out["before"] = [worker.generate(PROMPTS, sampling=GREEDY) for _ in range(2)][-1]
        weights = load_file(moved / "model.safetensors")
        # Trainers of tied models send the head too.
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        worker.update_weights(weights, policy_version=5)
        out["tensors"] = worker.generate(PROMPTS, sampling=GREEDY)
        out["refused"] = refusals(worker, moved)
        out["after refusals"] = worker.generate(PROMPTS, sampling=GREEDY)
        worker.update_weights(model, policy_version=7)
        out["folder"] = worker.generate(PROMPTS, sampling=GREEDY)
    return out


def refusals(worker: Any, moved: Path) -> list[str]:
    from safetensors.torch import load_file

    weights = load_file(moved / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    bad: list[Any] = [
        {**weights, "model.layers.0.mlp.up.weight": weights[name]},
        {**weights, name: weights[name][:-1]},
        {key: tensor for key, tensor in weights.items() if key != name},
        moved / "nothing_here",
    ]
    said = []
    for update in bad:
        try:
            worker.update_weights(update, policy_version=6)
        except ConfigError as error:
            said.append(str(error))
    return said


def same(first: list[Rollout], second: list[Rollout]) -> bool:
    return all(
        a.token_ids == b.token_ids and np.allclose(a.logprobs, b.logprobs, atol=2e-3)
        for a, b in zip(first, second, strict=True)
    )


def test_the_next_generation_is_the_new_policy(smollm: Path, moved_model: Path) -> None:
    out = run_fresh(updated, smollm, moved_model)
    moved = run_fresh(started_with, moved_model)
    assert not same(out["before"], moved), "the update must matter for the test to mean anything"
    assert same(out["tensors"], moved)
    assert {r.policy_version for r in out["tensors"]} == {5}
    unknown, shape, missing, no_folder = out["refused"]
    assert "mlp.up.weight" in unknown
    assert "shape" in shape
    assert "missing" in missing
    assert "nothing_here" in no_folder
    assert same(out["after refusals"], moved)
    assert {r.policy_version for r in out["after refusals"]} == {5}
    assert same(out["folder"], out["before"])
    assert {r.policy_version for r in out["folder"]} == {7}


def in_another_process(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    with engine(model, engine__in_process=False) as worker:
        prompt = [5, 6, 7, 8] * 5
        rollouts = worker.generate([prompt] * 3, n=2, output_tokens=[[10, 12]] * 3)
        weights = load_file(model / "model.safetensors")
        weights["lm_head.weight"] = weights["lm_head.weight"].flip(0)
        greedy = [worker.generate([prompt], sampling=GREEDY)[0].token_ids]
        worker.update_weights(weights, policy_version=1)
        greedy.append(worker.generate([prompt], sampling=GREEDY)[0].token_ids)
        lengths, metrics = [len(r.token_ids) for r in rollouts], worker.metrics()
        worker.submit([prompt], output_tokens=[[200]])
        errors = []
        for mode in ("drained", "abort_resume", "in_flight"):
            try:
                worker.update_weights(weights, policy_version=2, mode=mode)
            except RuntimeError as error:
                errors.append(str(error))
        worker.abort()
        (core,) = [p for p in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
        core.kill()
        try:
            worker.update_weights(weights, policy_version=2)
        except Exception as error:
            errors.append(type(error).__name__)
        return {"lengths": lengths, "metrics": metrics, "greedy": greedy, "errors": errors}


def test_the_engine_core_may_have_its_own_process(tiny_model: Path) -> None:
    out = run_fresh(in_another_process, tiny_model)
    assert out["lengths"] == [10, 12] * 3
    assert out["metrics"]["rollout_spec/controller_failed"] == 0
    drained, resume, in_flight, dead = out["errors"]
    assert "still run" in drained
    assert "engine.in_process=true" in resume
    assert "engine.in_process=true" in in_flight
    assert dead == "EngineDeadError"  # an error, not a wait for ever
    old, new = out["greedy"]
    assert old[0] == 31 - new[0]  # the flipped head turns the first choice around
