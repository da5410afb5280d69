"""The whole tree: read from a file, changed by overrides, checked."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ValidationError, model_validator

from rollout_spec.config.base import ConfigError, Node
from rollout_spec.config.cluster import RayConfig
from rollout_spec.config.draft import DraftConfig, RefreshConfig
from rollout_spec.config.engine import (
    DrafterConfig,
    EngineConfig,
    PolicyConfig,
    RolloutConfig,
    SamplingConfig,
)
from rollout_spec.config.studies import BenchConfig, ProfileConfig, SimulateConfig, WorkloadConfig


class Config(Node):
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
