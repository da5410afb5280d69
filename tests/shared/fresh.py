"""Run a scenario with engines in a process of its own, and make the engine for it.

vLLM 0.31 cannot start a second n-gram engine in one process on CPU (its kernel registry trips over numba), and an
engine that leaks must not disturb the next test. To import vLLM takes longer than most scenarios do, so each process is
forked from one that has imported it and done nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from rollout_spec.config import parse_config
from rollout_spec.engine.launch import engine_arguments
from rollout_spec.rollout.worker import RolloutWorker

Result = TypeVar("Result")

# Not numba, nor what imports it.
IMPORTED = (
    "rollout_spec.rollout.worker",
    "rollout_spec.engine.overrides",
    "rollout_spec.engine.scheduler",
    "rollout_spec.engine.worker_extension",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.llama_eagle3",
    "compressed_tensors",
    "pytest",
)


def run_fresh(scenario: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """The scenario's result, computed in a new process; its exceptions are raised here."""
    with ProcessPoolExecutor(1, mp_context=_forked()) as pool:
        return pool.submit(scenario, *arguments, **options).result()


@cache
def _forked() -> BaseContext:
    # Read while vLLM is imported; the processes have the environment of now.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


@contextmanager
def engine(
    model: Path, arm: Literal["ours", "stock", "off"] = "ours", compiled: bool = False, **options: Any
) -> Iterator[RolloutWorker]:
    """A worker for the time of the block. `options` are `group__option=value` of the configuration.

    arm stock: vLLM's own scheduler, K the drafter's k_max at every step; off: no drafter. compiled: the small parts of
    vLLM's sampler that it compiles, for samples and log-probabilities, are; it takes some seconds in each process.
    """
    torch.compiler.set_stance("default" if compiled else "force_eager")
    tree: dict[str, Any] = {
        "model": str(model),
        "engine": {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 32, "kv_cache_gib": 0.5},
        "drafter": {"k_max": 5},
    }
    if not (Path(model) / "tokenizer.json").exists():
        tree["engine"]["extra"] = {"skip_tokenizer_init": True}
    for path, value in options.items():
        group, _, option = path.partition("__")
        tree.setdefault(group, {})[option] = value
    config = parse_config(tree)
    drafter, policy = None if arm == "off" else config.drafter, config.policy if arm == "ours" else None
    arguments = engine_arguments(config, drafter=drafter, policy=policy)
    with RolloutWorker(config, arguments=arguments) as worker:
        yield worker


def scheduler_of(worker: RolloutWorker) -> Any:
    """The scheduler of an in-process engine."""
    return worker._engine.engine_core.engine_core.scheduler
