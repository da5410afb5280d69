"""The policy's weights where another process can read them as a Hugging Face model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_spec.config import ConfigError
from rollout_spec.rollout.weights import HEADROOM, SHARED_MEMORY, Weights, safetensors_files

CONFIG = "config.json"


@contextmanager
def policy_folder(weights: Weights, model: Path) -> Iterator[Path]:
    """A folder with `config.json` and the weights, for the time of the block.

    model: the folder of the policy's configuration. A complete folder is used where it is; of one without a
    configuration, or of one file, links are made; tensors are copied, to shared memory where they fit.
    """
    if isinstance(weights, str | Path):
        source = Path(weights)
        if source.is_dir() and (source / CONFIG).is_file():
            yield source
            return
        files = safetensors_files(source)
        if len(files) > 1:
            raise ConfigError(f"refresh: {source} has several files and no {CONFIG}; save a complete model there")
        with _made(model, 0) as folder:
            (folder / "model.safetensors").symlink_to(files[0].resolve())
            yield folder
        return
    from rollout_spec.draft.checkpoint import save_whole

    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    with _made(model, size) as folder:
        # Clones, since tied tensors share storage, which safetensors refuses.
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}
        save_whole(folder / "model.safetensors", tensors)
        yield folder


@contextmanager
def _made(model: Path, size: int) -> Iterator[Path]:
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > size * HEADROOM
    with tempfile.TemporaryDirectory(prefix="rollout_spec_", dir=SHARED_MEMORY if roomy else None) as made:
        folder = Path(made)
        shutil.copyfile(model / CONFIG, folder / CONFIG)
        yield folder
