from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollout_spec_verl.metrics import read_here

from rollout_spec.engine.control_loop import SETTINGS_KEY


def server(status_file: str | None) -> Any:
    """As far as a server is asked: its rollout configuration."""
    settings = None if status_file is None else {"additional_config": {SETTINGS_KEY: {"status_file": status_file}}}
    return SimpleNamespace(config=SimpleNamespace(engine_kwargs={"vllm": settings}))


def test_a_server_reads_its_own_engines_and_no_others(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for pid in (os.getpid(), child.pid, 1):
            (tmp_path / f"{pid}.json").write_text(json.dumps({"pid": pid}))
        found = read_here(server(f"{tmp_path}/{{pid}}.json"))
    finally:
        child.communicate(b"\n")
    assert sorted(status["pid"] for status in found.values()) == sorted([os.getpid(), child.pid])


def test_a_server_without_our_option_has_nothing_to_say() -> None:
    assert read_here(server(None)) == {}
