from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PRINT = "from rollout_spec.precision import cpu_dtype; print(cpu_dtype())"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch's lesser capabilities are those of x86 processors")
@pytest.mark.parametrize("lesser", ["default", "avx2"])
def test_float32_on_a_processor_without_wide_vectors(lesser: str) -> None:
    """ATEN_CPU_CAPABILITY is torch's own switch for taking this processor for a lesser one."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": lesser}
    done = subprocess.run([sys.executable, "-c", PRINT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "torch.float32"
