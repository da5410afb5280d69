"""From our configuration to vLLM's engine arguments, and the engine itself."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from rollout_spec.config import DRAFT_HEADS, Config, ConfigError, DrafterConfig, PolicyConfig
from rollout_spec.engine.control_loop import SETTINGS_KEY
from rollout_spec.engine.identity import load_profile
from rollout_spec.model import resolve
from rollout_spec.simulate.acceptance_curve import AcceptanceCurve

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

GIB = 2**30

logger = logging.getLogger("vllm.rollout_spec")


def speculative_config(drafter: DrafterConfig) -> dict[str, Any]:
    """vLLM's `speculative_config` for a drafter."""
    spec: dict[str, Any] = {"method": drafter.method, "num_speculative_tokens": drafter.k_max}
    if drafter.model is not None:
        spec["model"] = str(resolve(drafter.model))
    if drafter.method == "ngram":
        spec |= {"prompt_lookup_min": drafter.prompt_lookup_min, "prompt_lookup_max": drafter.prompt_lookup_max}
    if drafter.sampling != "auto":
        spec["draft_sample_method"] = drafter.sampling
    elif drafter.method in DRAFT_HEADS and drafter.synthetic_acceptance is None:
        spec["draft_sample_method"] = "probabilistic"
    if drafter.method in DRAFT_HEADS and drafter.model is not None:
        # Else the target's load format holds for the head too: with verl's `dummy` it would stay random.
        spec["draft_load_config"] = {"load_format": "auto"}
    if drafter.synthetic_acceptance is not None:
        rates = AcceptanceCurve.from_positions(drafter.synthetic_acceptance, drafter.k_max).survival
        spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates)}
    return spec | drafter.extra


def engine_arguments(
    config: Config,
    *,
    drafter: DrafterConfig | None,
    policy: PolicyConfig | None,
    vllm_table: list[tuple[int, int, int]] | None = None,
) -> dict[str, Any]:
    """Keyword arguments for vLLM's `EngineArgs`.

    drafter None: no speculation at all. policy None: vLLM's own scheduler, with the drafter's k_max as its fixed
    K, or with `vllm_table` as its `num_speculative_tokens_per_batch_size`. Otherwise: our scheduler plug-in.
    """
    engine = config.engine
    arguments: dict[str, Any] = {
        "model": str(resolve(config.model)),
        "dtype": engine.dtype,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enforce_eager": engine.enforce_eager,
        "seed": engine.seed,
        # The law that sampled, after temperature, top-k and top-p: what a trainer's importance ratio needs.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rollout_spec.engine.worker_extension.WorkerExtension",
    }
    if engine.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = engine.max_num_batched_tokens
    if engine.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_gib * GIB)
    if drafter is not None and policy is not None:
        arguments |= plugin_arguments(drafter, policy, not engine.enforce_eager, engine.max_num_seqs)
    elif drafter is not None:
        arguments["speculative_config"] = speculative_config(drafter)
        if vllm_table is not None:
            table = [list(row) for row in vllm_table]
            arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = table
        # Without our policy it is vLLM as it comes, what it does at K=0 included.
        arguments["additional_config"] = {SETTINGS_KEY: drafter_settings(drafter) | {"draft_buffer_mib": 0}}
    if drafter is not None and _has_request_metrics():
        arguments["per_request_spec_decode_metrics"] = "summary"
    return arguments | engine.extra


def plugin_arguments(drafter: DrafterConfig, policy: PolicyConfig, graphs: bool, max_num_seqs: int) -> dict[str, Any]:
    """The engine arguments that make a vLLM ours, whoever starts it: drafter, scheduler plug-in and settings.

    graphs: the engine captures CUDA graphs, so it has to know every K.
    """
    spec = speculative_config(drafter)
    if graphs:
        # Read in vLLM, not run here: its table makes it capture CUDA graphs for every K it names.
        spec["num_speculative_tokens_per_batch_size"] = every_k(drafter.k_max, max_num_seqs)
    settings = drafter_settings(drafter) | {"policy": policy.model_dump(exclude_none=True)}
    return {
        "speculative_config": spec,
        "scheduler_cls": "rollout_spec.engine.scheduler.dynamic_scheduler",
        "additional_config": {SETTINGS_KEY: settings},
    }


def drafter_settings(drafter: DrafterConfig) -> dict[str, Any]:
    """What our drafters read from `additional_config`."""
    return {"suffix": drafter.suffix.model_dump(), "draft_buffer_mib": drafter.draft_buffer_mib}


def every_k(k_max: int, max_num_seqs: int) -> list[list[int]]:
    """A table in vLLM's format that names each K from k_max down to 0, as far as there are batch sizes."""
    rows = min(k_max + 1, max_num_seqs)
    table = [[batch, batch, max(k_max + 1 - batch, 0)] for batch in range(1, rows + 1)]
    table[-1][1] = max_num_seqs
    return table


def make_engine(config: Config, arguments: dict[str, Any], stat_loggers: list[Any] | None = None) -> LLMEngine:
    """Start vLLM. The only place that does; registers the overrides in this process too.

    Raises ConfigError when vLLM refuses the arguments, IncompatibleVLLM when it changed where we rely on it.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if config.engine.in_process else "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.abstract import Executor

    from rollout_spec.engine import overrides

    spec = arguments.get("speculative_config", {})
    settings = arguments.get("additional_config", {}).get(SETTINGS_KEY, {})
    overrides.require(
        spec.get("method"),
        synthetic=spec.get("rejection_sample_method") == "synthetic",
        deferring=settings.get("draft_buffer_mib") != 0,
    )
    try:
        vllm_config = EngineArgs(**arguments | _dtype(arguments)).create_engine_config()
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"vLLM refuses the engine arguments: {error}") from error
    profile = (vllm_config.additional_config or {}).get(SETTINGS_KEY, {}).get("policy", {}).get("profile")
    if profile is not None:
        load_profile(profile, vllm_config)  # here too, since an engine core in its own process hides its errors
    return LLMEngine(
        vllm_config,
        executor_class=Executor.get_class(vllm_config),
        log_stats=True,
        stat_loggers=stat_loggers,
        multiprocess_mode=not config.engine.in_process,
    )


def _dtype(arguments: dict[str, Any]) -> dict[str, Any]:
    """`auto` is vLLM's, the model's own precision, save on a processor that is slow in bfloat16."""
    import torch
    from vllm.platforms import current_platform

    from rollout_spec.precision import cpu_dtype

    if arguments.get("dtype", "auto") != "auto" or not current_platform.is_cpu() or cpu_dtype() == torch.bfloat16:
        return {}
    logger.warning("engine.dtype auto: float32, because this processor is slow in bfloat16")
    return {"dtype": "float32"}


def _has_request_metrics() -> bool:
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    return any(field.name == "per_request_spec_decode_metrics" for field in fields(EngineArgs))
