"""A head on disk: what stock vLLM loads (`config.json`, `model.safetensors`), and where it came from beside it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout_spec.config import ConfigError
from rollout_spec.draft.model import Eagle3Head
from rollout_spec.draft.shape import HeadShape
from rollout_spec.draft.vocabulary import d2t, from_d2t
from rollout_spec.files import write_json
from rollout_spec.precision import cpu_dtype

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "provenance.json"
HELD_OUT, SEEN = "held_out.jsonl", "training_prompts.txt"
SCHEMA = 1


class SavedHead(NamedTuple):
    head: Eagle3Head
    ids: Tensor
    """[draft vocabulary] target ids."""
    provenance: Mapping[str, Any]
    """Empty for a head that others trained."""

    def rounded(self) -> Eagle3Head:
        """`head` itself, now with the values that an engine has, in the precision that is fast here."""
        return self.head.bfloat16().to(cpu_dtype())


def save_head(folder: Path, head: Eagle3Head, ids: Tensor, provenance: Mapping[str, Any]) -> None:
    """Write the head in bfloat16. Weights appear whole or not at all; the rest of the folder is left as it is."""
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    if head.shape.draft_vocab_size != head.shape.vocab_size:
        tensors["d2t"] = d2t(ids)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, head.shape.to_config())
    save_whole(folder / WEIGHTS, tensors)
    write_json(folder / PROVENANCE, {"schema": SCHEMA, **provenance})


def save_whole(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file that replaces the one at `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as scratch:
        made = Path(scratch) / path.name
        save_file(dict(tensors), made, metadata={"format": "pt", **(metadata or {})})
        made.chmod(0o644)  # safetensors writes 0600
        shutil.move(made, path)


def load_whole(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def read_shape(folder: Path) -> HeadShape:
    """From `config.json`. Raises ConfigError where there is no EAGLE-3 head."""
    try:
        return HeadShape.from_config(json.loads((folder / CONFIG).read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"draft head {str(folder)!r}: {error}") from error


def read_provenance(folder: Path) -> dict[str, Any]:
    """Empty where there is none."""
    path = folder / PROVENANCE
    try:
        provenance: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ConfigError(f"draft head {str(folder)!r}: {PROVENANCE} is damaged: {error}") from error
    return provenance


def load_head(folder: Path) -> SavedHead:
    """The head in float32. Raises ConfigError that names the tensor that is missing, unknown or of a wrong shape."""
    shape = read_shape(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"draft head {str(folder)!r}: {WEIGHTS} cannot be read: {error}") from error
    offsets, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        if shape.draft_vocab_size != shape.vocab_size:
            raise ConfigError(f"draft head {str(folder)!r}: tensor 'd2t' is missing")
        offsets = torch.zeros(shape.vocab_size, dtype=torch.long)
    head = Eagle3Head(shape)
    wanted = {name: tensor.shape for name, tensor in head.state_dict().items()} | {"d2t": (shape.draft_vocab_size,)}
    found = {name: tensor.shape for name, tensor in tensors.items()} | {"d2t": offsets.shape}
    for name in sorted(wanted.keys() | found.keys()):
        if tuple(wanted.get(name, ())) != tuple(found.get(name, ())):
            raise ConfigError(
                f"draft head {str(folder)!r}: tensor {name!r} has shape {list(found.get(name, ())) or 'none'}, "
                f"{list(wanted.get(name, ())) or 'none'} is expected"
            )
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return SavedHead(head, from_d2t(offsets), read_provenance(folder))
