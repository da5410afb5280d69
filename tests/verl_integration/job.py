"""A small GRPO job: two steps of `python -m verl.trainer.main_ppo` on this CPU, in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 480
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # The plug-in by name too: an editable install of an older revision does not know it.
    "VERL_USE_EXTERNAL_MODULES": "rollout_spec_verl.plugin,rollout_spec_verl.cpu.platform",
    "VERL_ENGINE_DEVICE": "cuda",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Several processes share the cores: spinning threads would take them from each other.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
}


def run(folder: Path, model: Path, overrides: Iterable[str] = (), seconds: float = SECONDS) -> tuple[int, str]:
    """Exit status and output of the job; `folder` gets its data."""
    write_data(folder)
    command = [
        sys.executable,
        *("-W", "ignore", "-m", "verl.trainer.main_ppo"),
        *("--config-dir", str(ROOT / "configs/verl"), "--config-name", "cpu"),
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        f"actor_rollout_ref.model.path={model}",
        f"reward.custom_reward_function.path={Path(__file__).parent}/reward.py",
        f"trainer.default_local_dir={folder}/checkpoints",
        *overrides,
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")])
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
            start_new_session=True,  # with Ray's processes in it, so that they can be ended together
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)
    return status, log.read_text(errors="replace")


def steps(output: str) -> list[dict[str, float]]:
    """verl's console metrics, a dictionary a step."""
    found = []
    for line in output.splitlines():
        if match := re.search(r"step:\d+ - (.*)", line):
            pairs = (pair.rsplit(":", 1) for pair in match.group(1).split(" - "))
            found.append({name: number(value) for name, value in pairs})
    return found


def number(text: str) -> float:
    """`np.float64(1.5)` and `1.5` alike."""
    match = re.search(r"-?(nan|inf|\d[\d.]*(e[-+]?\d+)?)", text.replace("np.float64", "").replace("np.int64", ""))
    return float(match.group()) if match else float("nan")


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
