"""Weights to push into a running engine: checked against the model before the first byte is written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_spec.config import ConfigError

if TYPE_CHECKING:
    import torch

# Named tensors travel as one safetensors file in memory, so that no pickle crosses a process boundary.
SHARED_MEMORY = Path("/dev/shm")

Shapes = dict[str, tuple[int, ...]]


def safetensors_files(folder: Path) -> list[Path]:
    """The *.safetensors of a folder; ConfigError if there are none."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise ConfigError(f"weights {str(folder)!r}: no *.safetensors there; give a Hugging Face model folder")
    return files


def shapes_of(files: list[Path]) -> Shapes:
    """Tensor shapes by name, read from the headers only."""
    from safetensors import safe_open

    shapes: Shapes = {}
    for file in files:
        try:
            with safe_open(str(file), framework="np") as weights:
                shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        except Exception as error:  # safetensors raises its own bare exception type
            raise ConfigError(f"weights {str(file)!r}: not a readable safetensors file: {error}") from error
    return shapes


def check_shapes(new: Shapes, model: Shapes) -> None:
    """ConfigError that names the first unknown tensor, wrong shape or missing tensor."""
    for name, shape in new.items():
        # A tied head is not in the model's own file, but trainers send it.
        if name not in model and name != "lm_head.weight":
            raise ConfigError(f"weights: tensor {name!r} is not in the model; names must be the checkpoint's own")
        if name in model and shape != model[name]:
            raise ConfigError(f"weights: tensor {name!r} has shape {shape}, the model has {model[name]}")
    missing = model.keys() - new.keys()
    if missing:
        raise ConfigError(f"weights: {len(missing)} tensors are missing, for example {min(missing)!r}")


@contextmanager
def as_files(weights: Mapping[str, torch.Tensor] | str | Path) -> Iterator[list[Path]]:
    """The weights as safetensors files for the time of the block."""
    if isinstance(weights, str | Path):
        yield safetensors_files(Path(weights))
        return
    from safetensors.torch import save_file

    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="rollout_spec_", dir=parent) as folder:
        file = Path(folder) / "weights.safetensors"
        # Clones cost memory but tied or sliced tensors share storage, which safetensors refuses.
        save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}, file)
        yield [file]
