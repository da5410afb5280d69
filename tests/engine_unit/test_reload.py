"""What the worker keeps to put old weights back, and how it tells whether they are still there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rollout_spec.engine import reload


class Layer(nn.Module):
    """With what vLLM's layers have: parameters, a buffer, a derived plain tensor, a cache, a kernel of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("scale", torch.ones(4))
        self.derived = self.weight.detach() * 2
        self.kv_cache = torch.zeros(5)
        self.kernel: Any = object()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


def contents(root: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in root.state_dict().items()}
    return tensors | {f"{name}.derived": layer.derived.clone() for name, layer in root.named_children()}  # type: ignore[operator]


def overwrite(root: Any) -> None:
    with torch.no_grad():
        root[0].weight.mul_(3)
        root[0].derived.zero_()


def exchange(root: Any) -> None:
    root[0].weight = nn.Parameter(torch.empty(4, 3, device="meta"))
    root[1].weight.data = torch.zeros(7)
    root[1].kernel = None
    del root[1].scale
    root[1].register_buffer("another", torch.ones(1))


@pytest.mark.parametrize("damage", [overwrite, exchange])
def test_everything_comes_back(damage: Any) -> None:
    root: Any = model()
    before, kernel, parameter = contents(root), root[1].kernel, root[0].weight
    place = parameter.data_ptr()
    snapshot = reload.Snapshot([root])
    damage(root)
    snapshot.restore()
    after = contents(root)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert root[1].kernel is kernel
    # Captured CUDA graphs read the very memory.
    assert root[0].weight is parameter
    assert parameter.data_ptr() == place


def test_the_cache_is_neither_copied_nor_put_back() -> None:
    root: Any = model()
    snapshot = reload.Snapshot([root])
    root[0].kv_cache.fill_(7)
    snapshot.restore()
    assert root[0].kv_cache.tolist() == [7.0] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fingerprint_sees_one_changed_number(dtype: torch.dtype) -> None:
    root: Any = model().to(dtype)
    first = reload.fingerprint(root)
    assert reload.same(first, reload.fingerprint(root))
    with torch.no_grad():
        root[1].weight[2, 1] *= 1.01
    changed = reload.fingerprint(root)
    assert not reload.same(first, changed)
    assert [name for name in first if first[name] != changed[name]] == ["1.weight"]


def packed(weight: torch.Tensor) -> Any:
    """A linear layer as vLLM leaves it on CPU: its weights are in a kernel, the parameter is empty."""
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(torch.empty(0))
    layer.input_size = weight.shape[1]
    layer.cpu_linear = lambda x, _, bias: nn.functional.linear(x, weight, bias)
    layer.quant_method = SimpleNamespace(apply=lambda layer, x: layer.cpu_linear(x, layer.weight, None))
    return layer


def test_a_packed_layer_is_known_by_what_it_answers() -> None:
    weight = torch.randn(6, 5)
    first = reload.fingerprint(packed(weight))
    assert reload.same(first, reload.fingerprint(packed(weight.clone())))
    assert not reload.same(first, reload.fingerprint(packed(weight * 0)))
    assert not reload.same(first, reload.fingerprint(packed(weight * float("nan"))))
    assert not reload.same(first, reload.fingerprint(packed(weight * 1.01)))


def test_files_are_read_by_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "2.safetensors")
    read = dict(reload.read([str(tmp_path / "1.safetensors"), str(tmp_path / "2.safetensors")]))
    assert {name: tensor.tolist() for name, tensor in read.items()} == {"a": [1.0, 1.0], "b": [0.0, 0.0, 0.0]}


def test_layers_that_the_draft_shares_are_found() -> None:
    target, draft = nn.Module(), nn.Module()
    target.model, draft.model = nn.Module(), nn.Module()
    target.model.embed_tokens = draft.model.embed_tokens = nn.Embedding(4, 2)
    target.lm_head, draft.lm_head = nn.Linear(2, 4), nn.Linear(2, 4)
    runner = SimpleNamespace(get_model=lambda: target, get_draft_model=lambda: draft)
    assert reload.shared(runner) == ["embed_tokens"]
    draft.lm_head = target.lm_head
    assert reload.shared(runner) == ["embed_tokens", "lm_head"]
    assert reload.shared(SimpleNamespace(get_model=lambda: target, get_draft_model=lambda: None)) == []
