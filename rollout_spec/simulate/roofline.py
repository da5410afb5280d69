"""Step times from first principles: published peaks of a device, the size of a model, stated efficiencies.

A prior, not a measurement. What decides K is how many tokens a step may have before computing takes longer than
reading the weights; that follows from a device's peak and bandwidth and hardly from the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from rollout_spec.config import ConfigError
from rollout_spec.simulate.step_model import Analytic

# Of the published peaks, what is reached in practice. Assumed; a profile replaces them. The first, and no overlap of
# reading and computing (sharpness 1), were chosen so that the published 70B table comes out within 10 %
# (experiments/published); large kernels alone reach more.
COMPUTE_EFFICIENCY = 0.4
BANDWIDTH_EFFICIENCY = 0.8
SHARPNESS = 1.0
# Host and sampling of a step, and launching one layer from a captured graph. Assumed.
HOST_SECONDS = 5e-4
LAYER_SECONDS = 3e-6
# Latency of one all-reduce of small tensors over NVLink; two a layer when there is more than one GPU. Assumed.
ALL_REDUCE_SECONDS = 8e-6


@dataclass(frozen=True, slots=True)
class Device:
    flops: float
    """Peak a second, dense, at the precision used."""
    bandwidth: float
    """Bytes a second."""
    memory: float
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Model:
    params: float
    active_params: float
    """Parameters that one token uses; equal to `params` if dense."""
    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 1
    experts_a_token: int = 1

    @property
    def expert_params(self) -> float:
        """All experts together: active = shared + experts * share, total = shared + experts."""
        if self.experts == 1:
            return 0.0
        return (self.params - self.active_params) / (1.0 - self.experts_a_token / self.experts)


@dataclass(frozen=True, slots=True)
class Drafter:
    params: float = 0.0
    """Parameters read for each draft token; 0: no model (n-gram, suffix)."""
    pass_seconds: float = 5e-5
    """Launches and host work of one draft token, whatever the batch."""
    sharded: bool = True
    """Spread over the replica's GPUs like the target; otherwise each GPU reads all of it."""


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(files(__package__).joinpath("hardware.json").read_text("utf-8"))
    return data


def device(name: str, precision_bytes: float = 2.0) -> Device:
    """A device by name at bf16 (2 bytes) or fp8 (1 byte); ConfigError for one that is not in hardware.json."""
    rows = _data()["devices"]
    if name not in rows:
        raise ConfigError(f"simulate.device {name!r}: no such device; choose one of {', '.join(rows)}")
    row = rows[name]
    tflops = row["bf16_tflops"] if precision_bytes >= 2 else row["fp8_tflops"]
    return Device(tflops * 1e12, row["bandwidth_tb_s"] * 1e12, row["memory_gb"] * 1e9)


def model(name: str) -> Model:
    """A model by name; ConfigError for one that is not in hardware.json."""
    rows = _data()["models"]
    if name not in rows:
        raise ConfigError(f"simulate.model {name!r}: no such model; choose one of {', '.join(rows)}")
    row = {key: value for key, value in rows[name].items() if key != "source"}
    return Model(params=row.pop("params_b") * 1e9, active_params=row.pop("active_params_b") * 1e9, **row)


def step_model(
    gpu: Device,
    target: Model,
    drafter: Drafter,
    gpus: int = 1,
    weight_bytes: float = 2.0,
    kv_bytes: float = 2.0,
    compute_efficiency: float = COMPUTE_EFFICIENCY,
    bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY,
    sharpness: float = SHARPNESS,
) -> Analytic:
    """Seconds of a step of `target` on `gpus` devices with tensor parallelism."""
    bandwidth = gpu.bandwidth * bandwidth_efficiency
    flops = gpu.flops * compute_efficiency
    expert_bytes = target.expert_params * weight_bytes
    dense_bytes = target.params * weight_bytes - expert_bytes
    if target.params * weight_bytes > gpus * gpu.memory:
        raise ConfigError(
            f"simulate: {target.params * weight_bytes / 1e9:.0f} GB of weights don't fit {gpus} GPU(s) of "
            f"{gpu.memory / 1e9:.0f} GB; raise gpus_per_replica or lower weight_bytes"
        )
    draft_gpus = gpus if drafter.sharded else 1
    reduce = 2 * target.layers * ALL_REDUCE_SECONDS if gpus > 1 else 0.0
    return Analytic(
        fixed=HOST_SECONDS + target.layers * LAYER_SECONDS + reduce,
        weights=dense_bytes / (gpus * bandwidth),
        token=2.0 * target.active_params / (gpus * flops),
        kv_token=2.0 * target.layers * target.kv_heads * target.head_dim * kv_bytes / (gpus * bandwidth),
        expert_weights=expert_bytes / (gpus * bandwidth),
        experts=target.experts,
        experts_a_token=target.experts_a_token,
        draft_pass=drafter.pass_seconds + drafter.params * 2.0 / (draft_gpus * bandwidth),
        draft_token=2.0 * drafter.params / (draft_gpus * flops),
        verify_fixed=1e-4,
        # Logits in float32 are written and read about three times by the sampler.
        sample_token=3.0 * 4.0 * target.vocab / bandwidth,
        sharpness=sharpness,
    )
