"""Weights to push into a running engine: copied where nobody else writes, then checked, before the first byte is used.

A trainer hands over named tensors, or a folder (or a file) of safetensors that it wrote to disk or shared memory. Both
become safetensors files in a folder of our own: what was checked is what is loaded, whatever the sender does
meanwhile, and no pickle crosses a process boundary. That costs one copy of the weights in shared memory for the time
of the update; where shared memory is too small, in the temporary folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout_spec.config import ConfigError

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")
# Header and alignment of a safetensors file come on top of the tensors.
HEADROOM = 1.02
# Converted into one another while loading. All other types must be those of the model.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Weights = Mapping[str, "torch.Tensor"] | str | Path


class Entry(NamedTuple):
    """A tensor in a safetensors header."""

    dtype: str  # safetensors' name: F32, BF16, I64, ..
    shape: tuple[int, ...]


Layout = dict[str, Entry]


def safetensors_files(place: Path) -> list[Path]:
    """The *.safetensors of a folder, or the file itself; ConfigError if there are none."""
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else []
    if place.is_file() and place.suffix == ".safetensors":
        files = [place]
    if not files:
        raise ConfigError(f"weights {str(place)!r}: no *.safetensors there; give a Hugging Face model folder")
    return files


def layout_of(files: Iterable[Path]) -> Layout:
    """Types and shapes by name, read from the headers only. ConfigError on a file that is damaged or cut off."""
    from safetensors import safe_open

    layout: Layout = {}
    for file in files:
        try:
            with safe_open(str(file), framework="np") as weights:
                for name in weights.keys():  # noqa: SIM118 - safe_open is not iterable
                    if name in layout:
                        raise ConfigError(f"weights {str(file)!r}: tensor {name!r} is in another file too")
                    part = weights.get_slice(name)
                    layout[name] = Entry(part.get_dtype(), tuple(part.get_shape()))
        except ConfigError:
            raise
        except Exception as error:  # safetensors raises its own bare exception type
            raise ConfigError(f"weights {str(file)!r}: not a readable safetensors file: {error}") from error
    return layout


def check_layout(new: Layout, model: Layout, optional: Iterable[str] = (HEAD,)) -> None:
    """ConfigError that names the first unknown tensor, wrong shape, wrong type or missing tensor.

    optional: names that may be there or not; a tied head is not in the model's own file, but trainers send it.
    """
    optional = set(optional)
    for name, entry in new.items():
        if name not in model:
            if name in optional:
                continue
            raise ConfigError(f"weights: tensor {name!r} is not in the model; names must be the checkpoint's own")
        if entry.shape != model[name].shape:
            raise ConfigError(f"weights: tensor {name!r} has shape {entry.shape}, the model has {model[name].shape}")
        kinds = {entry.dtype, model[name].dtype}
        if len(kinds) > 1 and not kinds <= FLOATS:
            raise ConfigError(f"weights: tensor {name!r} is {entry.dtype}, the model has {model[name].dtype}")
    missing = model.keys() - new.keys() - (optional if HEAD not in model else optional - {HEAD})
    if missing:
        raise ConfigError(f"weights: {len(missing)} tensors are missing, for example {min(missing)!r}")


def check_values(files: Iterable[Path], *, vocabulary: int | None = None, tied: bool = False) -> None:
    """Read every byte. ConfigError on a number that is not finite, a `d2t` that is off, a tied head of its own.

    vocabulary: tokens of the target, for a draft head; its `d2t` [draft vocabulary] is target id minus draft id.
    tied: the model uses its embedding as the head, so that a head that came along is not loaded.
    """
    from safetensors import safe_open

    ends: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - safe_open is not iterable
                tensor = weights.get_tensor(name)
                # Types of one byte have no such test; they are no trainer's.
                if tensor.is_floating_point() and tensor.element_size() > 1 and not bool(tensor.isfinite().all()):
                    raise ConfigError(f"weights: tensor {name!r} holds numbers that are not finite")
                if name == "d2t" and vocabulary is not None:
                    _check_d2t(tensor, vocabulary)
                if tied and name in (EMBEDDING, HEAD):
                    ends[name] = tensor
    if len(ends) == 2 and not ends[HEAD].equal(ends[EMBEDDING]):
        raise ConfigError(f"weights: the model ties {HEAD!r} to {EMBEDDING!r}, but these two differ")


def _check_d2t(d2t: torch.Tensor, vocabulary: int) -> None:
    import torch

    targets = torch.arange(len(d2t)) + d2t
    if len(targets) and (int(targets.min()) < 0 or int(targets.max()) >= vocabulary):
        raise ConfigError(f"weights: 'd2t' points beyond the target's vocabulary of {vocabulary} tokens")
    if len(targets.unique()) != len(targets):
        raise ConfigError("weights: 'd2t' points to the same target token twice")


@contextmanager
def staged(weights: Weights) -> Iterator[list[Path]]:
    """The weights as safetensors files of our own for the time of the block. ConfigError if they can't be had."""
    if isinstance(weights, str | Path):
        source = safetensors_files(Path(weights))
        size = sum(file.stat().st_size for file in source)
        with _folder(size) as folder:
            try:
                files = [Path(shutil.copyfile(file, folder / file.name)) for file in source]
            except FileNotFoundError as error:  # the sender took it back
                raise ConfigError(f"weights {str(weights)!r}: gone while they were read: {error}") from error
            yield files
        return
    from safetensors.torch import save_file

    tensors = dict(_tensors(weights))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with _folder(size) as folder:
        file = folder / "weights.safetensors"
        # Clones cost memory but tied or sliced tensors share storage, which safetensors refuses.
        save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, file)
        yield [file]


def _tensors(weights: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"weights: {name!r} is a {type(tensor).__name__}, not a tensor")
        yield name, tensor


@contextmanager
def _folder(size: int) -> Iterator[Path]:
    """A folder of our own with room for `size` bytes, in shared memory where it has that."""
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > size * HEADROOM
    parent = SHARED_MEMORY if roomy else None
    # The process in its name, so that who was killed can be told from who is at work.
    with tempfile.TemporaryDirectory(prefix=f"rollout_spec_{os.getpid()}_", dir=parent) as folder:
        yield Path(folder)
