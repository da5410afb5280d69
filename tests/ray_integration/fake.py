"""An engine without a model, by the surface of `RolloutWorker` that the actor uses. What it does is in the prompt.

A prompt begins with [kind, tokens]: it answers with so many tokens of that kind, one a step. Some kinds are special:
POISON ends the engine's process in its third step, GATED ends when the file `gate` is there (at its `tokens` at the
earliest), STUCK never comes out of its third step, unless an engine before it did so.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from rollout_spec.config import Config, ConfigError
from rollout_spec.rollout.types import Rollout, Span

POISON, GATED, STUCK = 666, 777, 888


class FakeWorker:
    def __init__(
        self, config: Config, step_seconds: float = 0.01, gate: str | None = None, log: str | None = None
    ) -> None:
        """log: a file for what it is reminded of, [prompt, responses] a line."""
        self.policy_version = self.draft_version = 0
        self._config, self._step_seconds, self._gate, self._log = config, step_seconds, gate, log
        self._queue: deque[tuple[str, list[int]]] = deque()
        self._running: dict[str, tuple[list[int], int]] = {}
        self._finished: dict[str, Rollout] = {}
        self._number = 0
        self._tokens = 0
        if config.model == "refused":
            raise ConfigError("model 'refused': no such folder")

    @property
    def num_unfinished(self) -> int:
        return len(self._queue) + len(self._running)

    @property
    def tokenizer(self) -> Any:
        raise RuntimeError("the chat template fails")

    def submit(self, prompts: Any, n: int = 1, sampling: Any = None, output_tokens: Any = None) -> list[str]:
        ids = []
        for prompt in prompts:
            for _ in range(n):
                self._number += 1
                ids.append(f"fake-{self._number}")
                if prompt[1] > self._config.engine.max_model_len:
                    self._finish(ids[-1], prompt, 0, "error", "too long")
                else:
                    self._queue.append((ids[-1], prompt))
        return ids

    def step(self) -> None:
        while self._queue and len(self._running) < self._config.engine.max_num_seqs:
            name, prompt = self._queue.popleft()
            self._running[name] = (prompt, 0)
        if self._running:
            time.sleep(self._step_seconds)
        for name, (prompt, made) in list(self._running.items()):
            kind, tokens = prompt[:2]
            self._running[name] = (prompt, made + 1)
            self._tokens += 1
            if kind == POISON and made == 2:
                os._exit(1)
            if kind == STUCK and made == 2 and self._gate is not None and not Path(self._gate).exists():
                Path(self._gate).touch()  # the next engine is not stuck
                time.sleep(3600)
            if made + 1 >= tokens and not (kind == GATED and self._gate and not Path(self._gate).exists()):
                del self._running[name]
                self._finish(name, prompt, made + 1, "length")

    def take(self, request_id: str) -> Rollout | None:
        return self._finished.pop(request_id, None)

    def abort(self, request_ids: Any = None) -> list[Rollout]:
        self._queue.clear()
        self._running.clear()
        return []

    def update_weights(self, weights: Any = None, policy_version: int | None = None, *, mode: str, **_: Any) -> None:
        if not Path(weights).is_dir():
            raise ConfigError(f"weights {weights!r}: no *.safetensors there")
        assert mode != "drained" or not self.num_unfinished
        self.policy_version = policy_version or 0

    def remember_drafts(self, prompt_token_ids: Any, responses: Any) -> None:
        if self._log is not None:
            with Path(self._log).open("a") as file:
                file.write(json.dumps([prompt_token_ids, responses]) + "\n")

    def metrics(self) -> dict[str, float]:
        return {"vllm:generation_tokens": float(self._tokens), "rollout_spec/k": 2.0}

    def close(self) -> None:
        pass

    def _finish(self, name: str, prompt: list[int], tokens: int, reason: str, error: str | None = None) -> None:
        token_ids = [prompt[0]] * tokens
        spans = (Span(0, self.policy_version, 0),)
        logprobs = [-0.5] * tokens
        self._finished[name] = Rollout(
            0, 0, list(prompt), token_ids, logprobs, reason, self.policy_version, None, error, spans
        )
