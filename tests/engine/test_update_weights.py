"""After `update_weights` the engine is the new policy, caches included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fresh import engine, run_fresh

from rollout_spec.config import ConfigError, SamplingConfig

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


def generate(model: Path, moved: Path | None, how: str = "") -> dict[str, Any]:
    with engine(model, engine__max_model_len=512) as worker:
        before = [worker.generate(PROMPTS, sampling=GREEDY) for _ in range(2)][-1]
        out: dict[str, Any] = {"before": [(r.token_ids, r.logprobs) for r in before]}
        if moved is not None:
            if how == "folder":
                worker.update_weights(moved, policy_version=5)
            else:
                from safetensors.torch import load_file

                weights = load_file(moved / "model.safetensors")
                # Trainers of tied models send the head too.
                weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
                worker.update_weights(weights, policy_version=5)
            after = worker.generate(PROMPTS, sampling=GREEDY)
            out["after"] = [(r.token_ids, r.logprobs) for r in after]
            out["versions"] = {r.policy_version for r in after}
            out["refused"] = refusals(worker, moved)
            again = worker.generate(PROMPTS, sampling=GREEDY)
            out["after_refusals"] = [(r.token_ids, r.logprobs) for r in again]
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


def same(first: list[Any], second: list[Any]) -> bool:
    return all(a[0] == b[0] and np.allclose(a[1], b[1], atol=2e-3) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("how", ["tensors", "folder"])
def test_the_next_generation_is_the_new_policy(how: str, smollm: Path, moved_model: Path) -> None:
    updated = run_fresh(generate, smollm, moved_model, how)
    fresh = run_fresh(generate, moved_model, None)
    assert not same(updated["before"], fresh["before"]), "the update must matter for the test to mean anything"
    assert same(updated["after"], fresh["before"])
    assert updated["versions"] == {5}
    unknown, shape, missing, no_folder = updated["refused"]
    assert "mlp.up.weight" in unknown
    assert "shape" in shape
    assert "missing" in missing
    assert "nothing_here" in no_folder
    assert same(updated["after_refusals"], fresh["before"])


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
