"""New weights for the engine's target, its draft head or draft model, or both: checked, then loaded as one change.

Either all of it is in force afterwards or nothing is: what can be checked is checked before the first byte is written,
and a worker that fails to load puts back what it had (it keeps a copy meanwhile, in host memory).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from rollout_spec.config import ConfigError
from rollout_spec.rollout.weights import (
    HEAD,
    Layout,
    Weights,
    check_layout,
    check_values,
    layout_of,
    safetensors_files,
    staged,
)

# Drafters whose weights are a checkpoint of their own. (MTP heads are part of the target's.)
REFRESHABLE = ("draft_model", "eagle", "eagle3", "medusa")
# vLLM does not read a head's `t2d`.
UNREAD = "t2d"
# A worker that has not loaded by then is lost (seconds); the largest models take one or two minutes.
LOAD_TIMEOUT = 900.0


class UpdateFailed(RuntimeError):  # noqa: N818 - what happened, as a user reads it
    """A worker could not load the weights; the message says whether the old ones are in force."""


class WeightSync:
    """Loads weights into an engine's workers. `rpc(method, *args)` runs a method in each and returns their results."""

    def __init__(self, rpc: Callable[..., list[Any]], arguments: dict[str, Any], folder: Path) -> None:
        """arguments: the engine's; folder: where a copy of the last draft may be kept, of the size of the draft."""
        self._rpc = rpc
        self._target = str(arguments["model"])
        spec = arguments.get("speculative_config") or {}
        self._method = spec.get("method")
        self._draft = str(spec["model"]) if self._method in REFRESHABLE and spec.get("model") else None
        self._kept = folder / "draft"

    @property
    def has_draft(self) -> bool:
        """The drafter has weights of its own."""
        return self._draft is not None

    def load(self, target: Weights | None, draft: Weights | None, vocabulary: int) -> None:
        """Put in what is given, both as one change. vocabulary: the target's, in tokens.

        Raises ConfigError on weights that do not fit (nothing was touched), and UpdateFailed.
        """
        with ExitStack() as stack:
            new: dict[str, list[Path]] = {"target": [], "draft": []}
            if target is not None:
                new["target"] = stack.enter_context(staged(target))
                self._check_target(new["target"])
            if draft is not None:
                new["draft"] = stack.enter_context(staged(draft))
                self._check_draft(new["draft"], vocabulary)
            self._apply(new["target"], new["draft"])
            if new["draft"]:
                self._keep(new["draft"])

    def note(self) -> None:
        """The weights in the workers are right; `changed` compares with them from now on."""
        self._rpc("rollout_spec_note_weights")

    def changed(self) -> list[str]:
        """Of "target" and "draft" those that in some worker are not what was loaded last."""
        return sorted({which for worker in self._rpc("rollout_spec_changed_weights") for which in worker})

    def reload_draft(self) -> None:
        """Load again what the draft was last given, or began with."""
        assert self._draft is not None
        with staged(self._kept if self._kept.is_dir() else self._draft) as files:
            shared = self._shared
            if any(_holds(name, shared) for name in layout_of(files)):
                files = [_without(files, shared)]
            self._apply([], files)

    def _apply(self, target: list[Path], draft: list[Path]) -> None:
        paths = [[str(file) for file in files] for files in (target, draft)]
        problems = sorted({problem for problem in self._rpc("rollout_spec_load_weights", *paths) if problem})
        broken = [problem for problem in self._rpc("rollout_spec_settle_weights", not problems) if problem]
        if broken:
            raise UpdateFailed(
                f"weights: {problems}, and the old ones did not come back ({broken}): start a new engine"
            )
        if problems:
            raise UpdateFailed(f"weights: vLLM could not load them, the old ones stay in force: {'; '.join(problems)}")

    def _check_target(self, files: list[Path]) -> None:
        model = self._target_layout
        check_layout(layout_of(files), model)
        check_values(files, tied=HEAD not in model)

    def _check_draft(self, files: list[Path], vocabulary: int) -> None:
        if self._draft is None:
            raise ConfigError(f"weights: the drafter {self._method!r} has no weights of its own to refresh")
        new, shared = layout_of(files), self._shared
        taken = [name for name in new if _holds(name, shared)]
        if taken:
            raise ConfigError(
                f"weights: {taken[0]!r} of the draft would overwrite the target's: the layer is shared; leave it out"
            )
        model = {name: entry for name, entry in self._draft_layout.items() if not _holds(name, shared)}
        tied = self._method == "draft_model" and HEAD not in model
        check_layout(new, model, optional=(UNREAD, HEAD) if tied else (UNREAD,))
        check_values(files, vocabulary=vocabulary, tied=tied)

    @cached_property
    def _target_layout(self) -> Layout:
        return layout_of(safetensors_files(Path(self._target)))

    @cached_property
    def _draft_layout(self) -> Layout:
        return layout_of(safetensors_files(Path(self._draft or "")))

    @cached_property
    def _shared(self) -> list[str]:
        return list(self._rpc("rollout_spec_shared_layers")[0])

    def _keep(self, files: list[Path]) -> None:
        """A copy to reload from: the trainer's own may be gone or changed when it is needed."""
        coming = self._kept.with_suffix(".coming")
        shutil.rmtree(coming, ignore_errors=True)
        coming.mkdir()
        for file in files:
            shutil.copyfile(file, coming / file.name)
        shutil.rmtree(self._kept, ignore_errors=True)
        coming.rename(self._kept)


def _holds(name: str, layers: list[str]) -> bool:
    """A tensor of one of the layers: "model.embed_tokens.weight" is one of embed_tokens."""
    return any(layer in name.split(".") for layer in layers)


def _without(files: list[Path], layers: list[str]) -> Path:
    """The same tensors in one file beside them, those of `layers` left out."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor for file in files for name, tensor in load_file(file).items() if not _holds(name, layers)}
    made = files[0].parent / "without.safetensors"
    save_file(tensors, made)
    return made
