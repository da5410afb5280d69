"""verl's own trainer through our rollout: real verl, Ray, vLLM and weight synchronisation, on this CPU.

One job goes well until its engine is killed, the next goes on from its checkpoint until its engine refuses new weights:
what both have seen by then is looked at in several tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import reward
import tiny_models
import verl_job

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROLLOUT = "actor_rollout_ref.rollout"
GROUP = f"++{ROLLOUT}.rollout_spec"
VLLM = f"++{ROLLOUT}.engine_kwargs.vllm"


class Job(NamedTuple):
    status: int
    output: str
    steps: list[dict[str, float]]
    """By verl's logger; the first job's begin with a validation."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def options(model: Path, folder: Path) -> list[str]:
    """Of both jobs. A fixed K, so that there are drafts whatever this machine's step times are."""
    head = tiny_models.make_head(model, folder / "head")
    return [
        f"{GROUP}.policy={{name: fixed, k: 3}}",
        f"{GROUP}.drafter={{method: eagle3, model: {head}, k_max: 3}}",
        f"{GROUP}.refresh={{policy: every, folder: {folder}/draft, seconds: 1e5, timeout: 2e5, rate_share: 2.0}}",
        f"{GROUP}.draft={{max_passes: 60, batch_tokens: 256}}",
        "trainer.total_training_steps=6",
        "trainer.total_epochs=2",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def killed(folder: Path, model: Path, options: list[str]) -> Job:
    """A validation, three steps and a checkpoint, a refresh after each; killed in the fourth step."""
    more = [
        f"{GROUP}.refresh.every=1",
        f"{VLLM}.worker_extension_cls=faulty_workers.KilledExtension",
        "trainer.val_before_train=True",
        "trainer.save_freq=3",
    ]
    status, output = verl_job.run(folder, model, [*options, *more], {reward.REFRESHES: str(folder / "draft")})
    return Job(status, output, verl_job.steps(folder))


@pytest.fixture(scope="module")
def resumed(folder: Path, model: Path, options: list[str], killed: Job) -> Job:
    """Its fourth and fifth step, in an engine that is short of cache; it takes no weights after the fifth."""
    more = [
        f"{GROUP}.refresh.every=9",
        f"{GROUP}.weight_sync_seconds=10",
        f"{VLLM}.worker_extension_cls=faulty_workers.FailingExtension",
        f"{VLLM}.block_size=32",
        f"{VLLM}.num_gpu_blocks_override=20",
        "trainer.resume_mode=auto",
    ]
    status, output = verl_job.run(folder, model, [*options, *more])
    return Job(status, output, verl_job.steps(folder))


def test_steps_of_grpo_with_speculation(killed: Job) -> None:
    assert [step.get("training/global_step") for step in killed.steps] == [None, 1, 2, 3], killed.output[-6000:]
    _, *steps = killed.steps
    updates = [step["rollout_spec/weight_updates"] for step in steps]
    assert updates == [updates[0], updates[0] + 1, updates[0] + 2]
    for step in steps:
        # Plain verl has 0.0018 and 0.014 with such a model.
        assert step["training/rollout_probs_diff_mean"] < 0.005
        assert step["training/rollout_probs_diff_max"] < 0.05
        assert step["rollout_spec/engines"] == 1
        assert 0 < step["rollout_spec/collect_seconds"] < 60
        assert step["rollout_spec/controller_failed"] == 0
        assert 0 <= step["rollout/spec_accept_rate"] <= 1
        assert 1 <= step["rollout/spec_accept_length"] <= 4
        assert any(name.startswith("rollout_spec/mean_k/live_from_") for name in step)


def test_validation_has_statistics_of_its_own(killed: Job) -> None:
    validation, *steps = killed.steps
    assert 1 <= validation["rollout_spec/greedy_accept_length"] <= 4
    assert "rollout/spec_accept_length" not in validation
    assert not any("rollout_spec/greedy_accept_length" in step for step in steps)


def test_the_head_in_the_engine_changes_after_policy_updates(killed: Job) -> None:
    """Trained on the first step's responses and the weights after it; in the engine since the end of the second."""
    _, second, third = killed.steps[1:]
    refreshes = [{name: value for name, value in step.items() if "refresh" in name} for step in killed.steps]
    assert [step["rollout_spec/draft_version"] for step in killed.steps] == [0, 0, 1, 1], refreshes
    marks = [step["rollout_spec/draft_fingerprint"] for step in killed.steps]
    assert marks[0] == marks[1] != marks[2] == marks[3]
    assert 0 not in marks
    assert third["rollout_spec/draft_refreshes"] == 1  # the controller knows
    assert second["rollout_spec/refresh_predicted_after"] > second["rollout_spec/refresh_predicted_before"]
    assert second["rollout_spec/refresh_seconds"] > 0
    assert third["rollout_spec/refresh_done"] == 1
    assert third["rollout_spec/refresh_faults"] == third["rollout_spec/refresh_failed"] == 0


def test_an_engine_that_is_killed_in_mid_generation_ends_the_job(killed: Job) -> None:
    assert killed.status not in (0, -1)
    assert "EngineDeadError" in killed.output


def test_a_resumed_job_goes_on_with_policy_head_and_rollouts(killed: Job, resumed: Job) -> None:
    assert [step["training/global_step"] for step in resumed.steps] == [4], resumed.output[-6000:]
    [step], last = resumed.steps, killed.steps[-1]
    assert step["rollout_spec/draft_version"] == 1
    assert step["rollout_spec/draft_fingerprint"] == last["rollout_spec/draft_fingerprint"]
    assert step["rollout_spec/refresh_buffer_responses"] > last["rollout_spec/refresh_buffer_responses"]


def test_an_engine_short_of_cache_samples_rightly(resumed: Job) -> None:
    [step] = resumed.steps
    assert step["rollout_spec/preemptions"] > 0
    assert step["training/rollout_probs_diff_mean"] < 0.005
    assert step["training/rollout_probs_diff_max"] < 0.05


def test_an_engine_that_fails_in_a_weight_update_ends_the_job(resumed: Job) -> None:
    """Plain verl waits for ever."""
    assert resumed.status not in (0, -1)
    assert "a planted failure" in resumed.output
    assert "did not take new weights within 10 s" in resumed.output


def test_a_wrong_option_ends_the_job_before_ray_starts(tmp_path: Path, model: Path) -> None:
    status, output = verl_job.run(tmp_path, model, [f"{GROUP}.drafter.k_max=0"])
    assert status not in (0, -1)
    assert "actor_rollout_ref.rollout.rollout_spec: drafter.k_max: value 0" in output
    assert "ray init" not in output
