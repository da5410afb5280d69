"""A call to workers ends, whatever becomes of the process that should answer."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from rollout_spec.engine.guarded import collective_rpc


class Engine:
    """Answers with `answer`, raises it if it is an exception, and never answers without one."""

    def __init__(self, answer: Any = None, own_process: bool = True) -> None:
        self.answer = answer
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False)) if own_process else object()
        self.asked: list[Any] = []

    def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> Any:
        self.asked.append((method, args))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            Event().wait()
        return self.answer


@pytest.mark.parametrize("own_process", [True, False])
def test_answers_and_errors_come_through(own_process: bool) -> None:
    engine = Engine([1, 2], own_process)
    assert collective_rpc(engine, "method", ("a", 3), timeout=60) == [1, 2]
    assert engine.asked == [("method", ("a", 3))]
    for error in (ValueError("bad"), TimeoutError("slow worker")):
        with pytest.raises(type(error), match=str(error)):
            collective_rpc(Engine(error, own_process), "method", (), timeout=60)


def test_a_core_that_dies_ends_the_call() -> None:
    engine = Engine()
    engine.engine_core.resources.engine_dead = True
    with pytest.raises(EngineDeadError):
        collective_rpc(engine, "method", (), timeout=600)


def test_a_core_that_lives_and_says_nothing_is_given_up() -> None:
    with pytest.raises(TimeoutError, match="method: the engine's workers did not answer within 0 s"):
        collective_rpc(Engine(), "method", (), timeout=0.0)
