"""What we rely on in verl, attribute by attribute, checked at start; a failure names what changed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.metadata import version

TESTED = "0.9.1"


class IncompatibleVerl(RuntimeError):  # noqa: N818 - a state, as a user reads it
    """verl changed where we rely on it; the message names the place."""


def problems() -> Iterator[str]:
    """A sentence for each thing that is missing. Cheap: imports nothing of vLLM."""
    from verl.utils import config
    from verl.utils.tracking import Tracking
    from verl.workers.config import MtpConfig, RolloutConfig

    used = {"name", "mtp", "engine_kwargs", "enforce_eager", "free_cache_engine", "max_num_seqs"}
    if gone := used - {one.name for one in fields(RolloutConfig)}:
        yield f"verl.workers.config.RolloutConfig has no {', '.join(sorted(gone))} (read to set up the engine)"
    if "engine_kwargs" not in getattr(RolloutConfig, "_mutable_fields", ()):
        yield "verl.workers.config.RolloutConfig.engine_kwargs cannot be set any more (our engine arguments go there)"
    if gone := {"enable", "enable_rollout", "num_speculative_tokens"} - {one.name for one in fields(MtpConfig)}:
        yield f"verl.workers.config.MtpConfig has no {', '.join(sorted(gone))} (read where MTP drafts)"
    yield from _parameters(config.validate_config, ["config"], "to check the option early")
    yield from _parameters(Tracking.log, ["self", "data", "step", "backend"], "to add metrics")
    yield from _parameters(Tracking.__init__, ["self"], "to refresh draft heads")


def sender_problems() -> Iterator[str]:
    """The same for what sends weights; apart, because its import takes vLLM's seconds."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    for name, first in (("_init_socket", ["self"]), ("async_send_weights", ["self", "weights"])):
        method = getattr(BucketedWeightSender, name, None)
        if method is None:
            yield f"BucketedWeightSender has no {name} (replaced for a time limit)"
        else:
            yield from _parameters(method, first, "for a time limit")


def worker_problems() -> Iterator[str]:
    """The same for what takes them, in vLLM's workers."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension as Stock

    yield from _parameters(Stock.update_weights_from_ipc, ["self"], "to copy weights for draft heads")
    yield from _parameters(Stock._update_weights, ["self", "weights", "peft_config", "base_sync_done"], "for the same")


@functools.cache
def require(find: Callable[[], Iterator[str]] = problems) -> None:
    """Nothing is missing that `find` looks for, or IncompatibleVerl."""
    if found := list(find()):
        raise IncompatibleVerl(
            f"verl {version('verl')} is not what rollout_spec was written for ({TESTED}):\n  " + "\n  ".join(found)
        )


def _parameters(function: Callable[..., object], first: list[str], purpose: str) -> Iterator[str]:
    found = list(inspect.signature(function).parameters)
    if found[: len(first)] != first:
        yield f"{function.__qualname__} takes {found}, not {first} (replaced {purpose})"
