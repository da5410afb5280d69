"""Processes of their own for engines."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from rollout_spec.rollout.recording import in_process

ENDLESS = """
import time, psutil
from rollout_spec.rollout.recording import in_process

if __name__ == "__main__":
    show = lambda: print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    in_process(time.sleep, 600, on_look=show)
"""


def test_a_process_gives_its_result_and_its_errors() -> None:
    assert in_process(abs, -3) == 3
    with pytest.raises(ZeroDivisionError):
        in_process(divmod, 1, 0)


def test_a_process_ends_with_a_caller_that_is_killed(tmp_path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    caller = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    children = [psutil.Process(int(pid)) for pid in caller.stdout.readline().split()]
    assert children
    caller.kill()
    caller.wait()
    deadline = time.monotonic() + 60
    while not all(ended(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ended(process: psutil.Process) -> bool:
    """Also where nobody collects what it left."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
