"""The order in which a worker's samples reach the engine, on an engine that only says how long each response is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollout_spec.config import parse_config
from rollout_spec.rollout import worker as module
from rollout_spec.rollout.worker import RolloutWorker

# Prompts by length of their responses.
LONG, SHORT, MIDDLE = [3, 3], [1], [2, 2, 2]
TOKENS = {(3, 3): 90, (1,): 10, (2, 2, 2): 40}


class Engine:
    """Finishes all in one step, the last first; responses have the length of their prompt in `TOKENS`."""

    def __init__(self) -> None:
        self.added: list[tuple[str, tuple[int, ...]]] = []
        self.running: list[tuple[str, tuple[int, ...]]] = []

    def add_request(self, name: str, prompt: Any, params: Any) -> str:
        self.running.append((name, tuple(prompt["prompt_token_ids"])))
        self.added.append(self.running[-1])
        return name

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        done, self.running = self.running, []
        return [
            SimpleNamespace(
                request_id=name,
                finished=True,
                outputs=[SimpleNamespace(token_ids=[7] * TOKENS[prompt], finish_reason="stop", logprobs=None)],
            )
            for name, prompt in reversed(done)
        ]

    def abort_request(self, names: list[str]) -> None:
        self.running = [one for one in self.running if one[0] not in names]

    def prompts(self) -> list[list[int]]:
        """Of what was added since the last call."""
        added, self.added = self.added, []
        return [list(prompt) for _, prompt in added]


def start(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int = 4, **rollout: str) -> tuple[RolloutWorker, Engine]:
    engine = Engine()
    monkeypatch.setattr(module, "make_engine", lambda config, arguments, loggers: engine)
    monkeypatch.setattr(module.vllm_requests, "partial_output", lambda engine, name: ([], None))
    config = parse_config({"engine": {"max_num_seqs": max_num_seqs}, "rollout": rollout})
    return RolloutWorker(config, arguments={"model": "none"}), engine


def test_prompts_with_long_responses_go_first_when_they_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, engine = start(monkeypatch)
    prompts = [SHORT, MIDDLE, LONG]
    first = worker.generate(prompts, n=2)
    assert engine.prompts() == [SHORT, SHORT, MIDDLE, MIDDLE, LONG, LONG]  # nothing is known yet
    second = worker.generate(prompts, n=2)
    # Samples of a prompt stay together; results are as before.
    assert engine.prompts() == [LONG, LONG, MIDDLE, MIDDLE, SHORT, SHORT]
    for rollouts in (first, second):
        assert [(r.prompt_index, r.sample_index) for r in rollouts] == [(p, s) for p in range(3) for s in range(2)]
        assert [len(r.token_ids) for r in rollouts] == [10, 10, 40, 40, 90, 90]
        assert [r.prompt_token_ids for r in rollouts[::2]] == prompts


def test_what_fits_in_the_batch_is_not_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, engine = start(monkeypatch, max_num_seqs=6)
    for _ in range(2):
        worker.generate([SHORT, LONG], n=3)
    assert engine.prompts() == 2 * ([SHORT] * 3 + [LONG] * 3)


@pytest.mark.parametrize(
    ("order", "generated", "submitted"),
    [("auto", LONG, SHORT), ("submitted", SHORT, SHORT), ("longest_first", LONG, LONG)],
)
def test_the_option(monkeypatch: pytest.MonkeyPatch, order: str, generated: list[int], submitted: list[int]) -> None:
    worker, engine = start(monkeypatch, max_num_seqs=1, order=order)
    worker.generate([SHORT, LONG])
    engine.prompts()
    worker.generate([SHORT, LONG])
    assert engine.prompts()[0] == generated
    names = worker.submit([SHORT, LONG])
    assert engine.prompts()[0] == submitted
    assert names == ["rollout-4", "rollout-5"]
    worker.step()
    assert [len(rollout.token_ids) for name in names if (rollout := worker.take(name))] == [10, 90]
    assert [len(rollout.token_ids) for rollout in worker.stream([SHORT, LONG])] == [10, 90]
    assert engine.prompts()[0] == submitted


def test_an_aborted_response_says_nothing_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, engine = start(monkeypatch, max_num_seqs=1)
    worker.generate([SHORT, MIDDLE])
    worker.submit([MIDDLE])
    worker.abort()
    engine.prompts()
    worker.generate([SHORT, MIDDLE])
    assert engine.prompts() == [MIDDLE, SHORT]
