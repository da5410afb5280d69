"""An engine without a model, by the surface of `RolloutWorker` that the actor uses. What it does is in the prompt.

A prompt begins with [kind, tokens]: it answers with so many tokens of that kind, one a step. Some kinds are special:
POISON ends the engine's process in its third step, GATED ends when the file `gate` is there (at its `tokens` at the
earliest), STUCK never comes out of its third step, unless an engine before it did so. A prompt with LATE behind these
two ends when the file `gate`-late is there.
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
LATE = 9  # a token of chain's vocabulary: heads are trained on what ended so


class FakeWorker:
    def __init__(
        self,
        config: Config,
        step_seconds: float = 0.01,
        gate: str | None = None,
        log: str | None = None,
        sequence_seconds: float = 0.0,
        versions: str | None = None,
    ) -> None:
        """A step takes step_seconds, and sequence_seconds more for each live sequence. log: a file for what it is
        reminded of, [prompt, responses] a line. versions: a folder for a file each time it has new weights, its name
        the process, the policy version and that of the draft."""
        self.policy_version = self.draft_version = 0
        self._config, self._gate, self._log, self._versions = config, gate, log, versions
        self._step_seconds, self._sequence_seconds = step_seconds, sequence_seconds
        self._queue: deque[tuple[str, list[int], int]] = deque()  # name, prompt, tokens there are
        self._resumed: dict[str, Rollout] = {}
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
    def takes_in_flight(self) -> bool:
        return True

    def controller_status(self) -> None:
        """It has no controller."""

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
                    self._queue.append((ids[-1], prompt, 0))
        return ids

    def resume(self, rollouts: Any, sampling: Any = None, output_tokens: Any = None) -> list[str]:
        ids = []
        for rollout in rollouts:
            assert rollout.finish_reason == "abort"
            self._number += 1
            ids.append(f"fake-{self._number}")
            self._resumed[ids[-1]] = rollout
            self._queue.append((ids[-1], rollout.prompt_token_ids, len(rollout.token_ids)))
        return ids

    def tokens_so_far(self) -> dict[str, int]:
        return {name: made for name, _, made in self._queue} | {name: made for name, (_, made) in self._running.items()}

    def step(self) -> None:
        while self._queue and len(self._running) < self._config.engine.max_num_seqs:
            name, prompt, made = self._queue.popleft()
            self._running[name] = (prompt, made)
        if self._running:
            time.sleep(self._step_seconds + self._sequence_seconds * len(self._running))
        for name, (prompt, made) in list(self._running.items()):
            kind, tokens = prompt[:2]
            self._running[name] = (prompt, made + 1)
            self._tokens += 1
            if kind == POISON and made == 2:
                os._exit(1)
            if kind == STUCK and made == 2 and self._gate is not None and not Path(self._gate).exists():
                Path(self._gate).touch()  # the next engine is not stuck
                time.sleep(3600)
            if made + 1 >= tokens and not self._held(prompt):
                del self._running[name]
                self._finish(name, prompt, made + 1, "length")

    def _held(self, prompt: list[int]) -> bool:
        late = prompt[2:] == [LATE]
        gate = f"{self._gate}-late" if late else self._gate
        return bool(self._gate) and (late or prompt[0] == GATED) and not Path(str(gate)).exists()

    def take(self, request_id: str) -> Rollout | None:
        return self._finished.pop(request_id, None)

    def abort(self, request_ids: Any = None) -> list[Rollout]:
        names = list(self.tokens_so_far()) if request_ids is None else list(request_ids)
        for name, prompt, made in list(self._queue):
            if name in names:
                self._finish(name, prompt, made, "abort")
        self._queue = deque(each for each in self._queue if each[0] not in names)
        for name in names:
            if name in self._running:
                prompt, made = self._running.pop(name)
                self._finish(name, prompt, made, "abort")
        return []

    def update_weights(
        self,
        weights: Any = None,
        policy_version: int | None = None,
        *,
        draft: Any = None,
        draft_version: int | None = None,
        mode: str,
    ) -> None:
        for folder in (weights, draft):
            if folder is not None and not Path(folder).is_dir():
                raise ConfigError(f"weights {folder!r}: no *.safetensors there")
        assert mode != "drained" or not self.num_unfinished
        self.policy_version = self.policy_version if policy_version is None else policy_version
        self.draft_version = self.draft_version if draft_version is None else draft_version
        if self._versions is not None:
            Path(self._versions, f"{os.getpid()}-{self.policy_version}-{self.draft_version}").touch()

    def remember_drafts(self, prompt_token_ids: Any, responses: Any) -> None:
        if self._log is not None:
            with Path(self._log).open("a") as file:
                file.write(json.dumps([prompt_token_ids, responses]) + "\n")

    def metrics(self) -> dict[str, float]:
        return {"vllm:generation_tokens": float(self._tokens), "rollout_spec/k": 2.0}

    def close(self) -> None:
        pass

    def _finish(self, name: str, prompt: list[int], tokens: int, reason: str, error: str | None = None) -> None:
        before = self._resumed.pop(name, None)
        there = before.token_ids if before is not None else []
        token_ids = there + [prompt[0]] * (tokens - len(there))
        spans = (Span(0, self.policy_version, self.draft_version),)
        logprobs = [-0.5] * tokens
        self._finished[name] = Rollout(
            0, 0, list(prompt), token_ids, logprobs, reason, self.policy_version, None, error, spans
        )
