"""An engine, how it drafts, and how a worker goes through its prompts."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollout_spec.config.base import K_MAX_LIMIT, Node, check_survival, check_table, off_by_name

PolicyName = Literal["off", "fixed", "threshold", "table", "goodput", "budget", "aimd", "bandit", "sweep"]
DrafterMethod = Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa"]
DRAFTERS_WITH_MODEL = ("draft_model", "eagle", "eagle3", "medusa")
DRAFT_HEADS = ("eagle", "eagle3", "mtp")


class EngineConfig(Node):
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


class SuffixConfig(Node):
    """Suffix decoding (arXiv 2411.04975) with a history that outlives a call."""

    max_tree_depth: int = Field(24, ge=2)
    max_spec_factor: float = Field(1.0, gt=0)
    min_token_prob: float = Field(0.1, ge=0, le=1)
    max_history_tokens: int = Field(2_000_000, ge=0)
    """Responses kept for drafting, in tokens, oldest dropped first; about 100 bytes a token. 0: no history."""


class DrafterConfig(Node):
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


class PolicyConfig(Node):
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
        return off_by_name(name)

    @field_validator("table")
    @classmethod
    def _table(cls, rows: list[tuple[int, int, int]] | None) -> list[tuple[int, int, int]] | None:
        return None if rows is None else check_table(rows)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name == "table" and not self.table:
            raise ValueError("policy 'table' needs `table`: [[lo, hi, K], ...], for example [[1, 4, 5], [5, 32, 0]]")
        return self


class SamplingConfig(Node):
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: int = Field(512, ge=1)
    logprobs: bool = True
    """Return the log-probability of each sampled token under the policy that sampled it."""


class RolloutConfig(Node):
    """How a worker goes through the prompts of a call."""

    order: Literal["auto", "submitted", "longest_first"] = "auto"
    """Which prompts start first where not all fit in the batch. longest_first: those whose earlier responses in this
    worker were longest, so that no straggler starts late; others keep their place, results and ids too. It has a price
    for who takes results as they come (the short ones come later, and are those missed by who stops early), and more
    long contexts are in memory at once. auto: longest_first in `generate`, which waits for all; else submitted."""
