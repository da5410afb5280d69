"""One typed configuration tree for the worker, the benchmark and every integration.

A configuration is a YAML file, changed by `key=value` overrides and checked as a whole before anything
expensive starts. Every fault is a `ConfigError` that names the option, the value and what would be right.
"""

from rollout_spec.config.base import K_MAX_LIMIT, ConfigError, check_survival, check_table
from rollout_spec.config.cluster import RayConfig
from rollout_spec.config.draft import DraftConfig, RefreshConfig
from rollout_spec.config.engine import (
    DRAFT_HEADS,
    DRAFTERS_WITH_MODEL,
    DrafterConfig,
    DrafterMethod,
    EngineConfig,
    PolicyConfig,
    PolicyName,
    RolloutConfig,
    SamplingConfig,
    SuffixConfig,
)
from rollout_spec.config.studies import BenchConfig, ProfileConfig, SimulateConfig, WorkloadConfig
from rollout_spec.config.tree import Config, Override, load_config, parse_config

__all__ = [
    "BenchConfig",
    "Config",
    "ConfigError",
    "DRAFTERS_WITH_MODEL",
    "DRAFT_HEADS",
    "DraftConfig",
    "DrafterConfig",
    "DrafterMethod",
    "EngineConfig",
    "K_MAX_LIMIT",
    "Override",
    "PolicyConfig",
    "PolicyName",
    "ProfileConfig",
    "RayConfig",
    "RefreshConfig",
    "RolloutConfig",
    "SamplingConfig",
    "SimulateConfig",
    "SuffixConfig",
    "WorkloadConfig",
    "check_survival",
    "check_table",
    "load_config",
    "parse_config",
]
