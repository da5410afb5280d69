"""verl's training loop on a machine without a GPU: for tests, examples and the curious. Not for training anything big.

verl has no CPU platform. `platform` registers one through verl's own registry and papers over what verl takes for
granted of a GPU; `worker_extension` lets vLLM's CPU workers take new weights. Neither is needed, or used, on a GPU.

    VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=rollout_spec_verl.cpu.platform python -m verl.trainer.main_ppo ...

with the options of configs/verl/cpu.yaml. Limits: one process a node, FSDP2 only, no sleep mode, gloo.
"""
