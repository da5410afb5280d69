"""The rollout engines of this job, through verl's server actors; ours by what the option has set in them.

Functions that end in `_here` run in a server, which is their first argument: Ray's `__ray_call__` takes them there, to
a thread beside the server's event loop. They don't wait, lest they keep others from being asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_spec.config import Config
from rollout_spec.draft.samples import Sample
from rollout_spec.engine import outbox
from rollout_spec.engine.control_loop import SETTINGS_KEY
from rollout_spec.rollout.fleet_refresh import FleetRefresh
from rollout_spec.rollout.gains import Statuses
from rollout_spec.rollout.update import LOAD_TIMEOUT

# Ray names of verl's vLLM servers begin so, also those of reward and teacher models, which have no settings of ours.
SERVERS = "vllm_server_"
# For all servers together; a step of the trainer must not wait longer.
SECONDS = 20.0
LOOK = 0.05  # between two looks at a call that runs


def ask(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the function returns in each server. Raises what Ray raises."""
    import ray

    servers = [ray.get_actor(name) for name in ray.util.list_named_actors() if name.startswith(SERVERS)]
    found: list[Any] = ray.get([server.__ray_call__.remote(function, *args) for server in servers], timeout=SECONDS)
    return found


def settings_of(server: Any) -> dict[str, Any]:
    """Ours in the engine's `additional_config`; {} in a server that has nothing to do with us."""
    vllm = server.config.engine_kwargs.get("vllm") or {}
    return dict((vllm.get("additional_config") or {}).get(SETTINGS_KEY) or {})


def describe_here(server: Any) -> tuple[Config, str] | None:
    """Of one engine whose draft head is to be refreshed: its configuration, and Ray's id of its node."""
    import ray

    if (server.replica_rank, server.node_rank) != (0, 0) or "responses_file" not in settings_of(server):
        return None
    config: Config = server.config.ours()
    sampling = config.sampling.model_copy(update={"temperature": server.config.temperature})
    known = {"model": server.model_config.local_path, "sampling": sampling}
    return config.model_copy(update=known), ray.get_runtime_context().get_node_id()


def read_here(server: Any) -> Statuses:
    return outbox.statuses(settings_of(server))


def take_here(server: Any, temperature: float, tokens: int) -> list[Sample]:
    return outbox.take(settings_of(server), temperature, tokens)


def announce_here(server: Any, draft_version: int) -> None:
    outbox.announce(settings_of(server), draft_version)


def begin_here(server: Any, method: str, args: tuple[Any, ...], files: dict[str, bytes]) -> None:
    """Begin a call of the workers; `files` are what its arguments name, for another machine than the sender's."""
    for written in getattr(server, "rollout_spec_written", ()):
        written.unlink()  # the call before is over
    server.rollout_spec_written = [path for path in map(Path, files) if not path.exists()]
    for path in server.rollout_spec_written:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[str(path)])
    if server.node_rank == 0 and settings_of(server):
        call, loop = server.engine.collective_rpc(method, args=args), server.engine.output_handler.get_loop()
        server.rollout_spec_call = asyncio.run_coroutine_threadsafe(call, loop)


def answer_here(server: Any) -> tuple[bool, list[Any], str]:
    """Whether the call is over, its results, and what was wrong."""
    call = getattr(server, "rollout_spec_call", None)
    if call is None:
        return True, [], ""
    if not call.done():
        return server.engine.errored, [], "the engine is dead" if server.engine.errored else ""
    error = call.exception()
    return (True, [], f"{type(error).__name__}: {error}") if error else (True, list(call.result()), "")


class RayEngines:
    """`fleet_refresh.Engines`, asked from the trainer's process."""

    def refresh(self, statuses: Statuses) -> FleetRefresh | None:
        """What keeps their draft heads in step; None where the option does not say so."""
        import ray

        for config, node in filter(None, ask(describe_here)):
            return FleetRefresh(config, self, near=node == ray.get_runtime_context().get_node_id(), statuses=statuses)
        return None

    def statuses(self) -> Statuses:
        return {name: status for found in ask(read_here) for name, status in found.items()}

    def call(self, method: str, *args: Any) -> list[Any]:
        names = [name for arg in args if isinstance(arg, list) for name in arg]
        try:
            ask(begin_here, method, args, {name: Path(name).read_bytes() for name in names})
            until = time.monotonic() + LOAD_TIMEOUT
            answers = ask(answer_here)
            while not all(over for over, _, _ in answers) and time.monotonic() < until:
                time.sleep(LOOK)
                answers = ask(answer_here)
        except Exception as error:  # Ray has many
            raise RuntimeError(f"{method}: the rollout servers could not be asked: {error}") from error
        if problems := [problem or "no answer" for over, _, problem in answers if problem or not over]:
            raise RuntimeError(f"{method}: {'; '.join(problems)}")
        return [result for _, results, _ in answers for result in results]

    def announce(self, draft_version: int) -> None:
        ask(announce_here, draft_version)

    def take(self, temperature: float, tokens: int) -> list[Sample]:
        return [sample for samples in ask(take_here, temperature, tokens) for sample in samples]
