"""`vllm.general_plugins` entry point: vLLM calls `register` in every process it starts, before a worker is built."""

from __future__ import annotations

import logging
import os

from rollout_spec.engine import overrides

logger = logging.getLogger("vllm.rollout_spec")


def register() -> None:
    """Put the overrides in place; idempotent. Without our settings in `additional_config` they change nothing.

    This runs in every vLLM of a machine that has our package. Where vLLM changed, it is logged here; an engine that
    carries our settings refuses to start (`overrides.require`), and all others must not notice.
    """
    needed = [overrides.fix_cpu_expand_kernel, overrides.offer_suffix_drafter, overrides.offer_deferring_eagle]
    if overrides.SYNTHETIC_ENV in os.environ:
        needed.append(overrides.allow_synthetic_acceptance)
    for override in needed:
        try:
            override()
        except overrides.IncompatibleVLLM as error:
            logger.error("rollout_spec: %s", error)
