"""verl's replay buffer, asked ten times a second whether the rollout is done: verl asks every two seconds, a fifth of a
rollout here, which nothing that is faster could show."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class PromptReplayBuffer(ReplayBuffer):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, poll_interval=0.1)
