"""One typed configuration tree for the worker, the benchmark and every integration.

A configuration is a YAML file, changed by `key=value` overrides and checked as a whole before anything
expensive starts. Every fault is a `ConfigError` that names the option, the value and what would be right.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

# vLLM's rejection sampler sizes its buffers for at most this many drafts a request (MAX_SPEC_LEN).
K_MAX_LIMIT = 128

PolicyName = Literal["off", "fixed", "threshold", "table", "goodput", "budget", "aimd", "bandit", "sweep"]
DrafterMethod = Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa"]
DRAFTERS_WITH_MODEL = ("draft_model", "eagle", "eagle3", "medusa")
DRAFT_HEADS = ("eagle", "eagle3", "mtp")


class ConfigError(ValueError):
    """Bad input, in a sentence that names the option, the value and the remedy."""


class _Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class EngineConfig(_Node):
    """The vLLM engine. `extra` takes any other vLLM engine argument by its own name."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int = Field(2048, ge=1)
    max_num_seqs: int = Field(32, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=1)
    kv_cache_gib: float | None = Field(None, gt=0)
    enable_prefix_caching: bool = True
    enforce_eager: bool = True
    seed: int = Field(0, ge=0)
    in_process: bool = True
    """True: engine core in the caller's process (least overhead on few cores). False: vLLM's own process."""
    extra: dict[str, Any] = Field(default_factory=dict)


class SuffixConfig(_Node):
    """Suffix decoding (arXiv 2411.04975) with a history that outlives a call."""

    max_tree_depth: int = Field(24, ge=2)
    max_spec_factor: float = Field(1.0, gt=0)
    min_token_prob: float = Field(0.1, ge=0, le=1)
    max_history_tokens: int = Field(2_000_000, ge=0)
    """Responses kept for drafting, in tokens, oldest dropped first; about 100 bytes a token. 0: no history."""


class DrafterConfig(_Node):
    """How draft tokens are made. `extra` takes any other key of vLLM's `speculative_config`."""

    method: DrafterMethod = "ngram"
    model: str | None = None
    k_max: int = Field(8, ge=1, le=K_MAX_LIMIT)
    prompt_lookup_min: int = Field(2, ge=1)
    prompt_lookup_max: int = Field(5, ge=1)
    suffix: SuffixConfig = SuffixConfig()
    sampling: Literal["auto", "greedy", "probabilistic"] = "auto"
    """Draft heads and models at temperature > 0: draft the likeliest token, or sample drafts, of which more are
    accepted. auto: probabilistic for eagle, eagle3 and mtp. At temperature 0 both draft the likeliest."""
    draft_buffer_mib: int = Field(256, ge=0)
    """eagle, eagle3: the head does not run while K is 0; so much of the target's hidden states is kept for it to catch
    up from. 0: vLLM's own behaviour, a forward of the head at every step."""
    synthetic_acceptance: list[float] | None = Field(None, min_length=1)
    """P(first j drafts accepted), j = 1 ..: vLLM accepts drafts by these chances, whatever they are (beyond the last
    one they fall at its rate). For measuring without a trained drafter; the text is then not the model's."""
    extra: dict[str, Any] = Field(default_factory=dict)

    @field_validator("synthetic_acceptance")
    @classmethod
    def _falls(cls, values: list[float] | None) -> list[float] | None:
        return None if values is None else check_survival(values)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.method in DRAFTERS_WITH_MODEL and not self.model:
            raise ValueError(f"method {self.method!r} needs `model`: a path or name of the draft weights")
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ValueError(
                f"prompt_lookup_max {self.prompt_lookup_max} is below prompt_lookup_min "
                f"{self.prompt_lookup_min}; it must be at least that"
            )
        return self


class PolicyConfig(_Node):
    """Which K for which step. Fields beside `name` belong to the policy in their comment."""

    name: PolicyName = "goodput"
    k: int = Field(3, ge=0, le=K_MAX_LIMIT)
    """fixed, threshold: draft tokens; aimd: those a request starts with."""
    threshold: int = Field(8, ge=0)
    """threshold: speculate while at most this many sequences decode."""
    table: list[tuple[int, int, int]] | None = None
    """table: vLLM's `[[lo, hi, K], ...]`, batch sizes inclusive, without gap or overlap, from 1."""
    ks: list[int] | None = None
    """sweep: the K to go through; none: a few up to the drafter's k_max."""
    profile: str | None = None
    """goodput, budget: JSON file with step times measured on this engine (`rollout-spec profile`), to start from."""

    @field_validator("name", mode="before")
    @classmethod
    def _name(cls, name: Any) -> Any:
        return _off(name)

    @field_validator("table")
    @classmethod
    def _table(cls, rows: list[tuple[int, int, int]] | None) -> list[tuple[int, int, int]] | None:
        return None if rows is None else check_table(rows)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name == "table" and not self.table:
            raise ValueError("policy 'table' needs `table`: [[lo, hi, K], ...], for example [[1, 4, 5], [5, 32, 0]]")
        return self


class SamplingConfig(_Node):
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: int = Field(512, ge=1)
    logprobs: bool = True
    """Return the log-probability of each sampled token under the policy that sampled it."""


class RolloutConfig(_Node):
    """How a worker goes through the prompts of a call."""

    order: Literal["auto", "submitted", "longest_first"] = "auto"
    """Which prompts start first where not all fit in the batch. longest_first: those whose earlier responses in this
    worker were longest, so that no straggler starts late; others keep their place, results and ids too. It has a price
    for who takes results as they come (the short ones come later, and are those missed by who stops early), and more
    long contexts are in memory at once. auto: longest_first in `generate`, which waits for all; else submitted."""


class WorkloadConfig(_Node):
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


class BenchConfig(_Node):
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
        return [_off(arm) for arm in arms] if isinstance(arms, list) else arms

    @field_validator("table")
    @classmethod
    def _table(cls, rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        return check_table(rows)


class ProfileConfig(_Node):
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


class SimulateConfig(_Node):
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
        return [_off(name) for name in names] if isinstance(names, list) else names

    @field_validator("acceptance")
    @classmethod
    def _falls(cls, values: list[float]) -> list[float]:
        return check_survival(values)


class DraftConfig(_Node):
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


class RefreshConfig(_Node):
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


class RayConfig(_Node):
    """A rollout by a pool of engines on a Ray cluster (`rollout-spec submit`, integrations/rollout_spec_ray)."""

    engines: int = Field(1, ge=1)
    """Engines in the pool, an actor each."""
    cpus_per_engine: int = Field(1, ge=1)
    """Cores that Ray sets aside for an engine. Without GPUs its threads are bound to as many, its own."""
    gpus_per_engine: int = Field(0, ge=0)
    """0: on the CPU. More than 1: a tensor-parallel engine in a placement group on one node."""
    samples: int = Field(1, ge=1)
    """Of each prompt whose row has no `n`."""
    order: Literal["longest_first", "submitted"] = "longest_first"
    """Which prompts start first. longest_first: those whose responses are expected to be longest, by the outputs in
    `history` and by siblings that have finished."""
    history: list[str] = Field(default_factory=list)
    """Output directories of earlier epochs over the same prompt ids: how long their responses were."""
    shared_drafts: int = Field(20_000_000, ge=0)
    """drafter.method suffix: tokens of responses kept for all engines to draft from, 4 bytes each, those of `history`
    too; of the oldest policy version dropped first. 0: each engine drafts from its own."""
    backlog: int | None = Field(None, ge=0)
    """Sequences handed to an engine beyond engine.max_num_seqs, so that a slot that falls free is filled at once; none:
    an eighth of that. 0: the engine's controller takes every moment for the tail."""
    move: bool = True
    """When nothing waits any more, live sequences move from the fullest engine to the emptiest, where the step times
    measured in this job say that it pays. Their tokens so far are read again there."""
    tries: int = Field(3, ge=2)
    """A prompt whose engine died so many times, the last time with nothing else in it, is set aside and reported."""
    restarts: int = Field(5, ge=0)
    """An engine that dies more often than this without finishing a sequence is given up."""
    start_seconds: float = Field(900.0, gt=0)
    """Until an engine has loaded, or until the cluster has room for the first one."""
    stall_seconds: float = Field(600.0, gt=0)
    """An engine that makes no step for so long while it has work is restarted."""
    flush_rows: int = Field(512, ge=1)
    """A part file is written when so many sequences have finished ..."""
    flush_seconds: float = Field(5.0, ge=0)
    """... or the first of them has waited so long."""
    progress_seconds: float = Field(10.0, gt=0)


class Config(_Node):
    model: str = "smollm2-135m"
    engine: EngineConfig = EngineConfig()
    drafter: DrafterConfig = DrafterConfig()
    policy: PolicyConfig = PolicyConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    workload: WorkloadConfig = WorkloadConfig()
    bench: BenchConfig = BenchConfig()
    profile: ProfileConfig = ProfileConfig()
    simulate: SimulateConfig = SimulateConfig()
    draft: DraftConfig = DraftConfig()
    refresh: RefreshConfig = RefreshConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.policy.name in ("fixed", "threshold") and self.policy.k > self.drafter.k_max:
            raise ValueError(f"policy.k {self.policy.k} is above drafter.k_max {self.drafter.k_max}; raise k_max")
        if self.profile.ks and max(self.profile.ks) > self.drafter.k_max:
            raise ValueError(f"profile.ks goes to {max(self.profile.ks)}, above drafter.k_max {self.drafter.k_max}")
        if self.profile.batches and max(self.profile.batches) > self.engine.max_num_seqs:
            raise ValueError(
                f"profile.batches goes to {max(self.profile.batches)}, above engine.max_num_seqs "
                f"{self.engine.max_num_seqs}; raise that"
            )
        if self.policy.table:
            top = max(k for _, _, k in self.policy.table)
            if top > self.drafter.k_max:
                raise ValueError(f"policy.table asks for K={top}, above drafter.k_max {self.drafter.k_max}; raise it")
        return self


def _off(name: Any) -> Any:
    return "off" if name is False else name  # YAML reads a bare `off` as false


def check_survival(values: list[float]) -> list[float]:
    """P(first j accepted), j = 1 ..; raises ValueError where they are none."""
    if any(not 0 <= value <= 1 for value in values) or sorted(values, reverse=True) != values:
        raise ValueError("must be probabilities that fall with the position, for example [0.7, 0.5, 0.35]")
    return values


def check_table(rows: Iterable[Iterable[int]]) -> list[tuple[int, int, int]]:
    """Rows of vLLM's batch-size table, sorted; raises ValueError on a gap, an overlap or a reversed range."""
    table: list[tuple[int, int, int]] = []
    for row in rows:
        values = tuple(row)
        if len(values) != 3:
            raise ValueError(f"table row {list(values)} must be [lo, hi, K]")
        table.append((values[0], values[1], values[2]))
    table.sort()
    if not table:
        raise ValueError("the table is empty; give [[lo, hi, K], ...], for example [[1, 4, 5], [5, 32, 0]]")
    expected = 1
    for lo, hi, k in table:
        if hi < lo or lo < 1:
            raise ValueError(f"table row [{lo}, {hi}, {k}] must have 1 <= lo <= hi")
        if not 0 <= k <= K_MAX_LIMIT:
            raise ValueError(f"table row [{lo}, {hi}, {k}]: K must be 0 to {K_MAX_LIMIT}")
        if lo < expected:
            raise ValueError(f"table row [{lo}, {hi}, {k}] overlaps the row before it; it must start at {expected}")
        if lo > expected:
            raise ValueError(f"the table has a gap: no row for batch sizes {expected} to {lo - 1}")
        expected = hi + 1
    return table


Override = Annotated[str, "key.path=value"]


def load_config(
    path: str | Path | None = None, overrides: Iterable[Override] = (), base: Mapping[str, Any] | None = None
) -> Config:
    """Read a YAML file (None: `base`, or all defaults), apply `a.b=value` overrides (values are YAML), validate.

    Raises ConfigError on an unreadable file, an unknown key or a bad value.
    """
    tree: dict[str, Any] = copy.deepcopy(dict(base or {}))
    source = "command line"
    if path is not None:
        source = str(path)
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--config {path}: cannot be read ({error.strerror or error})") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"--config {path}: is not UTF-8 text, so not YAML") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"--config {path}: not valid YAML: {error}") from error
        if not isinstance(loaded, Mapping | None):
            raise ConfigError(f"--config {path}: must be a mapping of options, is a {type(loaded).__name__}")
        tree = dict(loaded or {})
    for override in overrides:
        _apply(tree, override)
    return parse_config(tree, source)


def parse_config(tree: Mapping[str, Any], source: str = "configuration") -> Config:
    """Validate a plain mapping; raises ConfigError with one line per fault."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, source)) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise ConfigError(f"--set {override!r}: must be key=value, for example drafter.k_max=5")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML: {error}") from error
    *parents, leaf = key.split(".")
    node = tree
    for part in parents:
        child = node.get(part)
        if child is None:  # absent, or a group with nothing in it
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {part!r} is a value, not a group of options")
        node = child
    node[leaf] = value


def _explain(error: ValidationError, source: str) -> str:
    lines = []
    for fault in error.errors(include_url=False):
        option = ".".join(str(part) for part in fault["loc"]) or "options"
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            lines.append(f"{option}: no such option (its value is {fault['input']!r}); {_known(fault['loc'])}")
        elif fault["type"] == "value_error" and isinstance(fault["input"], dict):
            lines.append(f"{option}: {message}")
        else:
            lines.append(f"{option}: value {fault['input']!r}: {message}")
    return f"{source}: " + "\n  ".join(lines)


def _known(loc: tuple[int | str, ...]) -> str:
    node: Any = Config
    for part in loc[:-1]:
        field = node.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, BaseModel):
            return "see configs/ for every option"
        node = field.annotation
    return "options here are " + ", ".join(node.model_fields)
