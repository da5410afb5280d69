"""Step times to start from where none were measured: the roofline of a known GPU, for the model that vLLM serves.

Read from vLLM's configuration: sizes of the layers, experts, precision, tensor parallelism and drafter. A controller
that starts from it has the right order of magnitude at its first step, and corrects it by what it measures. Where
anything is unknown or unusual (another device, linear attention, pipelines, a quantisation not listed here) there is no
prior: a wrong one would be believed for longer than none.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rollout_spec.config import ConfigError
from rollout_spec.control.step_times import StepTimes
from rollout_spec.simulate import roofline
from rollout_spec.simulate.step_model import Analytic, steady, tabulate

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.rollout_spec")

# Computed, not measured: peaks, efficiencies and host time each may be off by a tenth or two.
SPREAD = 0.3
# Policies that reckon with step times.
FOR_POLICIES = ("goodput", "budget")
# Figures in hardware.json are of the SXM boards; these have less of everything.
OTHER_BOARDS = ("PCIE", "NVL", "MIG")
# Fields of architectures that are not a stack of attention and feed-forward layers alike.
UNUSUAL = (
    "attn_layer_period", "block_configs", "hybrid_override_pattern", "interleave_moe_layer_step", "layers_block_type",
    "linear_num_value_heads", "mamba_d_state", "moe_latent_size", "ssm_state_size",
)  # fmt: skip
USUAL_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# With these the feed-forward layer has two matrices, with a gate three.
UNGATED = {"relu", "relu2", "gelu", "gelu_new", "gelu_fast"}
# Experts, those a token uses, and those that all tokens use: the names of Qwen, Mixtral, DeepSeek, gpt-oss, Ernie.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_A_TOKEN = ("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk")
SHARED_EXPERTS = ("n_shared_experts", "moe_num_shared_experts")
# Bytes of a weight by quantisation method: 4-bit formats have a scale to each group.
FOUR_BITS = 0.55
WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")


class _DoubtError(Exception):
    """Why there is no prior, as a user reads it."""


class _Precision(NamedTuple):
    weight_bytes: float
    compute_bytes: float
    """2: matrices are multiplied in 16 bits; 1: in 8."""


def roofline_prior(config: VllmConfig, k_max: int) -> StepTimes | None:
    """Step times of this engine for K = 0 .. k_max, or None; says in the log which. Never raises."""
    try:
        from vllm.platforms import current_platform

        name = "CPU" if current_platform.is_cpu() else str(current_platform.get_device_name())
        times = times_on(name, config, k_max)
    except Exception as error:  # no prior costs some steps; an exception would cost the engine
        logger.warning("rollout_spec: no step times to start from, the roofline fails: %s", error or repr(error))
        return None
    if times is None:
        logger.info("rollout_spec: starts from nothing, %s has no figures in hardware.json", name)
    else:
        logger.info("rollout_spec: starts from the roofline of %s; a profile would be better", name)
    return times


def times_on(device_name: str, config: VllmConfig, k_max: int) -> StepTimes | None:
    """As `roofline_prior`, on a device by the name that its driver gives; None for an unknown device.

    Raises whatever an unusual configuration leads to.
    """
    precision = _precision(config)
    device = _device(device_name, precision.compute_bytes)
    if device is None:
        return None
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise _DoubtError("pipeline parallelism is not modelled")
    gpus = parallel.tensor_parallel_size
    model = roofline.step_model(
        device,
        model_of(config.model_config.hf_text_config, gpus),
        drafter_of(config),
        gpus,
        weight_bytes=precision.weight_bytes,
        kv_bytes=1.0 if "fp8" in str(config.cache_config.cache_dtype) else 2.0,
    )
    longest = int(config.model_config.max_model_len)
    times = tabulate(model, _batches(config.scheduler_config.max_num_seqs), k_max, [0, longest], SPREAD)
    return replace(times, draft_share=_draft_share(model, k_max))


def model_of(text: Any, gpus: int = 1) -> roofline.Model:
    """Sizes of a language model from its Hugging Face configuration. Raises where something is missing or unusual.

    Parameters are those a step reads: all but the table of input embeddings. Keys and values are per GPU times `gpus`.
    """
    layer_types = set(getattr(text, "layer_types", None) or ())
    unusual = [name for name in UNUSUAL if getattr(text, name, None)] + sorted(layer_types - USUAL_LAYERS)
    if unusual:
        raise _DoubtError(f"an architecture with {', '.join(unusual)} is not modelled")
    hidden, layers, vocab = text.hidden_size, text.num_hidden_layers, text.vocab_size
    matrices = 2 if (getattr(text, "hidden_act", None) or "silu") in UNGATED else 3
    experts = int(_first(text, EXPERTS, 0))
    used, sparse, shared, routed = 1, 0, 0.0, 0.0
    if experts > 1:
        used, sparse = int(_first(text, EXPERTS_A_TOKEN)), _sparse_layers(text)
        width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
        common = getattr(text, "shared_expert_intermediate_size", None) or width * int(_first(text, SHARED_EXPERTS, 0))
        routed = float(experts * matrices * hidden * width)
        shared = float(matrices * hidden * common + hidden * experts)
    dense = 0.0 if sparse == layers else float((layers - sparse) * matrices * hidden * text.intermediate_size)
    every_token = layers * _attention(text) + dense + sparse * shared + vocab * hidden
    latent = getattr(text, "kv_lora_rank", None)
    # Multi-head latent attention keeps one latent a token, on every GPU; few heads are copied to every GPU, too.
    kv_heads = gpus if latent else max(_kv_heads(text), gpus)
    return roofline.Model(
        params=every_token + sparse * routed,
        active_params=every_token + sparse * routed * used / max(experts, 1),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=(latent + text.qk_rope_head_dim) // 2 if latent else _head_dim(text),
        vocab=vocab,
        experts=max(experts, 1),
        experts_a_token=used,
    )


def drafter_of(config: VllmConfig) -> roofline.Drafter:
    """What a draft token costs: nothing to read (n-gram, suffix), a model, or one layer of the target and the head."""
    spec, text = config.speculative_config, config.model_config.hf_text_config
    method = str(spec.method)
    if method in WITHOUT_MODEL:
        return roofline.Drafter()
    own = getattr(spec, "draft_model_config", None)
    draft_gpus = getattr(getattr(spec, "draft_parallel_config", None), "tensor_parallel_size", None)
    sharded = draft_gpus in (None, config.parallel_config.tensor_parallel_size)
    if method == "draft_model" and own is not None:
        draft = model_of(own.hf_text_config)
        return _drafter(draft.active_params, draft.layers, sharded)
    if method not in ("eagle", "eagle3", "medusa") and not method.endswith("mtp"):
        raise _DoubtError(f"the drafter {method!r} is not modelled")
    target = model_of(text)
    head = text.vocab_size * text.hidden_size
    layer = (target.active_params - head) / target.layers
    # Eagle 3 may draft from a smaller vocabulary.
    vocab = getattr(getattr(own, "hf_config", None), "draft_vocab_size", None) or text.vocab_size
    return _drafter(layer + vocab * text.hidden_size, 1, sharded)


def _drafter(params: float, layers: int, sharded: bool) -> roofline.Drafter:
    launches = layers * roofline.LAYER_SECONDS
    return roofline.Drafter(params, roofline.Drafter().pass_seconds + launches, sharded)


def _device(name: str, compute_bytes: float) -> roofline.Device | None:
    """Figures of the device that a driver calls `name`, such as "NVIDIA H100 80GB HBM3"."""
    words = re.findall(r"\w+", name.upper())
    if any(word in OTHER_BOARDS for word in words):
        return None
    for word in words:
        try:
            return roofline.device(word, compute_bytes)
        except ConfigError:
            continue
    return None


def _precision(config: VllmConfig) -> _Precision:
    model = config.model_config
    if model.dtype.itemsize != 2:
        raise _DoubtError(f"dtype {model.dtype} is not modelled")
    method = model.quantization
    if method is None:
        return _Precision(2.0, 2.0)
    method = str(method).lower()
    details = getattr(model.hf_config, "quantization_config", None) or {}
    groups = list((details.get("config_groups") or {}).values())
    if groups:  # compressed tensors
        bits = int(groups[0]["weights"]["num_bits"])
        activations = (groups[0].get("input_activations") or {}).get("num_bits", 16)
        return _Precision(FOUR_BITS if bits == 4 else bits / 8.0, 1.0 if activations <= 8 else 2.0)
    if "fp4" in method or details.get("bits") == 4 or method.startswith("awq"):
        return _Precision(FOUR_BITS, 2.0)
    if "fp8" in method:
        return _Precision(1.0, 1.0)
    if details.get("bits") == 8:
        return _Precision(1.0, 2.0)
    raise _DoubtError(f"quantization {method!r} is not modelled")


def _attention(text: Any) -> float:
    """Parameters of one attention layer."""
    hidden, heads = text.hidden_size, text.num_attention_heads
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        rope, nope, value = text.qk_rope_head_dim, text.qk_nope_head_dim, text.v_head_dim
        low = getattr(text, "q_lora_rank", None)
        query = low * (hidden + heads * (nope + rope)) if low else hidden * heads * (nope + rope)
        return float(query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden)
    return float(2 * hidden * (heads + _kv_heads(text)) * _head_dim(text))


def _kv_heads(text: Any) -> int:
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def _head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _sparse_layers(text: Any) -> int:
    """Layers that have experts."""
    frequency = getattr(text, "moe_layer_freq", None)
    if isinstance(frequency, list | tuple):  # one flag a layer
        return sum(map(bool, frequency))
    first = getattr(text, "first_k_dense_replace", None) or 0
    step = getattr(text, "decoder_sparse_step", None) or frequency or 1
    dense = getattr(text, "mlp_only_layers", None) or ()
    return sum(i >= first and (i + 1) % step == 0 and i not in dense for i in range(text.num_hidden_layers))


def _first(text: Any, names: tuple[str, ...], default: int | None = None) -> Any:
    for name in names:
        value = getattr(text, name, None)
        if value is not None:
            return value
    if default is None:
        raise _DoubtError(f"none of {', '.join(names)} is in the model's configuration")
    return default


def _batches(most: int) -> list[int]:
    """Powers of two and half-way between, up to a full batch."""
    steps = {1 << i for i in range(most.bit_length())} | {3 << i for i in range(max(most.bit_length() - 1, 0))}
    return sorted({step for step in steps if step < most} | {most})


def _draft_share(model: Analytic, k_max: int) -> float:
    """Of what K > 0 adds to a step, the part that drafting is; in the middle of the range where K matters."""
    batch, k = 32.0, max(k_max // 2, 1)
    times = steady(model, np.array(batch), np.array(0.0), k)
    drafting = k * (model.draft_pass + model.draft_token * batch)
    return float(min(max(drafting / (times[k] - times[0]), 0.0), 1.0))
