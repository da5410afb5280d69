"""The option: verl's rollout configuration with a group of ours, turned into engine arguments.

verl makes a dataclass of `actor_rollout_ref.rollout` in every process that needs it, of the class that `_target_`
names. Ours is a subclass: it checks the group `rollout_spec` and adds to `engine_kwargs.vllm` what makes vLLM speculate
by our controller. The rollout stays verl's own `vllm`, with all that verl ties to that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import RolloutConfig as VerlRolloutConfig

from rollout_spec.config import DRAFTERS_WITH_MODEL, Config, ConfigError, parse_config
from rollout_spec.engine import outbox
from rollout_spec.engine.control_loop import SETTINGS_KEY
from rollout_spec.engine.launch import plugin_arguments
from rollout_spec_verl import compat, overrides

OPTION = "actor_rollout_ref.rollout"
GROUP = f"{OPTION}.rollout_spec"
# Groups of our configuration that mean something here; verl sets the rest.
GROUPS = ("drafter", "policy", "refresh", "draft")
# Seconds that an engine may take to acknowledge a piece of a weight update.
WEIGHT_SYNC_SECONDS = 600


@dataclass
class RolloutConfig(VerlRolloutConfig):
    """verl's rollout configuration and `rollout_spec`: the GROUPS as in configs/worker.yaml and configs/draft.yaml."""

    rollout_spec: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        compat.require()
        seconds = (self.rollout_spec or {}).get("weight_sync_seconds", WEIGHT_SYNC_SECONDS)
        arguments = engine_arguments(self, self.ours())
        if not isinstance(seconds, int | float) or seconds <= 0:
            raise ConfigError(f"{GROUP}.weight_sync_seconds: value {seconds!r}: must be a number of seconds above 0")
        if arguments:
            others: dict[str, Any] = self["engine_kwargs"]
            self.engine_kwargs = {**others, "vllm": merged(others.get("vllm"), arguments)}
            overrides.install(seconds)

    def ours(self) -> Config:
        """Our configuration. Raises ConfigError."""
        settings = {name: group for name, group in (self.rollout_spec or {}).items() if name != "weight_sync_seconds"}
        return parse(settings, self.mtp)


def engine_arguments(rollout: VerlRolloutConfig, config: Config) -> dict[str, Any]:
    """What to add to `engine_kwargs.vllm`; nothing where the policy is `off`. Raises ConfigError with the option."""
    if rollout.name != "vllm":
        raise ConfigError(f"{OPTION}.name: value {rollout.name!r}: rollout_spec speeds up vLLM; set it to vllm")
    if config.policy.name == "off":
        return {}
    method = config.drafter.method
    own_weights = method in DRAFTERS_WITH_MODEL
    if own_weights and rollout.free_cache_engine:
        raise ConfigError(
            f"{GROUP}.drafter.method: value {method!r}: while the actor trains, verl puts vLLM to sleep so deep that "
            f"all weights are dropped, and then loads only the policy's: the drafter would be noise. Set "
            f"{OPTION}.free_cache_engine=False, or take a drafter without weights (ngram, suffix)"
        )
    arguments = plugin_arguments(config.drafter, config.policy, not rollout.enforce_eager, rollout.max_num_seqs)
    if own_weights:
        # verl's load_format=dummy would be the drafter's too, and nobody sends it weights.
        arguments["speculative_config"].setdefault("draft_load_config", {"load_format": "auto"})
    elif method == "mtp":
        # verl writes the configuration of the MTP head it trains, and adds to it what it finds here.
        added = {"num_speculative_tokens_per_batch_size", *config.drafter.extra}
        spec = arguments["speculative_config"]
        arguments["speculative_config"] = {key: spec[key] for key in spec if key in added}
    refreshed = method == "eagle3" and config.refresh.policy != "never"
    if refreshed:
        arguments["worker_extension_cls"] = "rollout_spec_verl.worker_extension.WorkerExtension"
    arguments["additional_config"][SETTINGS_KEY] |= outbox.settings(refreshed)
    return arguments


def parse(settings: Mapping[str, Any], mtp: Any) -> Config:
    """Our part of the configuration; with verl's MTP rollout on, its head is the drafter."""
    unknown = [name for name in settings if name not in GROUPS]
    if unknown:
        raise ConfigError(
            f"{GROUP}: {unknown[0]!r} is no option here; there are {', '.join(GROUPS)}, weight_sync_seconds"
        )
    tree: dict[str, Any] = {name: {} if group is None else group for name, group in settings.items()}
    trained = bool(mtp is not None and mtp.enable and mtp.enable_rollout)
    if trained and isinstance(tree.get("drafter", {}), Mapping):
        drafter = tree["drafter"] = dict(tree.get("drafter", {}))
        drafter.setdefault("method", "mtp")
        drafter.setdefault("k_max", mtp.num_speculative_tokens)
    config = parse_config(tree, GROUP)
    if "refresh" in tree and (config.drafter.method != "eagle3" or config.refresh.policy == "drain"):
        raise ConfigError(
            f"{GROUP}.refresh: drafter.method {config.drafter.method!r}, refresh.policy {config.refresh.policy!r}: an "
            "eagle3 head can be refreshed, by one of measured, every and never (verl is heard from between steps only)"
        )
    if trained != (config.drafter.method == "mtp"):
        raise ConfigError(
            f"{GROUP}.drafter.method: value {config.drafter.method!r}: verl drafts with an MTP head if and only if "
            "actor_rollout_ref.model.mtp.enable and .enable_rollout are set; set both or neither"
        )
    if trained and config.drafter.k_max != mtp.num_speculative_tokens:
        raise ConfigError(
            f"{GROUP}.drafter.k_max: value {config.drafter.k_max}: with MTP it is "
            f"actor_rollout_ref.model.mtp.num_speculative_tokens, here {mtp.num_speculative_tokens}; leave it out"
        )
    return config


def merged(own: Mapping[str, Any] | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The user's `engine_kwargs.vllm` with ours; ConfigError where both say something different."""
    result = dict(own or {})
    for name, value in arguments.items():
        theirs = result.get(name)
        if name == "worker_extension_cls" and theirs is not None:
            continue  # one that derives from ours
        # verl copies configurations, and a copy is made from what we had added to the first.
        if theirs is not None and theirs != value and not (name == "additional_config" and SETTINGS_KEY not in theirs):
            raise ConfigError(
                f"{OPTION}.engine_kwargs.vllm.{name}: is set, and {GROUP} sets it too; leave it out, and say "
                f"what you need in {GROUP} (`drafter.extra` takes any key of vLLM's speculative_config)"
            )
        result[name] = value if name != "additional_config" else {**(theirs or {}), **value}
    return result
