"""A rollout as a Ray job."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout_spec.config.base import Node


class RayConfig(Node):
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
