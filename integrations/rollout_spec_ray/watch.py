"""New weights from a trainer that writes folders: `latest.json` in the watched folder names the newest.

    {"policy_version": 7, "policy": "step-7", "draft_version": 3, "draft": "head-3"}      draft: where there is one

A trainer writes a folder whole, then replaces `latest.json`; it may delete a folder once no engine can need it, that
is, when the next one is in force in all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_spec.config import ConfigError
from rollout_spec.rollout.resident import Mode
from rollout_spec_ray.engine import Weights

LATEST = "latest.json"
# Seconds between looks.
EVERY = 1.0


class Watch:
    """Looks when it is told that time goes by."""

    def __init__(self, folder: str, mode: Mode, say: Callable[[str], object]) -> None:
        """ConfigError if there is no such folder."""
        self._folder = Path(folder).expanduser().absolute()
        if not self._folder.is_dir():
            raise ConfigError(f"--watch {folder}: no such folder")
        self._say, self._mode = say, mode
        self._looked, self._text = 0.0, ""

    def look(self) -> Weights | None:
        """Weights that were not there at the last look."""
        now = time.monotonic()
        if now - self._looked < EVERY:
            return None
        self._looked = now
        try:
            text = (self._folder / LATEST).read_text(encoding="utf-8")
        except OSError:
            return None
        if text == self._text:
            return None
        self._text = text
        try:
            weights = self._parse(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._say(f"{self._folder / LATEST}: is not understood ({error}); the weights stay")
            return None
        self._say(f"weights of policy version {weights.policy_version} are wanted ({self._mode})")
        return weights

    def _parse(self, tree: Any) -> Weights:
        draft = tree.get("draft")
        return Weights(
            policy=self._inside(tree["policy"]),
            policy_version=int(tree["policy_version"]),
            draft=None if draft is None else self._inside(draft),
            draft_version=0 if draft is None else int(tree["draft_version"]),
        )

    def _inside(self, name: str) -> str:
        path = (self._folder / name).resolve()
        if not path.is_relative_to(self._folder.resolve()):
            raise ValueError(f"{name!r} is outside of the watched folder")
        return str(path)
