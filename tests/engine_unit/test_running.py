"""Context and expected lengths of the running sequences, as the scheduler tells them to a policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_harness import EOS, Driver, Recorder, make_config, make_scheduler, request
from vllm.v1.request import RequestStatus

from rollout_spec.control.policy import LENGTH_SD
from rollout_spec.engine import running
from rollout_spec.engine.running import RECOUNT_STEPS, REFRESH_LEAST, REFRESH_SHARE, Running

both = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Any]:
    return lambda **options: make_config(tmp_path, settings={"policy": {"name": "off"}}, **options)


def recorded(scheduler: Any, k: int = 0, wants_requests: bool = False) -> Recorder:
    recorder = scheduler._loop.policy = Recorder(lambda view: k)
    if wants_requests:
        recorder.wants_requests = True  # type: ignore[attr-defined]
    return recorder


def test_the_context_is_the_true_sum(config: Callable[..., Any]) -> None:
    """Prompts of all sizes, in chunks too, requests that wait and finish; nothing beyond an end is accepted."""
    scheduler = make_scheduler(config())
    recorder, rng = recorded(scheduler, k=3), random.Random(0)
    driver = Driver(scheduler)
    for number in range(20):
        scheduler.add_request(request(f"r{number}", prompt=rng.choice((3, 30, 150)), output=rng.randint(2, 60)))
        driver.step()
    driver.run()
    assert [view.context_tokens for view in recorder.views] == [step.context_next for step in driver.steps]
    assert [result.context_tokens for result in recorder.results] == [step.context for step in driver.steps]
    assert max(view.context_tokens for view in recorder.views) > 400


@both
def test_the_context_is_near_with_drafts_accepted_and_sequences_preempted(
    config: Callable[..., Any], asynchronous: bool
) -> None:
    scheduler = make_scheduler(
        config(max_num_seqs=64, max_num_batched_tokens=512), asynchronous=asynchronous, blocks=150
    )
    recorder, rng = recorded(scheduler, k=3), random.Random(1)
    driver = Driver(scheduler, accept=lambda name, drafts: rng.randint(0, drafts))
    for number in range(70):
        scheduler.add_request(request(f"r{number}", prompt=rng.randint(5, 60), output=rng.randint(20, 80)))
    driver.run()
    assert any(step.preempted for step in driver.steps)
    for result, step in zip(recorder.results, driver.steps, strict=True):
        assert result.context_tokens == pytest.approx(step.context, rel=0.1, abs=20)


def test_the_context_is_counted_seldom(config: Callable[..., Any]) -> None:
    scheduler = make_scheduler(config())
    recorded(scheduler)
    driver = Driver(scheduler)
    for name in "abcd":
        scheduler.add_request(request(name, output=100))
    driver.step()
    counts = 0
    for _ in range(4 * RECOUNT_STEPS):
        driver.step()
        counts += scheduler._running._age == 0
    assert counts == 4


def finish(scheduler: Any, lengths: dict[str, int], driver: Driver, cap: int = 200) -> None:
    """Run a request each, with end-of-sequence sampled after so many tokens; its name's number is its prompt."""
    for name in lengths:
        scheduler.add_request(request(name, prompt=int(name[1:]), output=cap, ignore_eos=False))
    driver.run()


def ending(lengths: dict[str, int], driver: list[Driver]) -> Callable[[str], int]:
    return lambda name: EOS if driver[0].generated.get(name, 0) == lengths.get(name, 999) - 1 else 7


def test_remaining_lengths_come_from_earlier_responses_to_the_prompt(config: Callable[..., Any]) -> None:
    scheduler = make_scheduler(config())
    recorder = recorded(scheduler, wants_requests=True)
    lengths = {"a3": 10, "b3": 12, "c4": 100, "d4": 110}
    drivers: list[Driver] = []
    drivers.append(Driver(scheduler, token=ending(lengths, drivers)))
    finish(scheduler, lengths, drivers[0])
    assert recorder.views[0].requests
    # Nothing has finished yet: as long as each may be, its cap, and that is sure.
    assert set(recorder.views[0].remaining) == {200.0}
    assert recorder.views[0].remaining_sd == 0.0
    assert drivers[0].generated == lengths
    # The next epoch. Those before it count, and all prompts together for a prompt that is new.
    for name, prompt in (("short", 3), ("long", 4), ("new", 5)):
        scheduler.add_request(request(name, prompt=prompt, output=200, ignore_eos=False))
    before = len(recorder.views)
    drivers[0].step()
    view = recorder.views[before]
    assert view.requests == ("short", "long", "new")
    short, long, new = view.remaining
    assert view.remaining_sd == LENGTH_SD
    assert 10 < short < 50 < new < 70 < long < 110
    for _ in range(40):
        drivers[0].step()
    # Beyond what its own prompt has shown, the others speak for it.
    view = recorder.views[-1]
    assert view.remaining[0] == pytest.approx(view.remaining[2])
    assert 40 < view.remaining[1] < 80


def test_a_length_that_is_imposed_is_known(config: Callable[..., Any]) -> None:
    scheduler = make_scheduler(config())
    recorder = recorded(scheduler, wants_requests=True)
    driver = Driver(scheduler)
    scheduler.add_request(request("imposed", output=50, min_tokens=50, ignore_eos=False))
    scheduler.add_request(request("endless", output=40))
    scheduler.add_request(request("context", prompt=500, output=100))  # 512 tokens fit
    for _ in range(2 + 8):
        driver.step()
    left = [dict(zip(view.requests, view.remaining, strict=True)) for view in recorder.views]
    assert left[0] == {"imposed": 50.0, "endless": 40.0}
    assert left[-1]["imposed"] == pytest.approx(50 - 9, abs=REFRESH_LEAST)
    assert left[-1]["endless"] == pytest.approx(40 - 9, abs=REFRESH_LEAST)
    assert {step["context"] for step in left if "context" in step} <= {float(n) for n in range(1, 13)}


def test_a_cap_holds_and_an_aborted_response_is_no_length(config: Callable[..., Any]) -> None:
    scheduler = make_scheduler(config())
    recorder = recorded(scheduler, wants_requests=True)
    lengths = {"a3": 100}
    drivers: list[Driver] = []
    drivers.append(Driver(scheduler, token=ending(lengths, drivers)))
    finish(scheduler, lengths, drivers[0])
    scheduler.add_request(request("gone", prompt=3, output=200, ignore_eos=False))
    drivers[0].step()
    scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(request("capped", prompt=3, output=20, ignore_eos=False))
    drivers[0].step()
    assert recorder.views[-1].remaining == (20.0,)
    assert scheduler._running._lengths.expected("other") == 100.0
    drivers[0].run()
    assert scheduler._running._requests.keys() <= {"capped"}


@both
def test_lengths_are_kept_for_those_alone_who_ask(config: Callable[..., Any], asynchronous: bool) -> None:
    known = []
    for wants in (False, True):
        scheduler = make_scheduler(config(), asynchronous=asynchronous)
        recorder = recorded(scheduler, k=2, wants_requests=wants)
        driver = Driver(scheduler)
        for number in range(10):
            scheduler.add_request(request(f"r{number}", output=5 + number))
        driver.run()
        scheduler.add_request(request("last"))
        driver.step()
        known.append(scheduler._running._lengths.known)
        assert all(len(view.remaining) == len(view.requests) for view in recorder.views)
        assert any(view.requests for view in recorder.views) == wants
        assert scheduler._running._bounds.keys() == scheduler._running._requests.keys() if wants else known == [False]
    assert known == [False, True]


def test_expected_lengths_are_made_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Running(10_000)
    params = SimpleNamespace(ignore_eos=False, stop=[], stop_token_ids=[], min_tokens=0, temperature=1.0)
    live = {
        f"r{n}": SimpleNamespace(
            num_tokens=20, num_output_tokens=n, num_prompt_tokens=5, max_tokens=900, prompt_token_ids=[n // 8],
            sampling_params=params, status=RequestStatus.RUNNING,
        )
        for n in range(256)
    }  # fmt: skip
    for name, one in live.items():
        table.join(name, one)  # type: ignore[arg-type]
    table._lengths.finished(1, 300)
    asked: list[str] = []
    real = Running._expect
    monkeypatch.setattr(running.Running, "_expect", lambda self, name: asked.append(name) or real(self, name))
    names = tuple(live)
    for _ in range(320):
        assert len(table.remaining(names).tokens) == 256
    assert len(asked) == pytest.approx(320 * REFRESH_SHARE, rel=0.2)
    # One that comes or goes is not all of them.
    asked.clear()
    table.finished(["r7"], learn=True)
    fewer = tuple(name for name in names if name != "r7")
    assert len(table.remaining(fewer).tokens) == 255
    assert asked == []
