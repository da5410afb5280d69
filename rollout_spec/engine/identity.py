"""What makes step times those of one engine: a profile is only good for the engine that it was measured on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec import provenance
from rollout_spec.config import ConfigError
from rollout_spec.control.registry import load_step_times
from rollout_spec.control.step_times import StepTimes
from rollout_spec.engine.compat import vllm_version
from rollout_spec.engine.prior import WITHOUT_MODEL

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def identity(config: VllmConfig) -> dict[str, str]:
    """What step times depend on, in words. Weights are not part of it: they change with every policy update."""
    model, parallel, spec = config.model_config, config.parallel_config, config.speculative_config
    drafter = "none"
    if spec is not None:
        draft = getattr(spec, "draft_model_config", None)
        has_model = spec.method not in WITHOUT_MODEL and draft is not None
        drafter = f"{spec.method}, {_shape(draft)}" if has_model else str(spec.method)
    return {
        "model": _shape(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or "none"),
        "parallel": f"tensor {parallel.tensor_parallel_size}, pipeline {parallel.pipeline_parallel_size}",
        "execution": "eager" if model.enforce_eager else "graphs",
        "drafter": drafter,
        "device": _device(),
        "vllm": vllm_version() or "unknown",
    }


def load_profile(path: str, config: VllmConfig) -> StepTimes:
    """The step times of a profile, for this engine; ConfigError if it cannot be read or is another engine's.

    A bare table of step times names no engine and is taken at its word.
    """
    times = load_step_times(path)
    measured: dict[str, str] = json.loads(Path(path).read_text("utf-8")).get("engine", {})
    here = identity(config)
    other = [
        f"{key} {measured[key]!r}, here {here[key]!r}" for key in here if measured.get(key, here[key]) != here[key]
    ]
    if other:
        raise ConfigError(
            f"policy.profile {path}: was measured on another engine ({'; '.join(other)}); "
            "measure this one with `rollout-spec profile`, or leave policy.profile out"
        )
    return times


def _shape(model: Any) -> str:
    text = model.hf_text_config
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_experts", "num_local_experts", "vocab_size")
    sizes = ", ".join(f"{name} {getattr(text, name)}" for name in names if getattr(text, name, None))
    return f"{(model.architectures or ['unknown'])[0]}: {sizes}"


def _device() -> str:
    from vllm.platforms import current_platform

    device = provenance.device()
    if current_platform.is_cpu():
        return f"{device['cpu']}, {device['cores']} cores"
    return str(current_platform.get_device_name())
