"""What the engines' controllers report, in verl's logger: collected from the rollout servers at every log call.

Each engine writes a status file (see `ControlLoop.status`) on its node; the server actor that started the engine is
asked to read it. A fault here costs metrics, never a step.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_spec.engine.control_loop import SETTINGS_KEY
from rollout_spec.rollout.metrics import fleet_metrics

logger = logging.getLogger("rollout_spec")

# Ray names of verl's vLLM servers begin so, also those of reward and teacher models, which have no status.
SERVERS = "vllm_server_"
# For all servers together; a log call must not wait longer.
SECONDS = 20.0
# After so many failures in a row nobody is asked any more.
PATIENCE = 3

Status = Mapping[str, Any]


class Collector:
    """Lives in the trainer's process; remembers what was reported, since counters grow from the engines' start."""

    def __init__(self) -> None:
        self._before: dict[str, Status] = {}
        self._failures = 0

    def collect(self) -> dict[str, float]:
        """Metrics of what was generated since the last call."""
        if self._failures >= PATIENCE:
            return {}
        try:
            now = read_all()
        except Exception:  # Ray has many; none may end a training run
            self._failures += 1
            last = " for the last time" if self._failures == PATIENCE else ""
            logger.exception("rollout_spec: no metrics of this step, the rollout servers could not be asked%s", last)
            return {}
        self._failures = 0
        if not now:
            logger.error(
                "rollout_spec: no engine of this job reports a controller, so nothing is sped up. Is this package "
                "installed on every node, and VLLM_PLUGINS unset or with 'rollout_spec' in it?"
            )
        found = fleet_metrics(now, self._before)
        self._before = {**self._before, **now}
        return found


def read_all() -> dict[str, Status]:
    """Name of the engine (node and process) -> its status, from all servers of this job."""
    import ray

    servers = [ray.get_actor(name) for name in ray.util.list_named_actors() if name.startswith(SERVERS)]
    found: dict[str, Status] = {}
    for statuses in ray.get([server.__ray_call__.remote(read_here) for server in servers], timeout=SECONDS):
        found.update(statuses)
    return found


def read_here(server: Any) -> dict[str, Status]:
    """Runs in a server: the statuses of the engines that run in its process and its children's."""
    import psutil

    settings = ((server.config.engine_kwargs.get("vllm") or {}).get("additional_config") or {}).get(SETTINGS_KEY)
    if settings is None:
        return {}
    me = psutil.Process()
    found = {}
    for pid in [me.pid, *(child.pid for child in me.children(recursive=True))]:
        file = Path(settings["status_file"].replace("{pid}", str(pid)))
        if file.exists():
            found[f"{os.uname().nodename}:{pid}"] = json.loads(file.read_text("utf-8"))
    return found
