"""verl's training loop on a machine without a GPU: for tests, examples and the curious. Not for training anything big.

verl has no CPU platform. `platform` registers one through verl's own registry and papers over what verl takes for
granted of a GPU; `worker_extension` lets vLLM's CPU workers take new weights. Neither is needed, or used, on a GPU.

    export $(python -m rollout_spec_verl.cpu)
    python -m verl.trainer.main_ppo --config-dir configs/verl --config-name cpu ...

Limits: one process a node, FSDP2 only, no sleep mode, gloo.
"""

from __future__ import annotations

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # The plug-in too, which a checkout that is not installed has no entry point for.
    "VERL_USE_EXTERNAL_MODULES": "rollout_spec_verl.plugin,rollout_spec_verl.cpu.platform",
    "VERL_ENGINE_DEVICE": "cuda",  # verl's FSDP engines are registered for cuda and npu only
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Several processes share the cores: spinning threads would take them from each other.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # Else Ray begins with an idle process for each of its processors, of which it is told more than there are.
    "RAY_prestart_worker_first_driver": "0",
}
