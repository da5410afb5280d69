"""Every place where we replace something of verl's, for want of an extension point. All of it is here.

1. `verl.utils.config.validate_config`: checks our option too, in the driver, before Ray and any worker start.
   Without it the option is checked when the first worker has loaded its model.
2. `verl.utils.tracking.Tracking.__init__` and `.log`: our metrics are added to a step's, and the draft heads of the
   engines are refreshed between steps. verl has no way to add metrics (it collects speculation's only for MTP heads),
   and no call at the end of a step; its logger begins when the engines are there, before the first rollout.
3. `BucketedWeightSender._init_socket` and `.async_send_weights`: a time limit. When an engine fails in a weight update,
   verl's sender waits for its answer for ever.

Nothing is replaced twice; 2 and 3 only in processes of a job that uses our option. Imports are late, because verl loads
this in every process of every job.
"""

from __future__ import annotations

import functools
import os
from typing import Any


def check_early() -> None:
    """Override 1, and a sentence for who looks for a rollout of our name."""
    from verl.utils import config as module

    original = module.validate_config
    if hasattr(original, "__rollout_spec__"):
        return

    @functools.wraps(original)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        check(config)
        return original(config, *args, **kwargs)

    validate_config.__rollout_spec__ = True  # type: ignore[attr-defined]
    module.validate_config = validate_config


def check(config: Any) -> None:
    """Raises ConfigError if our option is there and wrong. `config`: the trainer's, whole."""
    from hydra.errors import InstantiationException
    from verl.utils.config import omega_conf_to_dataclass

    from rollout_spec.config import ConfigError

    rollout = config.actor_rollout_ref.rollout
    ours = str(rollout.get("_target_")).startswith("rollout_spec_verl.")
    target = "actor_rollout_ref.rollout._target_=rollout_spec_verl.RolloutConfig"
    if rollout.get("name") == "rollout_spec":
        raise ConfigError(f"actor_rollout_ref.rollout.name: is 'rollout_spec'; leave it at vllm and set {target}")
    if "rollout_spec" in rollout and not ours:
        raise ConfigError(f"actor_rollout_ref.rollout.rollout_spec: without effect; set {target}")
    if ours:
        try:
            omega_conf_to_dataclass(rollout)
        except InstantiationException as error:
            # hydra wraps what a dataclass raises; the user is to read the sentence.
            raise error.__cause__ if isinstance(error.__cause__, ConfigError) else error from None


def install(weight_sync_seconds: float) -> None:
    """Overrides 2 and 3."""
    _log_ours()
    if "RANK" in os.environ:  # verl's workers have one; the others send no weights and would import vLLM for nothing
        _limit_weight_sync(weight_sync_seconds)


def _log_ours() -> None:
    from verl.utils.tracking import Tracking

    from rollout_spec_verl import metrics

    init, original = Tracking.__init__, Tracking.log
    if hasattr(original, "__rollout_spec__"):
        return
    collector = metrics.Collector()

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - verl's
        init(self, *args, **kwargs)
        collector.begin()

    @functools.wraps(original)
    def log(self: Any, data: dict[str, Any], step: int, backend: Any = None) -> Any:
        return original(self, {**data, **collector.collect(step)}, step, backend)

    log.__rollout_spec__ = True  # type: ignore[attr-defined]
    Tracking.__init__, Tracking.log = __init__, log


def _limit_weight_sync(seconds: float) -> None:
    from rollout_spec_verl import compat

    compat.require(compat.sender_problems)
    import zmq
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    init, send = BucketedWeightSender._init_socket, BucketedWeightSender.async_send_weights
    if hasattr(send, "__rollout_spec__"):
        return

    @functools.wraps(init)
    def _init_socket(self: Any) -> None:
        init(self)
        self.socket.setsockopt(zmq.RCVTIMEO, int(seconds * 1000))
        self.socket.setsockopt(zmq.SNDTIMEO, int(seconds * 1000))
        self.socket.setsockopt(zmq.LINGER, 0)

    @functools.wraps(send)
    async def async_send_weights(self: Any, weights: Any) -> None:
        try:
            await send(self, weights)
        except zmq.Again as error:
            raise RuntimeError(
                f"rollout_spec: the rollout engine did not take new weights within {seconds:g} s; it has probably "
                "failed in `update_weights_from_ipc`, look for its error above. If it is just slow, raise "
                "actor_rollout_ref.rollout.rollout_spec.weight_sync_seconds"
            ) from error

    async_send_weights.__rollout_spec__ = True  # type: ignore[attr-defined]
    BucketedWeightSender._init_socket = _init_socket
    BucketedWeightSender.async_send_weights = async_send_weights
