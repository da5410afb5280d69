"""The example jobs are complete: verl composes them, checks them, and makes its dataclasses of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
CONFIGS = Path(__file__).resolve().parents[2] / "configs/verl"


def compose(name: str, *overrides: str) -> Any:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose(name, ["data.train_files=train.parquet", "data.val_files=val.parquet", *overrides])


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


def test_a_head_and_its_folder_as_the_readme_has_them(tmp_path: Path) -> None:
    from rollout_spec_verl import overrides
    from verl.utils.config import omega_conf_to_dataclass

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    group = "++actor_rollout_ref.rollout.rollout_spec"
    config = compose(
        "one_node",
        f"{group}.drafter={{method: eagle3, model: {tmp_path}, k_max: 5}}",
        f"{group}.refresh.folder=${{trainer.default_local_dir}}/draft",
        "actor_rollout_ref.rollout.free_cache_engine=False",
        "trainer.default_local_dir=/checkpoints",
    )
    overrides.check(config)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).ours().refresh.folder == "/checkpoints/draft"
