"""Files through which engines and whoever started them hear of each other, where nothing else reaches a scheduler.

Settings name them, with `{pid}` for the process of the scheduler, since several engines may have the same settings.
Read in the process that started the engines, or in one between.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout_spec.draft.replay import Replay
from rollout_spec.draft.samples import Sample
from rollout_spec.engine import responses
from rollout_spec.files import write_whole

Settings = Mapping[str, Any]


def settings(refreshed: bool) -> dict[str, str]:
    """Names of the files, for our part of an engine's `additional_config`; refreshed: its draft head is."""
    name = f"/tmp/rollout_spec_{os.getuid()}_{{pid}}"
    found = {"status_file": f"{name}.json"}
    return found | {"draft_file": f"{name}_draft", "responses_file": f"{name}_responses"} if refreshed else found


def statuses(of: Settings) -> dict[str, Any]:
    """Name of the engine (node and process) -> `ControlLoop.status`."""
    return {
        f"{os.uname().nodename}:{pid}": json.loads(file.read_text("utf-8")) for pid, file in _files(of, "status_file")
    }


def take(of: Settings, temperature: float, tokens: int) -> list[Sample]:
    """Responses since the last time at this temperature, up to so many tokens, short and long ones alike."""
    kept = Replay(tokens, 1)
    for _, file in _files(of, "responses_file"):
        found = (one for one in responses.take(file) if one.temperature == temperature)
        kept.add((Sample("", one.prompt, one.response, one.temperature, one.ended) for one in found), 0)
    return [one.sample for one in kept]


def announce(of: Settings, draft_version: int) -> None:
    """Tell each scheduler that it drafts with another head."""
    for _, file in _files(of, "draft_file"):
        write_whole(file, str(draft_version))


def _files(of: Settings, name: str) -> Iterator[tuple[int, Path]]:
    """Process and file of each engine in this process and its children."""
    import psutil

    if name not in of:
        return
    me = psutil.Process()
    for pid in [me.pid, *(child.pid for child in me.children(recursive=True))]:
        if Path(of["status_file"].replace("{pid}", str(pid))).exists():
            yield pid, Path(of[name].replace("{pid}", str(pid)))
