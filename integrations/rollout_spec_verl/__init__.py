"""Dynamic speculative decoding for verl's rollouts, by a configuration option.

    actor_rollout_ref.rollout._target_=rollout_spec_verl.RolloutConfig
    +actor_rollout_ref.rollout.rollout_spec.drafter.method=ngram

`option` is that option, `metrics` what verl's logger shows of it, `overrides` everything of verl's that we replace,
`compat` what we rely on, `plugin` what verl loads at start, `cpu` a platform for machines without a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_spec_verl.option import RolloutConfig

__all__ = ["RolloutConfig"]


def __getattr__(name: str) -> Any:
    """Late, because verl loads our plug-in while it is being imported itself."""
    if name != "RolloutConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rollout_spec_verl.option import RolloutConfig

    return RolloutConfig
