"""Is the rejection sampler's expand kernel right on this CPU? And the right one, where it is not.

vLLM 0.31 and 0.32 on CPU: `_expand_kernel_impl` fills an int64 copy of its output and drops it, so temperature,
top-k and top-p of draft tokens are uninitialised memory. Greedy is unaffected; sampled output is biased and its
log-probabilities are NaN. On GPUs the kernel is Triton's and right.
"""

from __future__ import annotations

from typing import Any

import torch


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803 - the kernel's own argument name
) -> None:
    """Write input_val[i] to output[cu[i-1]:cu[i]], `replace_from` replaced by `replace_to`.

    Shapes: output [sum of drafts], input_val and cu_num_tokens [batch].
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(torch.repeat_interleave(values, counts))


def _gives_right_result(kernel: Any) -> bool:
    output = torch.full((6,), -7.0)
    try:
        kernel(output, torch.tensor([1.0, 0.7, 0.0]), torch.tensor([2, 5, 6], dtype=torch.int32), 0, 1)
    except (RuntimeError, TypeError, AttributeError):
        return False
    return torch.allclose(output, torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7, 1.0]))


def kernel_is_right() -> bool:
    """The kernel that vLLM's CPU platform registers expands correctly; True where it is not used."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return True
    from vllm.utils import cpu_triton_utils

    return _gives_right_result(cpu_triton_utils._expand_kernel_impl)


def sampler_in_force_is_right() -> bool:
    """The expansion as the rejection sampler of this process performs it. Call in a worker, after its start."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    device = "cpu" if current_platform.is_cpu() else current_platform.device_type
    out = rejection_sampler.expand_batch_to_tokens(
        torch.tensor([1.0, 0.7, 0.0], device=device),
        torch.tensor([2, 5, 6], dtype=torch.int32, device=device),
        6,
        replace_from=0,
        replace_to=1,
    )
    return torch.allclose(out.cpu(), torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7, 1.0]))
