"""Calls to the workers of an engine whose core may have a process of its own, and may die.

vLLM 0.31 waits for ever for the answer to a call that was sent before the core's death was noticed (its own monitor
sets a flag, and nobody fails the calls that wait); here the flag is watched meanwhile.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from threading import Thread
from typing import Any

# How often (seconds) a call that waits looks whether the core lives.
POLL = 0.2


def collective_rpc(engine: Any, method: Any, args: tuple[Any, ...], timeout: float) -> list[Any]:
    """The workers' results. Raises what they raise, EngineDeadError if the core dies, TimeoutError after so many s."""
    resources = getattr(engine.engine_core, "resources", None)
    if resources is None:  # in this process: it dies with us
        results: list[Any] = engine.collective_rpc(method, timeout=timeout, args=args)
        return results
    answer: Future[list[Any]] = Future()

    def call() -> None:
        try:
            answer.set_result(engine.collective_rpc(method, timeout=timeout, args=args))
        except BaseException as error:
            answer.set_exception(error)

    # A daemon: a call that is never answered must not keep the process alive.
    Thread(target=call, name=f"rpc {method}", daemon=True).start()
    deadline = time.monotonic() + timeout
    while True:
        try:
            return answer.result(timeout=POLL)
        except TimeoutError:
            if answer.done():
                return answer.result()
            if resources.engine_dead:
                from vllm.v1.engine.exceptions import EngineDeadError

                raise EngineDeadError() from None
            if time.monotonic() > deadline:
                raise TimeoutError(f"{method}: the engine's workers did not answer within {timeout:.0f} s") from None
