"""Draft heads: training one, and keeping it in step with the policy."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollout_spec.config.base import Node


class DraftConfig(Node):
    """Training a draft head (`rollout-spec draft train`) on the policy's own responses."""

    minutes: float = Field(35.0, gt=0)
    """Wall-clock of the whole, generation and features included, sessions added up."""
    generate_share: float = Field(0.3, gt=0, lt=1)
    """Of those minutes, at most so much goes to generating responses ..."""
    responses: int = Field(4000, ge=1)
    """... and it ends when there are so many, one a prompt."""
    prompts: Annotated[str, Field(pattern=r"\.jsonl$")] | None = None
    """Those of your rollouts: a .jsonl file as `rollout-spec bench --workload` reads it. `held_out` of them are not
    trained on; a benchmark of the head wants others still. None: problems of the benchmark's kind."""
    max_tokens: int = Field(512, ge=2)
    """Cap on a response."""
    temperatures: list[Annotated[float, Field(ge=0)]] = Field(default_factory=lambda: [0.0, 1.0, 1.0], min_length=1)
    """Responses are sampled at these in turn: those of the rollouts that the head is for. One may come twice: text at
    temperature 0 is plainer, and less of it will do."""
    held_out: int = Field(48, ge=1)
    """Responses for each temperature on prompts that are not trained on, to judge the head by."""
    vocabulary: int = Field(4096, ge=1)
    """Tokens that the head can draft: the most used ones."""
    aux_layers: list[int] | None = Field(None, min_length=1)
    """Features are the inputs of these layers of the target; none: vLLM's default (2, half-way, last but two)."""
    intermediate_size: int | None = Field(None, ge=1)
    """Of the head's MLP; none: the target's."""
    unroll: int = Field(3, ge=1)
    """Draft steps trained ..."""
    single_share: float = Field(0.25, ge=0, le=1)
    """... after a first share of the training with one alone, which is cheaper and carries the others."""
    decay: float = Field(0.8, gt=0, le=1)
    """Weight of a draft step's loss, of that before it."""
    overlap: float = Field(0.0, ge=0)
    """Weight of -log sum min(p, q), the chance of acceptance at temperature 1, beside the cross-entropy."""
    batch_tokens: int = Field(2048, ge=1)
    """A training step's, padding included."""
    rate: float = Field(2e-3, gt=0)
    """Peak learning rate of output layer and norms (AdamW) ..."""
    matrix_rate: float = Field(5e-3, gt=0)
    """... and of the other matrices (Muon)."""
    weight_decay: float = Field(0.05, ge=0)
    max_passes: float = Field(8.0, gt=0)
    """Passes over the responses, at most."""
    features_gib: float = Field(6.0, gt=0)
    """Memory for features; responses beyond are not trained on."""
    threads: int | None = Field(None, ge=1)
    """Of torch; none: as many as there are cores."""
    seed: int = Field(0, ge=0)


class RefreshConfig(Node):
    """Keeping a draft head in step with a policy that moves (`rollout_spec.rollout.draft_refresh`).

    It is trained on in its own process, from the head in the engine, on the latest rollouts; rates and shape of the
    training are those of `draft`.
    """

    policy: Literal["measured", "every", "drain", "never"] = "measured"
    """measured: when what rollouts lose to a stale head outweighs the cost, or by `trial_share`; every: after so many
    updates; drain: in the tail of a rollout, when cores are idle; never."""
    trial_share: float = Field(0.05, ge=0, lt=1)
    """measured: of all time, so much at most for refreshes that no loss calls for: a newer head may be better than the
    old one ever was. The wait doubles with each that brings no better head."""
    every: int = Field(10, ge=1)
    """every: updates of the policy."""
    drain_share: float = Field(0.25, gt=0, le=1)
    """drain: of engine.max_num_seqs, at most so many sequences still run."""
    min_tokens: int = Field(20_000, ge=1)
    """measured, drain: tokens of new rollouts, prompts included, before another refresh."""
    seconds: float = Field(60.0, gt=0)
    """Of training, without the forward pass of the policy before it."""
    timeout: float = Field(600.0, gt=0)
    """Seconds after which the process is ended and the old head stays."""
    threads: int = Field(1, ge=1)
    nice: int = Field(10, ge=0, le=19)
    """Priority of the process beside the engine's, 19 the lowest."""
    tokens: int = Field(50_000, ge=1)
    """Trained on at most, prompts included: the newest, short and long responses alike."""
    rate_share: float = Field(0.5, gt=0)
    """Of the learning rates of `draft`: the head is trained already."""
    buffer_tokens: int = Field(300_000, ge=1)
    """Rollouts kept, prompts included."""
    buffer_versions: int = Field(8, ge=1)
    """Policy versions kept."""
    folder: str | None = None
    """For rollouts, heads and decisions, to go on from after a restart; none: a temporary one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.seconds >= self.timeout:
            raise ValueError(f"timeout {self.timeout:g} must be above seconds {self.seconds:g}, the training alone")
        if self.min_tokens > self.buffer_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is above buffer_tokens {self.buffer_tokens}: no refresh would begin"
            )
        return self
