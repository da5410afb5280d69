"""How a job can fail. Apart, since this must be known before ray is imported."""

from __future__ import annotations

from rollout_spec.config import ConfigError


class PoolFailed(RuntimeError):  # noqa: N818 - what happened, as a user reads it
    """No engine is left, or none could be placed."""


class OutputFailed(RuntimeError):  # noqa: N818 - what happened, as a user reads it
    """The output can't be written any further; what was written stays."""


class WeightsRefused(ConfigError):  # noqa: N818 - what happened, as a user reads it
    """Weights that were wanted don't fit the engines; those before are in force."""
