"""Weights of a running worker, in the worker: loaded through vLLM's layerwise reload, put back if that fails, and
recognised by a fingerprint.

Not vLLM's weight session (`start_draft_weight_update` ..): it takes either the target or the draft, and after an error
it leaves layers half loaded; here both change together or neither does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

TARGET, DRAFT = "target", "draft"
# Attributes that hold no weights but much memory.
NOT_WEIGHTS = ("kv_cache",)
# Of a packed layer only its answer to a probe can be compared; kernels may round it differently from call to call.
PROBE_TOLERANCE = 1e-4

Tensors = Iterable[tuple[str, torch.Tensor]]
# By tensor: a checksum, which is exact, or (float) the answer to a probe.
Marks = dict[str, int | float]


def models(runner: Any) -> dict[str, nn.Module]:
    """The models of a worker that hold weights: target, and draft where the drafter has one."""
    found = {TARGET: runner.get_model()}
    get_draft = getattr(runner, "get_draft_model", None)
    draft = get_draft() if get_draft is not None else getattr(getattr(runner, "drafter", None), "model", None)
    if isinstance(draft, nn.Module):
        found[DRAFT] = draft
    return found


def shared(runner: Any) -> list[str]:
    """Which of embed_tokens and lm_head of the draft are the target's own modules."""
    both = models(runner)
    if DRAFT not in both:
        return []
    targets = set(map(id, both[TARGET].modules()))
    paths = dict(both[DRAFT].named_modules(remove_duplicate=False))
    ends = ("embed_tokens", "lm_head")
    return [end for end in ends if any(p.split(".")[-1] == end and id(m) in targets for p, m in paths.items())]


def load(worker: Any, which: str, tensors: Tensors) -> None:
    """Load one model in the names of its checkpoint. An exception leaves it half loaded: see `Snapshot`."""
    from vllm.config import set_current_vllm_config

    runner = worker.model_runner
    model = models(runner)[which]
    config = runner.model_config if which == TARGET else worker.vllm_config.speculative_config.draft_model_config
    tied = bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
    if tied:  # the head is the embedding; loaded by itself vLLM refuses it
        tensors = ((name, tensor) for name, tensor in tensors if name != "lm_head.weight")
    with set_current_vllm_config(worker.vllm_config):
        if which == TARGET:
            runner.reload_weights(weights_iterator=iter(tensors))
        else:
            from vllm.model_executor.model_loader import reload

            reload.initialize_layerwise_reload(model)
            model.load_weights(iter(tensors))
            reload.finalize_layerwise_reload(model, config)
        head = getattr(model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if tied and method is not None:
            # On CPU a tied head keeps a packed copy of the old embedding; pack it again.
            method.process_weights_after_loading(head)


class Snapshot:
    """What the modules of some models hold, to put it back.

    Costs a copy of the parameters in host memory; kernels that pack weights (CPU) keep theirs in objects that a
    reload replaces, so that keeping the object is enough.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        modules = {id(module): module for root in roots for module in root.modules()}
        self._modules = [(module, _contents(module)) for module in modules.values()]
        tensors = {id(tensor): tensor for _, state in self._modules for tensor in _tensors(state)}
        self._tensors = [(tensor, tensor.data, tensor.detach().to("cpu", copy=True)) for tensor in tensors.values()]

    def restore(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for module, state in self._modules:
            get_layerwise_info(module).reset()  # a reload that broke off has left its marks there
            module.__dict__.clear()
            module.__dict__.update(state)
        for tensor, data, copy in self._tensors:
            data.copy_(copy)
            tensor.data = data


def fingerprint(model: nn.Module) -> Marks:
    """A number for each tensor that holds weights, and for each packed layer; cheap, and blind to permutations."""
    marks: Marks = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.numel():
                marks[f"{path}.{name}"] = _checksum(parameter.detach())
        if hasattr(module, "cpu_linear"):
            marks[f"{path} packed"] = _probe(module)
    return marks


def own_checksum(draft: nn.Module, target: nn.Module) -> int:
    """Of the draft's parameters that are not the target's too; what a kernel has packed is left out."""
    taken = set(map(id, target.parameters()))
    return sum(_checksum(one.detach()) for one in draft.parameters() if one.numel() and id(one) not in taken)


def same(first: Marks, second: Marks) -> bool:
    return first.keys() == second.keys() and all(
        value == second[name]
        or (isinstance(value, float) and math.isclose(value, second[name], rel_tol=PROBE_TOLERANCE))
        for name, value in first.items()
    )


def read(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - safe_open is not iterable
                yield name, weights.get_tensor(name)


def _contents(module: nn.Module) -> dict[str, Any]:
    """A module's attributes; its tables copied, since a reload takes tensors out of them and puts others in."""
    state = dict(module.__dict__)
    for table in ("_parameters", "_buffers", "_modules"):
        state[table] = dict(state[table])
    state["_non_persistent_buffers_set"] = set(state["_non_persistent_buffers_set"])
    return state


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    values = [*state["_parameters"].values(), *state["_buffers"].values()]
    # Some layers keep what they make of their weights in plain attributes.
    values += [value for name, value in state.items() if name not in NOT_WEIGHTS]
    return (value for value in values if isinstance(value, torch.Tensor))


def _checksum(tensor: torch.Tensor) -> int:
    """The sum of the bits, read as whole numbers."""
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.contiguous().view(size).sum(dtype=torch.int64))


@torch.no_grad()
def _probe(layer: Any) -> float:
    """The size of a packed layer's answer to a fixed vector."""
    width = next(
        int(value)
        for name in ("input_size_per_partition", "input_size", "embedding_dim")
        if (value := getattr(layer, name, None)) is not None
    )
    vector = torch.linspace(-1.0, 1.0, width, dtype=layer.weight.dtype, device=layer.weight.device)[None]
    return float(layer.quant_method.apply(layer, vector).abs().double().sum())
