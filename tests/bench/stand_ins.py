"""Mains of an engine's process, without an engine. By themselves: the process that runs them imports little."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

from synthetic import make_run

from rollout_spec.bench.arms import ArmSpec
from rollout_spec.config import Config

# A run of this number fails.
BROKEN = 99


def answers(connection: Connection, config: Config, arm: ArmSpec, log: str, trace: Path | None) -> None:
    Path(log).write_text("a log")
    connection.send(("ready", None))
    while True:
        command, *arguments = connection.recv()
        if command == "close":
            return
        if command == "warm_up":
            connection.send(("done", None))
        elif command == "call":
            function, values = arguments
            connection.send(("result", function(*values)))
        elif arguments[1] == BROKEN:
            connection.send(("error", "ValueError: no memory"))
        else:
            for finished in (3, 1, 1):
                connection.send(("finished", finished))
            connection.send(("run", make_run(lambda live: 0, arguments[1])))


def dies_at_start(connection: Connection, config: Config, arm: ArmSpec, log: str, trace: Path | None) -> None:
    os._exit(3)
