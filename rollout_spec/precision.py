"""In which precision this machine's processor multiplies matrices fast."""

from __future__ import annotations

import torch

# What torch may use of an x86 processor without AVX-512, whose bfloat16 products oneDNN does not have either.
WITHOUT_BFLOAT16 = ("DEFAULT", "AVX2")


def cpu_dtype() -> torch.dtype:
    """bfloat16, or float32 where the processor has no wide enough vectors for it.

    There a product in bfloat16 is made element by element: [512, 576] x [576, 1536] took 791 ms on a core of an AVX2
    EPYC, and 13 ms in float32.
    """
    return torch.float32 if torch.backends.cpu.get_cpu_capability() in WITHOUT_BFLOAT16 else torch.bfloat16
