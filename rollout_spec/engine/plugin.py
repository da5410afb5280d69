"""`vllm.general_plugins` entry point: vLLM calls `register` in every process it starts, before a worker is built."""

from __future__ import annotations

from rollout_spec.engine import overrides


def register() -> None:
    """Put the overrides in place; idempotent. Without our settings in `additional_config` they change nothing."""
    overrides.fix_cpu_expand_kernel()
    overrides.offer_suffix_drafter()
