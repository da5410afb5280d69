"""What runs in verl's servers and asks them, without Ray: each server an object, all in one event loop."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_spec_verl import engines
from rollout_spec_verl.engines import RayEngines, announce_here, read_here, take_here

from rollout_spec.engine.control_loop import SETTINGS_KEY


def server(settings: dict[str, Any] | None, node_rank: int = 0, **more: Any) -> Any:
    """As far as a server is asked."""
    vllm = None if settings is None else {"additional_config": {SETTINGS_KEY: settings}}
    return SimpleNamespace(config=SimpleNamespace(engine_kwargs={"vllm": vllm}), node_rank=node_rank, **more)


def test_a_server_reads_its_own_engines_and_no_others(tmp_path: Path) -> None:
    names = {name: f"{tmp_path}/{{pid}}_{name}" for name in ("status_file", "draft_file", "responses_file")}
    response = {"prompt": [1], "response": [2, 3], "temperature": 1.0, "ended": True}
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = (os.getpid(), child.pid)
    try:
        for pid in (*own, 1):
            (tmp_path / f"{pid}_status_file").write_text(json.dumps({"pid": pid}))
            lines = [response, response | {"temperature": 0.0}]
            (tmp_path / f"{pid}_responses_file").write_text("".join(json.dumps(line) + "\n" for line in lines))
        asked = server(names)
        found = read_here(asked)
        announce_here(asked, 3)
        taken = take_here(asked, 1.0, 100)
        bounded = take_here(asked, 1.0, 100)
    finally:
        child.communicate(b"\n")
    assert sorted(status["pid"] for status in found.values()) == sorted(own)
    assert {file.name for file in tmp_path.glob("*_draft_file")} == {f"{pid}_draft_file" for pid in own}
    assert [(one.response, one.temperature) for one in taken] == [([2, 3], 1.0)] * 2
    assert bounded == []


def test_a_server_without_our_option_has_nothing_to_say() -> None:
    assert read_here(server(None)) == {}
    assert take_here(server(None), 1.0, 100) == []


class Engine:
    """`errored` and `collective_rpc` of vLLM's AsyncLLM; `answers` is what a call comes to, or how it fails."""

    def __init__(self, answers: Any) -> None:
        self.errored = False
        self.answers = answers
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        self.calls.append((method, args))
        await asyncio.sleep(0.01)
        if self.answers == "dies":
            self.errored = True
            await asyncio.Event().wait()  # vLLM waits for ever for a core that died
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RayEngines]]:
    """Servers in an event loop of their own, asked in the place of Ray's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def make(*servers: Any) -> RayEngines:
        async def run(function: Any, *args: Any) -> list[Any]:
            return [function(each, *args) for each in servers]

        for each in servers:
            if hasattr(each, "engine"):
                each.engine.output_handler = SimpleNamespace(get_loop=lambda: loop)

        def ask(function: Any, *args: Any) -> list[Any]:
            return asyncio.run_coroutine_threadsafe(run(function, *args), loop).result(10)

        monkeypatch.setattr(engines, "ask", ask)
        return RayEngines()

    yield make
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


OURS = {"status_file": "/nowhere/{pid}"}


def test_a_call_goes_to_all_engines_of_ours(fleet: Callable[..., RayEngines]) -> None:
    first, second, others = Engine([1]), Engine([2, 3]), Engine([4])
    servers = server(OURS, engine=first), server(OURS, engine=second), server(None, engine=others), server(OURS, 1)
    assert fleet(*servers).call("method", 5) == [1, 2, 3]
    assert first.calls == second.calls == [("method", (5,))]
    assert others.calls == []


@pytest.mark.parametrize(
    ("answers", "words"), [(ValueError("no"), "ValueError: no"), ("dies", "the engine is dead")], ids=["error", "death"]
)
def test_a_call_that_fails_in_one_engine_fails(fleet: Callable[..., RayEngines], answers: Any, words: str) -> None:
    good = Engine([None])
    asked = fleet(server(OURS, engine=good), server(OURS, engine=Engine(answers)))
    with pytest.raises(RuntimeError, match=f"method: {words}"):
        asked.call("method")
    assert good.calls  # it is not left out, and its answer is not left over
    with pytest.raises(RuntimeError, match="method"):
        asked.call("method")
    assert len(good.calls) == 2


def test_servers_that_cannot_be_asked_are_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> list[Any]:
        raise OSError("no Ray")

    monkeypatch.setattr(engines, "ask", broken)
    with pytest.raises(RuntimeError, match=r"could not be asked.*no Ray"):
        RayEngines().call("method")


def test_files_reach_a_server_on_another_machine(tmp_path: Path) -> None:
    """Written before the workers are called, removed with the next call; those that are there are left alone."""
    far, near = tmp_path / "far/head.safetensors", tmp_path / "near.safetensors"
    near.write_bytes(b"mine")
    asked = server(None)
    engines.begin_here(asked, "load", (), {str(far): b"head", str(near): b"other"})
    assert (far.read_bytes(), near.read_bytes()) == (b"head", b"mine")
    engines.begin_here(asked, "settle", (), {})
    assert not far.exists()
    assert near.exists()
