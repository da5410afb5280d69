"""Run a scenario with engines in a fresh process, and make the engine for it.

vLLM 0.31 cannot start a second n-gram engine in one process on CPU (its kernel registry trips over numba), and an
engine that leaks must not disturb the next test.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rollout_spec.config import parse_config
from rollout_spec.rollout.worker import RolloutWorker

Result = TypeVar("Result")


def run_fresh(scenario: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """The scenario's result, computed in a spawned process; its exceptions are raised here."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(scenario, *arguments, **options).result()


@contextmanager
def engine(model: Path, arguments: dict[str, Any] | None = None, **options: Any) -> Iterator[RolloutWorker]:
    """A worker for the time of the block. `options` are `group__option=value` of the configuration."""
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
    with RolloutWorker(parse_config(tree), arguments=arguments) as worker:
        yield worker


def scheduler_of(worker: RolloutWorker) -> Any:
    """The scheduler of an in-process engine."""
    return worker._engine.engine_core.engine_core.scheduler
