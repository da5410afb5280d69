"""Every place where we replace something of vLLM's, for want of an extension point. All of it is here.

1. `vllm.utils.cpu_triton_utils._expand_kernel_impl`, on CPU and only while it is wrong: see `sampler_check`.
2. `vllm.v1.worker.gpu_model_runner.SuffixDecodingProposer`: the runner constructs this name for method "suffix".
   vLLM's asserts a constant K. Ours is a subclass that becomes active only where an engine carries our settings.
   (`custom_class`, the public way to a drafter of one's own, is told neither K nor the requests.)
3. `vllm.utils.cpu_triton_utils._rejection_greedy_sample_kernel_impl` and `_rejection_random_sample_kernel_impl`, on CPU
   and only for an engine with synthetic acceptance, which they refuse: see `synthetic`. (vLLM's `register_kernels`
   would do after the start, but trips over numba, which n-gram drafting loads.)
4. `vllm.v1.spec_decode.eagle.EagleProposer.__new__`: an engine that carries our settings gets a subclass, which skips
   the draft forward at K=0 and samples in the draft vocabulary: see `draft_cache`. (The runner's name for the class is
   left alone: vLLM asks for instances of it, and means its other subclasses too.)

Each one checks what it relies on and raises `IncompatibleVLLM` with what changed.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

# Set where an engine with synthetic acceptance is to start: the plug-in sees it in that engine's processes.
SYNTHETIC_ENV = "ROLLOUT_SPEC_SYNTHETIC_ACCEPTANCE"

# How to use a head all the same.
WITHOUT = "drafter.draft_buffer_mib=0 does without ours"


class IncompatibleVLLM(RuntimeError):  # noqa: N818 - a state, as a user reads it
    """vLLM changed where we rely on it; the message names the place."""


def require(method: str | None, synthetic: bool = False, deferring: bool = True) -> None:
    """What an engine with this speculative method needs is in place, or IncompatibleVLLM. Idempotent.

    deferring: an EAGLE head does not run while K is 0.
    synthetic: the engine accepts drafts by given chances; processes that vLLM starts from here on are told.
    """
    fix_cpu_expand_kernel()
    if method == "suffix":
        offer_suffix_drafter()
    if deferring and method in ("eagle", "eagle3"):
        offer_deferring_eagle()
    if synthetic:
        os.environ[SYNTHETIC_ENV] = "1"
        allow_synthetic_acceptance()


def fix_cpu_expand_kernel() -> None:
    """Replace the wrong CPU kernel before the platform registers it with the sampler."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.utils import cpu_triton_utils

    from rollout_spec.engine import sampler_check

    if not hasattr(cpu_triton_utils, "_expand_kernel_impl"):
        raise IncompatibleVLLM(
            "vllm.utils.cpu_triton_utils has no _expand_kernel_impl any more: find where the CPU platform registers "
            "rejection_sampler.expand_kernel and whether it is right there"
        )
    if sampler_check.kernel_is_right():
        return
    cpu_triton_utils._expand_kernel_impl = sampler_check.expand


def allow_synthetic_acceptance() -> None:
    """Kernels that accept by chance in place of those that refuse to, before the platform registers them."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.utils import cpu_triton_utils

    from rollout_spec.engine import synthetic

    for kind, ours in (("greedy", synthetic.greedy), ("random", synthetic.random)):
        name = f"_rejection_{kind}_sample_kernel_impl"
        stock = getattr(cpu_triton_utils, name, None)
        if stock is ours:
            continue
        expected = list(inspect.signature(ours).parameters)
        actual = None if stock is None else list(inspect.signature(stock).parameters)
        if actual != expected:
            raise IncompatibleVLLM(f"vllm.utils.cpu_triton_utils.{name} takes {actual}, not {expected}")
        assert stock is not None
        synthetic.STOCK[kind] = stock
        setattr(cpu_triton_utils, name, ours)


def offer_suffix_drafter() -> None:
    """Let the model runner construct our suffix drafter for method "suffix"."""
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer as Stock

    expected = ["self", "num_speculative_tokens", "input_batch", "sampled_token_ids", "slot_mappings"]
    actual = list(inspect.signature(Stock.propose).parameters)
    if actual != expected:
        raise IncompatibleVLLM(f"SuffixDecodingProposer.propose takes {actual}, not {expected}")
    from vllm.v1.worker import gpu_model_runner

    from rollout_spec.engine.suffix import SuffixProposer

    if not hasattr(gpu_model_runner, "SuffixDecodingProposer"):
        raise IncompatibleVLLM("vllm.v1.worker.gpu_model_runner no longer names SuffixDecodingProposer")
    gpu_model_runner.SuffixDecodingProposer = SuffixProposer


def offer_deferring_eagle() -> None:
    """Let the model runner construct our EAGLE drafter in an engine with our settings."""
    from vllm.v1.spec_decode.eagle import EagleProposer as Stock

    from rollout_spec.engine.draft_cache import DeferringEagleProposer as Ours
    from rollout_spec.engine.draft_cache import buffer_bytes

    sampling = ("_sample_draft_tokens", "_sample_from_logits")
    for name in ("__init__", "propose", *(name for name in sampling if hasattr(Stock, sampling[0]))):
        if not hasattr(Stock, name):
            raise IncompatibleVLLM(f"EagleProposer has no {name}, which draft tokens are sampled by; {WITHOUT}")
        expected = list(inspect.signature(getattr(Ours, name)).parameters)
        actual = list(inspect.signature(getattr(Stock, name)).parameters)
        if actual != expected:
            raise IncompatibleVLLM(f"EagleProposer.{name} takes {actual}, not {expected}; {WITHOUT}")
    if not hasattr(Stock, "initialize_attn_backend"):
        raise IncompatibleVLLM(
            f"EagleProposer has no initialize_attn_backend, where ours learns of the cache; {WITHOUT}"
        )

    def new(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(Ours if cls is Stock and buffer_bytes(vllm_config) else cls)

    Stock.__new__ = staticmethod(new)
