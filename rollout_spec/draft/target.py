"""The target's folder: its configuration, checked for what a head needs, and a fingerprint of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollout_spec.config import ConfigError
from rollout_spec.model import resolve

# Read of each weights file for the fingerprint: so many pieces of so many bytes, evenly spaced.
PIECES, PIECE = 256, 2**16


class TargetFolder(NamedTuple):
    folder: Path
    config: Mapping[str, Any]

    @property
    def ends(self) -> list[int]:
        """Token ids that end a sequence."""
        end = self.config.get("eos_token_id")
        return [] if end is None else list(end) if isinstance(end, list) else [end]


def read_target(model: str) -> TargetFolder:
    """Raises ConfigError for a model that is not in a local folder, or not of an architecture with Llama's layers."""
    folder = Path(resolve(model))
    if not folder.is_dir():
        raise ConfigError(f"model {model!r}: training a head needs the model in a local folder; download it first")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config.get("model_type") not in ("llama", "qwen2", "qwen3", "mistral"):
        raise ConfigError(
            f"model {model!r}: is of type {config.get('model_type')!r}; heads are trained for llama, qwen2, qwen3 and "
            "mistral (only llama was run)"
        )
    return TargetFolder(folder, config)


def target_fingerprint(folder: Path) -> str:
    """Of names, sizes and a sample of the bytes of the weights files: a policy that moved differs everywhere."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for piece in range(PIECES):
                content.seek(piece * max(0, size - PIECE) // (PIECES - 1))
                digest.update(content.read(PIECE))
    return digest.hexdigest()[:16]
