"""The example jobs are complete: verl composes them, checks them, and makes its dataclasses of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
CONFIGS = Path(__file__).resolve().parents[2] / "configs/verl"


def compose(name: str) -> Any:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose(name, ["data.train_files=train.parquet", "data.val_files=val.parquet"])


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS.glob("*.yaml")])
def test_verl_accepts_it(name: str) -> None:
    from rollout_spec_verl import overrides
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = compose(name)
    overrides.check(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.engine_kwargs["vllm"]["scheduler_cls"] == "rollout_spec.engine.scheduler.dynamic_scheduler"
    assert rollout.name == "vllm"


def test_several_nodes_differ_from_one_in_the_job_only() -> None:
    one, several = compose("one_node"), compose("multi_node")
    assert several.trainer.nnodes == 4
    assert several.actor_rollout_ref.rollout.rollout_spec == one.actor_rollout_ref.rollout.rollout_spec
