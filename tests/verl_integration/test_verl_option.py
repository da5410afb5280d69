from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import InstantiationException
from rollout_spec_verl.cpu import ENVIRONMENT

from rollout_spec.config import ConfigError
from rollout_spec.engine.control_loop import SETTINGS_KEY

pytest.importorskip("verl")
ROOT = Path(__file__).resolve().parents[2]
TARGET = "actor_rollout_ref.rollout._target_=rollout_spec_verl.RolloutConfig"
GROUP = "+actor_rollout_ref.rollout.rollout_spec"


@pytest.fixture(scope="module")
def compose() -> Callable[..., Any]:
    """verl's own configuration with overrides, as its trainer reads it."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    def make(*overrides: str, name: str = "vllm") -> Any:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return hydra_compose("ppo_trainer", [f"actor_rollout_ref.rollout.name={name}", *overrides])

    return make


@pytest.fixture
def rollout(compose: Callable[..., Any]) -> Callable[..., Any]:
    """The dataclass that verl makes of the rollout's options."""
    from verl.utils.config import omega_conf_to_dataclass

    def make(*overrides: str, name: str = "vllm") -> Any:
        return omega_conf_to_dataclass(compose(TARGET, *overrides, name=name).actor_rollout_ref.rollout)

    return make


def refused(make: Callable[..., Any], *overrides: str, **more: Any) -> str:
    """The message of the ConfigError; hydra may wrap it."""
    with pytest.raises((ConfigError, InstantiationException)) as caught:
        make(*overrides, **more)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__
    assert error is not None, caught.value
    return str(error)


def test_one_line_makes_verls_engine_ours(rollout: Callable[..., Any]) -> None:
    arguments = rollout().engine_kwargs["vllm"]
    assert arguments["scheduler_cls"] == "rollout_spec.engine.scheduler.dynamic_scheduler"
    assert arguments["speculative_config"]["method"] == "ngram"
    assert arguments["additional_config"][SETTINGS_KEY]["policy"]["name"] == "goodput"


def test_graphs_are_captured_for_every_k_unless_the_engine_is_eager(rollout: Callable[..., Any]) -> None:
    table = "num_speculative_tokens_per_batch_size"
    eager = "actor_rollout_ref.rollout.enforce_eager"
    drafts = f"{GROUP}.drafter.k_max=3"
    spec = rollout(drafts, f"{eager}=False").engine_kwargs["vllm"]["speculative_config"]
    assert sorted({k for _, _, k in spec[table]}) == [0, 1, 2, 3]
    assert table not in rollout(drafts, f"{eager}=True").engine_kwargs["vllm"]["speculative_config"]


@pytest.mark.slow
def test_verl_passes_our_arguments_to_vllms_command_line(rollout: Callable[..., Any]) -> None:
    """Through the text that verl makes of them, and vLLM's own parser."""
    code = """
import json, sys
from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
given = json.loads(sys.argv[1])
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
read = AsyncEngineArgs.from_cli_args(parser.parse_args(build_cli_args_from_config(given)))
print(json.dumps({name: getattr(read, name) for name in given}))
"""
    given = rollout().engine_kwargs["vllm"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    # Off line vLLM looks for its default model while it reads arguments, and other tests leave that switched on.
    environment = {**os.environ, "PYTHONPATH": path, **ENVIRONMENT, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-W", "ignore", "-c", code, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == given


def test_off_is_plain_verl(rollout: Callable[..., Any]) -> None:
    assert not rollout(f"{GROUP}.policy.name=off").engine_kwargs["vllm"]


def test_a_copy_of_the_configuration_is_the_same(rollout: Callable[..., Any]) -> None:
    """verl copies it for each role of a disaggregated engine."""
    made = rollout()
    assert dataclasses.replace(made, tensor_model_parallel_size=1).engine_kwargs == made.engine_kwargs


def test_the_users_own_engine_arguments_stay(rollout: Callable[..., Any]) -> None:
    vllm = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    arguments = rollout(f"{vllm}.async_scheduling=False", f"{vllm}.additional_config={{mine: 1}}").engine_kwargs["vllm"]
    assert arguments["async_scheduling"] is False
    assert set(arguments["additional_config"]) == {"mine", SETTINGS_KEY}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{GROUP}.drafter.methud=ngram"], ["rollout.rollout_spec", "drafter.methud", "no such option"]),
        ([f"{GROUP}.policy={{name: fixed, k: 9}}", f"{GROUP}.drafter.k_max=4"], ["policy.k 9", "k_max 4"]),
        ([f"{GROUP}.engine.seed=3"], ["'engine' is no option here"]),
        ([f"{GROUP}.drafter={{method: eagle3, model: /nowhere}}"], ["eagle3", "free_cache_engine=False"]),
        ([f"{GROUP}.drafter.method=mtp"], ["drafter.method", "model.mtp.enable"]),
        ([f"{GROUP}.drafter=ngram"], ["rollout.rollout_spec", "drafter"]),
        ([f"{GROUP}.weight_sync_seconds=0"], ["weight_sync_seconds", "above 0"]),
        ([f"{GROUP}.refresh.policy=every"], ["rollout_spec.refresh", "'ngram'", "eagle3"]),
        ([f"{GROUP}.refresh.secs=5"], ["refresh.secs", "no such option"]),
        (
            ["+actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls=mine.Scheduler"],
            ["engine_kwargs.vllm.scheduler_cls", "sets it too"],
        ),
    ],
)
def test_errors_name_the_option(rollout: Callable[..., Any], overrides: list[str], words: list[str]) -> None:
    message = refused(rollout, *overrides)
    assert all(word in message for word in words), message


def test_another_engine_than_vllm_is_refused(rollout: Callable[..., Any]) -> None:
    assert "'sglang'" in refused(rollout, name="sglang")


def test_a_drafter_with_weights_loads_them(rollout: Callable[..., Any], tmp_path: Path) -> None:
    """verl loads dummy weights and sends the policy's; nobody sends the drafter's."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    made = rollout(
        f"{GROUP}.drafter={{method: eagle3, model: {tmp_path}}}", "actor_rollout_ref.rollout.free_cache_engine=False"
    )
    arguments = made.engine_kwargs["vllm"]
    assert arguments["speculative_config"]["draft_load_config"] == {"load_format": "auto"}
    # ... so it is refreshed, unless it is not to be.
    settings = arguments["additional_config"][SETTINGS_KEY]
    assert arguments["worker_extension_cls"] == "rollout_spec_verl.worker_extension.WorkerExtension"
    assert {"status_file", "draft_file", "responses_file"} <= settings.keys()
    assert made.ours().refresh.policy == "measured"


def test_a_head_that_is_never_refreshed_leaves_verls_workers_alone(rollout: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    arguments = rollout(
        f"{GROUP}.drafter={{method: eagle3, model: {tmp_path}}}",
        f"{GROUP}.refresh.policy=never",
        "actor_rollout_ref.rollout.free_cache_engine=False",
    ).engine_kwargs["vllm"]
    assert "worker_extension_cls" not in arguments
    assert arguments["additional_config"][SETTINGS_KEY].keys() & {"draft_file", "responses_file"} == set()


def test_an_extension_of_the_users_stays(rollout: Callable[..., Any], tmp_path: Path) -> None:
    """As on a CPU; it has to derive from ours."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    arguments = rollout(
        f"{GROUP}.drafter={{method: eagle3, model: {tmp_path}}}",
        "actor_rollout_ref.rollout.free_cache_engine=False",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=mine.Extension",
    ).engine_kwargs["vllm"]
    assert arguments["worker_extension_cls"] == "mine.Extension"


def test_an_mtp_head_trained_by_verl_is_drafted_with(rollout: Callable[..., Any]) -> None:
    mtp = "actor_rollout_ref.model.mtp"
    arguments = rollout(
        f"{mtp}.enable=True", f"{mtp}.enable_rollout=True", f"{mtp}.num_speculative_tokens=2"
    ).engine_kwargs["vllm"]
    assert list(arguments["speculative_config"]) == ["num_speculative_tokens_per_batch_size"]
    assert {k for _, _, k in arguments["speculative_config"]["num_speculative_tokens_per_batch_size"]} == {0, 1, 2}


def test_it_is_checked_before_anything_starts(compose: Callable[..., Any]) -> None:
    from rollout_spec_verl import overrides

    assert "k_max" in refused(lambda: overrides.check(compose(TARGET, f"{GROUP}.drafter.k_max=0")))
    assert TARGET in refused(lambda: overrides.check(compose(name="rollout_spec")))
    assert TARGET in refused(lambda: overrides.check(compose(f"{GROUP}.drafter.k_max=2")))
    overrides.check(compose())
    overrides.check(compose(TARGET))


def test_the_plug_in_that_verl_loads_is_there() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    assert [importlib.import_module(module).__name__ for module in named.values()] == ["rollout_spec_verl.plugin"]


def test_verl_checks_it_too(compose: Callable[..., Any]) -> None:
    """As its trainer does, with our plug-in loaded."""
    import rollout_spec_verl.plugin  # noqa: F401
    from verl.utils import config as module

    message = refused(lambda: module.validate_config(compose(TARGET, f"{GROUP}.drafter.k_max=0"), False, False))
    assert "drafter.k_max" in message
