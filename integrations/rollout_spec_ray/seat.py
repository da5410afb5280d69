"""An engine's place in a pool, whichever process sits on it, and how Ray is asked for one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout_spec.config import Config
from rollout_spec_ray.engine import EngineActor, Home, MakeWorker, Turn, Weights

Stage = Literal["placing", "loading", "serving", "updating", "gone"]


@dataclass(slots=True)
class Seat:
    """What the driver knows of it."""

    number: int
    handle: Any
    group: Any = None  # Ray's placement group
    stage: Stage = "placing"
    call: Any = None  # under way
    since: float = 0.0  # seconds of `time.monotonic`, as `again`
    again: float = 0.0  # placing: not asked before
    home: Home | None = None
    cores: tuple[int, ...] = ()
    weights: Weights = field(default_factory=Weights)
    coming: Weights = field(default_factory=Weights)  # of an update or a start under way
    killed: str | None = None  # the incarnation that was killed last
    deaths: int = 0  # since a sequence last finished here
    tokens: float = 0.0
    k: float | None = None
    turn: Turn | None = None  # the last one, while it tells what the engine has
    takes_in_flight: bool = False
    giving_to: int | None = None  # the seat that gets what it was asked to give up


def make_seat(config: Config, number: int, attempt: int, make_worker: MakeWorker, drafts: Any) -> Seat:
    """Ask Ray for an actor of this configuration. drafts: as `EngineActor` has it."""
    options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 4}
    cpus, gpus = config.ray.cpus_per_engine, config.ray.gpus_per_engine
    group = None
    tree = config.model_dump(mode="json")
    if gpus > 1:
        # vLLM's Ray executor starts a worker on each bundle of the group that its caller is in.
        group = placement_group([{"GPU": 1, "CPU": cpus}, *[{"GPU": 1}] * (gpus - 1)], strategy="STRICT_PACK")
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        )
        options |= {"num_cpus": cpus, "num_gpus": 0}
        tree["engine"]["extra"] |= {"tensor_parallel_size": gpus, "distributed_executor_backend": "ray"}
    else:
        options |= {"num_cpus": cpus, "num_gpus": gpus}
    handle = ray.remote(EngineActor).options(**options).remote(number, attempt, tree, make_worker, drafts)
    return Seat(number, handle, group)
