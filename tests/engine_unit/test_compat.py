from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

from rollout_spec import cli
from rollout_spec.engine import compat, sampler_check
from rollout_spec.engine.compat import Check

SUFFIX, EAGLE = compat.OPTIONAL


def problems() -> dict[str, str]:
    return {check.name: check.problem for check in compat.checks() if check.problem}


def test_the_installed_vllm_has_all_that_is_needed() -> None:
    needed = [check for check in compat.checks() if check.purpose != SUFFIX]
    assert len(needed) > 5
    assert [check for check in needed if check.problem] == []


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        ("0.24.0", True),
        ("0.31.0+cpu", True),
        ("0.24rc1", True),
        ("1.0", True),
        ("0.23.9", False),
        ("0.9.2", False),
        ("0.1.dev1+g123", False),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, ok: bool) -> None:
    monkeypatch.setattr(compat, "version", lambda distribution: version)
    check = next(compat.checks())
    assert (check.problem is None) == ok
    if check.problem:
        assert version in check.problem
        assert "upgrade" in check.problem


def test_without_vllm_there_is_one_problem_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(distribution: str) -> str:
        raise compat.PackageNotFoundError(distribution)

    monkeypatch.setattr(compat, "version", version)
    (check,) = compat.checks()
    assert check.problem
    assert "pip install 'vllm>=0.24'" in check.problem


def without_k(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SchedulerOutput.__annotations__, "num_spec_tokens_to_schedule")


def without_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Scheduler, "_update_after_schedule")


def with_other_propose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SuffixDecodingProposer, "propose", lambda self, batch: [])


def with_other_eagle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagleProposer, "propose", lambda self, batch: [])


def without_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "entry_points", lambda group: [])


def with_wrong_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_check, "_gives_right_result", lambda kernel: False)


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (without_k, "K per step", "cannot change K between steps"),
        (without_hook, "scheduler hooks", "no Scheduler._update_after_schedule"),
        (with_other_propose, "suffix hook", "propose takes ['self', 'batch']"),
        (with_other_eagle, "EAGLE hook", "EagleProposer.propose takes ['self', 'batch']"),
        (without_plugin, "plug-in", "pip install this package"),
        pytest.param(
            with_wrong_sampler,
            "sampler on CPU",
            "rejection sampler is wrong",
            marks=pytest.mark.skipif(not current_platform.is_cpu(), reason="on a GPU there is no such kernel"),
        ),
    ],
)
def test_what_upstream_changed_is_named(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], name: str, said: str
) -> None:
    change(monkeypatch)
    assert said in problems()[name]


def test_a_check_that_raises_is_a_problem_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str | None:
        raise KeyError("x")

    monkeypatch.setattr(compat, "_TESTS", (("broken", "nothing", broken), ("fine", "nothing", lambda: None)))
    assert problems() == {"broken": "KeyError: 'x'"}


def check(problem: str | None, purpose: str = "the engine") -> Check:
    return Check("thing", purpose, problem)


@pytest.mark.parametrize(
    ("found", "code", "verdict"),
    [
        ([check(None)], 0, "Everything that dynamic speculation needs is here."),
        (
            [check(None), check("arctic is missing: install it", SUFFIX)],
            0,
            "Works, but without the suffix drafter: arctic is missing: install it",
        ),
        ([check("it changed", EAGLE)], 0, "Works, but without EAGLE heads: it changed"),
        (
            [check("arctic is missing", SUFFIX), check("vLLM is too old: upgrade it"), check("more")],
            1,
            "Dynamic speculation cannot run here: vLLM is too old: upgrade it",
        ),
    ],
)
def test_doctor_says_it_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: list[Check], code: int, verdict: str
) -> None:
    monkeypatch.setattr(compat, "checks", lambda: iter(found))
    assert cli.main(["doctor"]) == code
    printed, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n\n")
    assert last == verdict
    assert printed.count("MISSING") == sum(one.problem is not None for one in found)
    assert printed.count("ok  ") == sum(one.problem is None for one in found)


def test_doctor_names_machine_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor"])
    printed = capsys.readouterr().out
    assert printed.startswith("device ")
    assert f"vllm {compat.vllm_version()}" in printed
    assert all(name in printed for name, _, _ in compat._TESTS)
