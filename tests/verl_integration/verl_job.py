"""A small GRPO job: `python -m verl.trainer.main_ppo` on this CPU, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from rollout_spec_verl.cpu import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 480


def run(
    folder: Path, model: Path, overrides: Iterable[str] = (), environment: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, str]:
    """Exit status (-1: it took too long) and output of the job; `folder` gets its data and its metrics.

    Ray gives its node 30 s to start, whatever else the machine does: that is tried once more.
    """
    overrides = list(overrides)
    status, output = _once(folder, model, overrides, environment)
    if "node timed out during startup" in output:
        status, output = _once(folder, model, overrides, environment)
    return status, output


def _once(folder: Path, model: Path, overrides: list[str], environment: Mapping[str, str]) -> tuple[int, str]:
    write_data(folder)
    (folder / "metrics.jsonl").unlink(missing_ok=True)  # of a job before
    command = [
        sys.executable,
        *("-W", "ignore", "-m", "verl.trainer.main_ppo"),
        *("--config-dir", str(ROOT / "configs/verl"), "--config-name", "cpu"),
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"actor_rollout_ref.model.path={model}",
        f"reward.custom_reward_function.path={Path(__file__).parent}/reward.py",
        f"trainer.default_local_dir={folder}/checkpoints",
        "trainer.logger=[console,file]",
        *overrides,
    ]
    here = Path(__file__).parent
    path = os.pathsep.join([*map(str, (ROOT, ROOT / "integrations", here)), os.environ.get("PYTHONPATH", "")])
    # With vLLM's worker in the process of its engine core there is one process less that imports everything.
    fewer = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    quiet = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1"}
    # Many processes import the same thousands of modules, which not every installer compiles: once for all jobs.
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder.parent / "compiled")}
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={
                **os.environ,
                **ENVIRONMENT,
                **quiet,
                **fewer,
                **compiled,
                **environment,
                "PYTHONPATH": path,
                "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
            },
            start_new_session=True,  # with Ray's processes in it, so that they can be ended together
        )
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)
    return status, log.read_text(errors="replace")


def steps(folder: Path) -> list[dict[str, float]]:
    """What verl's logger has of each step."""
    file = folder / "metrics.jsonl"
    return [json.loads(line)["data"] for line in file.read_text().splitlines()] if file.exists() else []


def write_data(folder: Path) -> None:
    import pandas

    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"Count to {number}."}],
            "ability": "count",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number, "split": "train"},
        }
        for number in range(16)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:4]).to_parquet(folder / "val.parquet")
