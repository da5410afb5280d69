"""What is measured or simulated: workload, benchmark, profile, a fleet in simulated time."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from rollout_spec.config.base import K_MAX_LIMIT, Node, check_survival, check_table, off_by_name


class WorkloadConfig(Node):
    """What the benchmark generates: groups of `n` samples for each of `num_prompts` prompts."""

    name: str = "heavy_tail"
    """heavy_tail, clipped_math, drain_curve; natural, or mixed (natural, with copying 0.5), both as long as the model
    makes them; or a path to a .jsonl file."""
    num_prompts: int = Field(8, ge=1)
    n: int = Field(4, ge=1)
    scale: float = Field(0.02, gt=0)
    """Published lengths (tokens; for drain_curve seconds) times this give the lengths imposed here."""
    max_tokens: int = Field(512, ge=1)
    """natural, mixed, and lines of a file without `output_tokens`: the cap on a response."""
    min_tokens: int = Field(1, ge=1)
    """A scaled length is at least this."""
    copying: float = Field(0.0, ge=0, le=1)
    """Share of the prompts, evenly spread, that ask for their own text again with a small change."""


class BenchConfig(Node):
    arms: list[str] = Field(default_factory=lambda: ["off", "fixed:3", "table", "goodput"], min_length=1)
    """POLICY[:ARG][@DRAFTER]: off, fixed:K, threshold[:BATCH[:K]], table (vLLM's own), goodput."""
    table: list[tuple[int, int, int]] = Field(default_factory=lambda: [(1, 4, 5), (5, 8, 3), (9, 1024, 0)])
    """The arm `table`: vLLM's `num_speculative_tokens_per_batch_size`, run by vLLM's own scheduler."""
    repeats: int = Field(3, ge=1)
    warmup_tokens: int = Field(48, ge=0)
    """Before the first measured run each engine generates this many tokens a sequence, at every batch size."""
    seed: int = Field(0, ge=0)

    @field_validator("arms", mode="before")
    @classmethod
    def _arms(cls, arms: Any) -> Any:
        return [off_by_name(arm) for arm in arms] if isinstance(arms, list) else arms

    @field_validator("table")
    @classmethod
    def _table(cls, rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        return check_table(rows)


class ProfileConfig(Node):
    """What `rollout-spec profile` measures; sampling, drafter and workload are those of their groups."""

    batches: list[int] | None = Field(None, min_length=1)
    """Batch sizes; none: between 1 and engine.max_num_seqs, more where the curve bends."""
    ks: list[int] | None = Field(None, min_length=1)
    """K beside 0; none: 1, 2, 3, 5, 8, .. up to drafter.k_max."""
    context: int = Field(128, ge=1)
    """Context tokens of a sequence at which all batches are measured."""
    long_context: int | None = Field(None, ge=1)
    """A second one, for some batches; none: three quarters of engine.max_model_len."""
    error: float = Field(0.02, gt=0)
    """A batch is measured until the standard error of each median is below this share ..."""
    rounds: int = Field(8, ge=1)
    """... or it has been through all K so many times, three steps each."""
    bend: float = Field(0.05, gt=0)
    """Between two batches another is measured while it is off the straight line by this share."""
    acceptance_prompts: int = Field(16, ge=0)
    """Samples of the workload, on prompts that the benchmark does not have, to measure acceptance on; 0: none."""
    seed: int = Field(0, ge=0)

    @field_validator("batches", "ks")
    @classmethod
    def _positive(cls, values: list[int] | None) -> list[int] | None:
        if values is not None and min(values) < 1:
            raise ValueError("must be whole numbers from 1 on, for example [1, 4, 16]")
        return None if values is None else sorted(set(values))


class SimulateConfig(Node):
    """A fleet in simulated time (`rollout-spec simulate`). Lengths come from `workload.name` and `workload.scale`."""

    device: str = "H200"
    """H100, H200 or B200: published figures in rollout_spec/simulate/hardware.json."""
    model: str = "llama-3-70b"
    """A model of that file."""
    gpus_per_replica: int = Field(4, ge=1)
    weight_bytes: float = Field(2.0, gt=0)
    """2 for bf16, 1 for fp8."""
    compute_efficiency: float | None = Field(None, gt=0, le=1)
    """Share of the published peak that is reached; none: the default of rollout_spec/simulate/roofline.py."""
    step_times: str | None = None
    """A profile (`rollout-spec profile`), in place of device and model, and of `acceptance` if it measured that."""
    drafter_params_b: float = Field(0.0, ge=0)
    """Parameters read for each draft token, in billions; 0: no draft model."""
    drafter_pass_us: float = Field(50.0, ge=0)
    """Microseconds of a draft token beside that, whatever the batch."""
    k_max: int = Field(8, ge=1, le=K_MAX_LIMIT)
    acceptance: list[float] = Field(default_factory=lambda: [0.7, 0.49, 0.34, 0.24, 0.17], min_length=1)
    """P(first j drafts accepted), j = 1 ..; beyond the last it falls at the same rate."""
    request_sigma: float = Field(0.3, ge=0)
    """Spread of acceptance between requests (logarithm of the power)."""
    drift: float = Field(0.1, ge=0)
    """By how much the acceptance power grows (logarithm) with each rollout since the drafter was refreshed."""
    refresh_every: int = Field(0, ge=0)
    """Rollouts between refreshes of the drafter; 0: none."""
    refresh_seconds: float = Field(0.0, ge=0)
    rollouts: int = Field(1, ge=1)
    trainer_seconds: float = Field(0.0, ge=0)
    replicas: int = Field(64, ge=1)
    max_num_seqs: int = Field(256, ge=1)
    queue: Literal["static", "shared"] = "static"
    sequences: int = Field(1024, ge=1)
    """Responses of one rollout, over all replicas; those of the trace where workload.name is a .jsonl file."""
    arrival_rate: float = Field(0.0, ge=0)
    """Requests that come a second, at random, over the whole fleet; 0: all at the start."""
    prompt_tokens: int = Field(500, ge=0)
    noise: float = Field(0.03, ge=0)
    """Scatter of step times (deviation of the logarithm)."""
    prior: bool = True
    """Tell the policies that learn the true step times at start, as a profile would."""
    policies: list[str] = Field(
        default_factory=lambda: ["off", "fixed:3", "threshold:3", "table", "bandit", "goodput", "oracle"], min_length=1
    )
    """POLICY[:K]; oracle knows the truth."""
    better_rates: list[float] = Field(default_factory=list)
    """What a better drafter buys: off and goodput again with each of these chances that one draft is accepted."""
    seed: int = Field(0, ge=0)

    @field_validator("policies", mode="before")
    @classmethod
    def _policies(cls, names: Any) -> Any:
        return [off_by_name(name) for name in names] if isinstance(names, list) else names

    @field_validator("acceptance")
    @classmethod
    def _falls(cls, values: list[float]) -> list[float]:
        return check_survival(values)
