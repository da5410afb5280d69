"""Refreshes in their own process, of a real head for a policy that really moved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from chain import VOCABULARY, Moved, responses
from refreshing import DRAFT, OPTIONS, K, finish, kept

from rollout_spec.config import ConfigError, RefreshConfig
from rollout_spec.draft.acceptance import judge_samples
from rollout_spec.draft.checkpoint import load_head
from rollout_spec.draft.features import Target
from rollout_spec.draft.loss import Shared
from rollout_spec.draft.refresh_job import RESULT, split
from rollout_spec.draft.refresher import Refresher
from rollout_spec.draft.samples import Sample
from rollout_spec.files import write_json


def predicted(head: Path, policy: Path, samples: list[Sample]) -> float:
    """On responses that no head was trained on."""
    saved = load_head(head)
    target = Target(policy, saved.head.shape.aux_layers)
    shared = Shared.of(target.embedding, target.output, saved.ids)
    [*_, row] = judge_samples(saved.rounded(), shared, target, samples, 4096, K)
    return float(row["acceptance_length"])


@pytest.mark.slow
def test_a_moved_policy_makes_the_head_stale_and_a_refresh_brings_it_back(
    moved: Moved, first_head: Path, tmp_path: Path
) -> None:
    unseen = responses(moved.before, 24, 7000), responses(moved.after, 24, 8000)
    assert predicted(first_head, moved.before, unseen[0]) > 2.5
    frozen = predicted(first_head, moved.after, unseen[1])
    assert frozen < 1.5

    refresher = Refresher(tmp_path, OPTIONS, DRAFT)
    (tmp_path / "refresh-1").mkdir()
    refresher.start(moved.after, first_head, kept(moved.samples_after, 1), K, 1)
    second = finish(refresher)
    assert second.head is not None, second.problem
    assert predicted(second.head, moved.after, unseen[1]) > frozen + 1.0
    assert second.policy_version == 1
    assert second.before == pytest.approx(frozen, abs=0.3)
    assert second.after is not None
    assert second.after > 2.5
    assert second.cost > 0
    known = load_head(second.head).provenance
    assert known["init"] == str(first_head)
    assert known["target"]["policy_version"] == 1

    # The head that the next one starts from stays, what is older goes.
    refresher.start(moved.after, second.head, kept(moved.samples_after[:1]), K, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["refresh-2", "refresh-3"]
    assert "it takes two prompts" in finish(refresher).problem


def test_a_head_that_is_no_better_is_not_offered(moved: Moved, tmp_path: Path) -> None:
    still = DRAFT.model_copy(update={"max_passes": 0.1, "rate": 1e-12, "matrix_rate": 1e-12, "weight_decay": 0.0})
    refresher = Refresher(tmp_path, OPTIONS, still)
    refresher.start(moved.before, moved.untrained, kept(moved.samples_before[:40]), K, 0)
    outcome = finish(refresher)
    assert outcome.head is None
    assert outcome.before == outcome.after
    assert "no better" in outcome.problem


def test_bad_data_is_named(moved: Moved, tmp_path: Path) -> None:
    beyond = [Sample("a", [1, 2], [VOCABULARY + 5] * 9, 1.0, True), Sample("b", [1], [4] * 9, 1.0, True)]
    refresher = Refresher(tmp_path, OPTIONS, DRAFT)
    refresher.start(moved.before, moved.untrained, kept(beyond), K, 0)
    outcome = finish(refresher)
    assert outcome.head is None
    assert "index out of range" in outcome.problem
    (tmp_path / "broken").mkdir()
    refresher.start(moved.before, tmp_path / "broken", kept(moved.samples_before), K, 0)
    assert "config.json" in finish(refresher).problem


def test_a_killed_process_and_one_that_takes_too_long_are_told(moved: Moved, tmp_path: Path) -> None:
    refresher = Refresher(tmp_path, OPTIONS, DRAFT)
    refresher.start(moved.before, moved.untrained, kept(moved.samples_before), K, 0)
    [child] = jobs_of(os.getpid())
    child.kill()
    killed = finish(refresher)
    assert (killed.head, "signal 9" in killed.problem) == (None, True)

    slow = Refresher(tmp_path, RefreshConfig(seconds=1e-3, timeout=2e-3), DRAFT)
    slow.start(moved.before, moved.untrained, kept(moved.samples_before), K, 0)
    late = finish(slow)
    assert (late.head, "refresh.timeout" in late.problem) == (None, True)
    assert not jobs_of(os.getpid())


def test_a_process_that_is_slow_to_leave_is_not_waited_for(moved: Moved, tmp_path: Path) -> None:
    """Stopped in its tracks, and its result written in its stead: slowness can't be made otherwise."""
    refresher = Refresher(tmp_path, OPTIONS, DRAFT)
    refresher.start(moved.before, moved.untrained, kept(moved.samples_before), K, 5)
    [child] = jobs_of(os.getpid())
    child.suspend()
    assert refresher.poll() is None
    write_json(tmp_path / "refresh-1" / RESULT, {"before": 1.0, "after": 2.0, "cpu_seconds": 3.0})
    outcome = refresher.poll()
    assert outcome is not None
    assert (outcome.head, outcome.problem) == (tmp_path / "refresh-1" / "head", "")
    assert not jobs_of(os.getpid())


PARENT = """
import os, sys, time
from pathlib import Path
from rollout_spec.config import DraftConfig, RefreshConfig
from rollout_spec.draft.refresher import Refresher
refresher = Refresher(Path(sys.argv[1]), RefreshConfig(seconds=1e5, timeout=2e5), DraftConfig(max_passes=1e6))
refresher.start(Path(sys.argv[2]), Path(sys.argv[3]), [], 3, 0)
print(refresher._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_it_ends_with_its_parent(moved: Moved, tmp_path: Path) -> None:
    arguments = [str(tmp_path), str(moved.before), str(moved.untrained)]
    done = subprocess.run([sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    psutil.wait_procs([psutil.Process(int(done.stdout))] if psutil.pid_exists(int(done.stdout)) else [], timeout=120)
    assert not psutil.pid_exists(int(done.stdout)) or psutil.Process(int(done.stdout)).status() == "zombie"


def test_responses_to_one_prompt_are_not_judged_by_and_trained_on() -> None:
    samples = [Sample(f"p{i % 17}", [1], [i], 1.0, True) for i in range(100)]
    training, judging = split(samples)
    assert len(training) + len(judging) == 100
    assert not {s.prompt_id for s in training} & {s.prompt_id for s in judging}
    assert 0 < len(judging) < 30
    with pytest.raises(ConfigError, match="1 prompts"):
        split(samples[:1])


def jobs_of(parent: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(parent).children() if "refresh_job" in " ".join(child.cmdline())]
