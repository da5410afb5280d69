from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scheduler_harness import EOS, Driver, Recorder, make_config, make_scheduler, request
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from rollout_spec.control.policy import Decision, StepResult, StepView
from rollout_spec.engine.responses import Response, take
from rollout_spec.engine.scheduler import DynamicAsyncScheduler, DynamicScheduler

both = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Any]:
    def make(settings: dict[str, Any] | None = None, **options: Any) -> Any:
        return make_config(tmp_path, settings={"policy": {"name": "off"}} if settings is None else settings, **options)

    return make


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Any:
    """What our own logger warned of so far."""
    return lambda: [
        record for record in caplog.records if record.name == "vllm.rollout_spec" and record.levelno >= logging.WARNING
    ]


def recorded(scheduler: Any, choose: Callable[[StepView], int | Decision]) -> Recorder:
    recorder = Recorder(choose)
    scheduler._loop.policy = recorder
    return recorder


def check_against_recount(recorder: Recorder, driver: Driver) -> None:
    """Every step is reported, and what is reported is what the driver counted."""
    assert len(recorder.results) == len(driver.steps) > 0
    k_before = 0
    for result, step in zip(recorder.results, driver.steps, strict=True):
        assert result.seconds > 0
        assert (result.k, result.k_next) == (k_before, step.k)
        assert (result.decode, result.prefill_tokens) == (step.decode, step.prefill_tokens)
        assert [int(n) for n in result.drafted] == step.drafted
        assert [int(n) for n in result.accepted] == step.accepted
        assert result.speculated == (step.decode if k_before else 0)
        # Between counts it is added up, and what vLLM cuts off beyond a request's end is not taken off again.
        assert result.context_tokens == pytest.approx(step.context, rel=0.02, abs=20)
        k_before = step.k


def total(counts: list[list[int]]) -> int:
    return sum(map(sum, counts))


@both
def test_the_variant_follows_the_engine(config: Callable[..., Any], asynchronous: bool) -> None:
    scheduler = make_scheduler(config(), asynchronous=asynchronous)
    assert type(scheduler) is (DynamicAsyncScheduler if asynchronous else DynamicScheduler)
    assert isinstance(scheduler, AsyncScheduler) == asynchronous


@both
@pytest.mark.parametrize("vllm_counts", [True, False], ids=["statistics", "no-statistics"])
def test_k_is_the_policys_and_reports_match_a_recount(
    config: Callable[..., Any], asynchronous: bool, vllm_counts: bool
) -> None:
    """Requests arrive late, prompts come in chunks, drafts are short, partly accepted, requests finish on the way."""
    scheduler = make_scheduler(config(), asynchronous=asynchronous, log_stats=vllm_counts)
    rng = random.Random(0)
    recorder = recorded(scheduler, lambda view: rng.randrange(5))
    driver = Driver(
        scheduler, accept=lambda name, drafts: rng.randint(0, drafts), length=lambda name, k: rng.randint(0, k)
    )
    for number in range(12):  # more than the 8 that fit, so that some wait
        scheduler.add_request(request(f"r{number}", prompt=rng.choice((3, 30, 150)), output=rng.randint(2, 40)))
        driver.step()
    driver.run()
    assert [step.k for step in driver.steps] == recorder.decided
    check_against_recount(recorder, driver)
    assert sum(driver.generated.values()) >= 12 * 2
    # The run had everything in it that could have gone wrong.
    assert total([step.accepted for step in driver.steps]) > 0
    assert total([step.drafted for step in driver.steps]) > total([step.accepted for step in driver.steps])
    assert any(step.decode and step.prefill_tokens for step in driver.steps)
    assert {0, 1, 2, 3, 4} == set(recorder.decided)
    assert any(view.waiting for view in recorder.views)


@both
def test_drafts_are_never_longer_than_k(config: Callable[..., Any], asynchronous: bool) -> None:
    scheduler = make_scheduler(config(), asynchronous=asynchronous)
    ks = iter([3, 0, 4, 1, 0, 0, 2] * 20)
    recorded(scheduler, lambda view: next(ks))
    driver = Driver(scheduler)
    scheduler.add_request(request("a", output=30))
    scheduler.add_request(request("b", output=30))
    driver.run()
    for before, step in zip(driver.steps, driver.steps[1:], strict=False):
        assert all(length <= before.k for length in step.drafts.values())
        if before.k == 0:
            assert step.drafts == {}
    assert any(step.drafts for step in driver.steps)


@both
def test_a_prompt_in_chunks_is_no_decode_until_it_is_whole(config: Callable[..., Any], asynchronous: bool) -> None:
    scheduler = make_scheduler(config(), asynchronous=asynchronous)  # 64 tokens a step
    recorder = recorded(scheduler, lambda view: 2)
    driver = Driver(scheduler)
    scheduler.add_request(request("long", prompt=150, output=3))
    driver.run()
    assert [view.decode for view in recorder.views][:4] == [0, 0, 1, 1]
    assert [result.decode for result in recorder.results][:4] == [0, 0, 0, 1]
    assert [result.prefill_tokens for result in recorder.results][:4] == [64, 64, 22, 0]


def test_a_chunked_prompt_that_is_passed_over_stays_a_prefill(config: Callable[..., Any]) -> None:
    """With as many decodes and drafts as fit in a step, the half-computed prompt behind them gets no token."""
    scheduler = make_scheduler(config(max_num_seqs=4, max_num_batched_tokens=24))
    recorder = recorded(scheduler, lambda view: 4 if view.decode < 3 or view.prefill_tokens else 0)
    driver = Driver(scheduler)
    for name in "abc":
        scheduler.add_request(request(name, prompt=2, output=60))
    driver.step()
    scheduler.add_request(request("long", prompt=100, output=2))
    recorder.choose = lambda view: 4
    # Three decodes take 5 tokens each, so a budget of 15 leaves none for the prompt.
    driver.step()
    scheduler.max_num_scheduled_tokens = 15
    driver.step()
    assert scheduler.requests["long"].is_prefill_chunk
    assert "long" not in driver.scheduler.prev_step_scheduled_req_ids
    scheduler.max_num_scheduled_tokens = 24
    driver.run()
    check_against_recount(recorder, driver)


@both
def test_preempted_requests_come_back_as_prefills(config: Callable[..., Any], asynchronous: bool) -> None:
    # 16 blocks of 16 tokens cannot hold four sequences of 80.
    scheduler = make_scheduler(config(), asynchronous=asynchronous, blocks=17)
    recorder = recorded(scheduler, lambda view: 2)
    driver = Driver(scheduler, accept=lambda name, drafts: drafts // 2)
    for name in "abcd":
        scheduler.add_request(request(name, prompt=20, output=60))
    driver.run()
    assert any(step.preempted for step in driver.steps)
    assert scheduler._loop.status()["preemptions"] == sum(step.preempted for step in driver.steps)
    check_against_recount(recorder, driver)


@both
def test_per_request_k_cuts_single_requests(config: Callable[..., Any], asynchronous: bool) -> None:
    scheduler = make_scheduler(config(), asynchronous=asynchronous)
    recorder = recorded(scheduler, lambda view: Decision(3, per_request={"b": 1, "c": 0, "gone": 2}))
    driver = Driver(scheduler)
    for name in "abc":
        scheduler.add_request(request(name, output=10))
    driver.run()
    drafts = [step.drafts for step in driver.steps if step.drafts]
    assert {name for step in drafts for name in step} == {"a", "b"}
    assert max(step.get("a", 0) for step in drafts) == 3
    assert max(step.get("b", 0) for step in drafts) == 1
    check_against_recount(recorder, driver)


class Broken(Recorder):
    """Works for five steps and then raises where `where` says."""

    where = "decide"

    def decide(self, view: StepView) -> Decision:
        if self.where == "decide" and len(self.decided) == 5:
            raise RuntimeError("no idea")
        return super().decide(view)

    def observe(self, result: StepResult) -> None:
        if self.where == "observe" and len(self.results) == 5:
            raise RuntimeError("no idea")
        super().observe(result)

    def policy_updated(self) -> None:
        raise RuntimeError("no idea")

    def metrics(self) -> dict[str, float]:
        if self.where == "metrics":
            raise RuntimeError("no idea")
        return super().metrics()


@both
@pytest.mark.parametrize("where", ["decide", "observe"])
def test_a_policy_that_fails_costs_only_speed(
    config: Callable[..., Any], errors: Any, where: str, asynchronous: bool
) -> None:
    scheduler = make_scheduler(config(), asynchronous=asynchronous)
    broken = scheduler._loop.policy = Broken(lambda view: 3)
    broken.where = where
    driver = Driver(scheduler)
    for name in "abc":
        scheduler.add_request(request(name, output=20))
    driver.run()
    assert driver.generated == dict.fromkeys("abc", 20)
    ks = [step.k for step in driver.steps]
    assert 3 in ks
    assert set(ks[8:]) == {0}
    assert scheduler._loop.status()["failed"] is True
    assert len(errors()) == 1
    assert "speculation stays off" in errors()[0].message


@pytest.mark.parametrize("choice", ["three", None, Decision("x"), Decision(2, per_request={"a": "x"})])  # type: ignore[arg-type]
def test_a_policy_that_answers_nonsense_has_failed(config: Callable[..., Any], errors: Any, choice: Any) -> None:
    scheduler = make_scheduler(config())
    recorder = recorded(scheduler, lambda view: 0)
    recorder.decide = lambda view: choice  # type: ignore[method-assign]
    driver = Driver(scheduler)
    scheduler.add_request(request("a"))
    driver.run()
    assert {step.k for step in driver.steps} == {0}
    assert len(errors()) == 1


def test_a_failure_in_policy_updated_or_metrics_reaches_nobody(
    config: Callable[..., Any], errors: Any, tmp_path: Path
) -> None:
    scheduler = make_scheduler(config())
    scheduler._loop.policy = Broken(lambda view: 3)
    assert scheduler.reset_prefix_cache() is True
    assert len(errors()) == 1
    status = tmp_path / "status.json"
    other = make_scheduler(config({"policy": {"name": "off"}, "status_file": str(status)}))
    broken = other._loop.policy = Broken(lambda view: 3)
    broken.where = "metrics"
    other.add_request(request("a", output=3))
    Driver(other).run()
    assert json.loads(status.read_text())["policy"] == {}
    assert len(errors()) == 2


@both
@pytest.mark.parametrize(("asked", "given"), [(99, 4), (-3, 0), (4, 4)])
def test_k_outside_the_limits_is_clamped(
    config: Callable[..., Any], errors: Any, asked: int, given: int, asynchronous: bool
) -> None:
    scheduler = make_scheduler(config(), asynchronous=asynchronous)
    recorded(scheduler, lambda view: asked)
    driver = Driver(scheduler)
    scheduler.add_request(request("a"))
    driver.run()
    assert {step.k for step in driver.steps} == {given}
    assert errors() == []


def test_reset_prefix_cache_tells_the_policy(config: Callable[..., Any]) -> None:
    scheduler = make_scheduler(config())
    recorder = recorded(scheduler, lambda view: 0)
    assert scheduler.reset_prefix_cache() is True
    assert recorder.updates == 1


def test_the_status_file_is_whole_json_with_the_counts(config: Callable[..., Any], tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    scheduler = make_scheduler(config({"policy": {"name": "fixed", "k": 3}, "status_file": str(status)}))
    driver = Driver(scheduler, accept=lambda name, drafts: min(drafts, 1))
    for name in "ab":
        scheduler.add_request(request(name, output=21))
    driver.run()
    found = json.loads(status.read_text())
    assert (found["k"], found["k_max"], found["failed"]) == (3, 4, False)
    assert found["drafted_per_position"] == [sum(step.drafted[j] for step in driver.steps) for j in range(4)]
    assert found["accepted_per_position"] == [sum(step.accepted[j] for step in driver.steps) for j in range(4)]
    # A step that only computes prompts is no step of a live batch.
    decodes = [step for step in driver.steps if step.decode]
    assert 0 < len(decodes) < len(driver.steps)
    assert sum(map(sum, found["steps_by_bucket_and_k"])) == len(decodes)
    assert found["steps_by_bucket_and_k"][1][3] == len(decodes)  # two sequences, always three drafts
    assert found["seconds_by_bucket"][1] > 0
    assert [file.name for file in tmp_path.glob("status*")] == ["status.json"]


def test_a_status_file_that_cannot_be_written_harms_nothing(
    config: Callable[..., Any], errors: Any, tmp_path: Path
) -> None:
    settings = {"policy": {"name": "fixed", "k": 2}, "status_file": str(tmp_path / "nowhere" / "status.json")}
    scheduler = make_scheduler(config(settings))
    driver = Driver(scheduler)
    scheduler.add_request(request("a"))
    driver.run()
    assert {step.k for step in driver.steps} == {2}
    assert ["cannot be written" in record.message for record in errors()] == [True]


def test_data_parallel_ranks_keep_k(config: Callable[..., Any], errors: Any) -> None:
    vllm_config = config({"policy": {"name": "off"}})
    vllm_config.parallel_config.data_parallel_size = 2
    driver = Driver(make_scheduler(vllm_config))
    driver.scheduler.add_request(request("a"))
    driver.run()
    assert {step.k for step in driver.steps} == {4}
    assert ["must agree on K" in record.message for record in errors()] == [True]


@both
def test_without_our_settings_it_is_vllms_scheduler(config: Callable[..., Any], asynchronous: bool) -> None:
    vllm_config = config()
    vllm_config.additional_config = {}
    ours = make_scheduler(vllm_config, asynchronous=asynchronous)
    assert ours._loop is None
    assert ours.dynamic_sd_lookup is None
    stock_class = AsyncScheduler if asynchronous else Scheduler
    stock = stock_class(
        vllm_config=vllm_config,
        kv_cache_config=ours.kv_cache_config,
        structured_output_manager=ours.structured_output_manager,
        block_size=ours.block_size,
        log_stats=True,
    )
    counted = []
    for scheduler in (ours, stock):
        driver = Driver(scheduler, accept=lambda name, drafts: drafts // 2)
        for number in range(10):
            scheduler.add_request(request(f"r{number}", prompt=3 + 20 * number, output=10 + number))
        driver.run()
        counted.append((driver.steps, driver.generated))
    assert counted[0] == counted[1]
    assert {step.k for step in counted[0][0]} == {4}


def test_without_a_drafter_there_is_nothing_to_control(config: Callable[..., Any]) -> None:
    scheduler = make_scheduler(config(k_max=0))
    assert scheduler._loop is None
    driver = Driver(scheduler)
    scheduler.add_request(request("a", output=4))
    driver.run()
    assert driver.generated == {"a": 4}


def test_a_step_without_tokens_loses_no_report(config: Callable[..., Any]) -> None:
    """The engine may process an empty step while the one before it still runs."""
    scheduler = make_scheduler(config(), asynchronous=True)
    recorder = recorded(scheduler, lambda view: 1)
    driver = Driver(scheduler)
    scheduler.add_request(request("a", output=5))
    output, result = driver._schedule()
    empty = scheduler.schedule().__class__.make_empty()
    scheduler.update_from_output(empty, result.__class__([], {}))
    scheduler.update_from_output(output, result)
    assert len(recorder.results) == 1


def test_an_aborted_request_is_forgotten(config: Callable[..., Any]) -> None:
    """Half a prompt computed and then aborted: the name must not stay behind."""
    scheduler = make_scheduler(config())
    recorder = recorded(scheduler, lambda view: 0)
    driver = Driver(scheduler)
    scheduler.add_request(request("long", prompt=200))
    driver.step()
    assert scheduler._chunked == {"long"}
    scheduler.finish_requests("long", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(request("a", output=3))
    driver.run()
    assert scheduler._chunked == set()
    assert [result.decode for result in recorder.results[-2:]] == [1, 1]


def test_the_time_an_engine_idles_after_an_abort_is_no_step_time(config: Callable[..., Any]) -> None:
    scheduler = make_scheduler(config())
    recorder = recorded(scheduler, lambda view: 0)
    driver = Driver(scheduler)
    scheduler.add_request(request("a"))
    driver.step()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler._last_end -= 1000.0  # as if it had idled for so many seconds
    scheduler.add_request(request("b", output=2))
    driver.run()
    assert max(result.seconds for result in recorder.results) < 1000.0


def test_a_sampler_known_to_be_wrong_turns_drafts_off_where_it_samples(config: Callable[..., Any]) -> None:
    scheduler = make_scheduler(config())
    recorded(scheduler, lambda view: 3)
    # On this machine our kernel may be in force, so the check's outcome is set.
    scheduler._loop.must_check_sampling = True
    driver = Driver(scheduler)
    scheduler.add_request(request("greedy", output=30))
    scheduler.add_request(request("sampled", output=5, temperature=1.0))
    driver.run()
    ks = [step.k for step in driver.steps]
    assert ks[:5] == [0] * 5
    assert set(ks[6:]) == {3}


@both
def test_responses_are_left_for_who_trains_on_them(
    config: Callable[..., Any], asynchronous: bool, tmp_path: Path
) -> None:
    file = tmp_path / "responses"
    file.write_text("of an engine before\n")
    settings = {"policy": {"name": "off"}, "responses_file": str(file)}
    scheduler = make_scheduler(config(settings), asynchronous=asynchronous)
    driver = Driver(scheduler)
    scheduler.add_request(request("capped", prompt=3, output=5, temperature=0.5))
    scheduler.add_request(request("aborted", output=50))
    for _ in range(4):
        driver.step()
    scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    driver.token = lambda name: EOS
    scheduler.add_request(request("stopped", prompt=4, ignore_eos=False))
    driver.run()
    driver.step()  # the engine is told of the last ones in a step of their own
    found = {len(one.prompt): one for one in take(file)}
    assert found[3] == Response([1, 2, 3], [*found[3].response], 0.5, ended=False)
    assert len(found[3].response) == 5
    assert found[4] == Response([1, 2, 3, 4], [EOS], 0.0, ended=True)
    assert len(found) == 2
    assert list(take(file)) == []


def test_a_response_that_is_torn_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "responses"
    line = json.dumps({"prompt": [1], "response": [2], "temperature": 1.0, "ended": True})
    file.write_text(f"{line}\n{line[:20]}")
    assert list(take(file)) == [Response([1], [2], 1.0, True)]


@both
def test_steps_at_temperature_0_are_told_apart(config: Callable[..., Any], asynchronous: bool) -> None:
    """Validation between training, and both at once: then it counts as what is sampled."""
    scheduler = make_scheduler(config(), asynchronous=asynchronous)
    recorder = recorded(scheduler, lambda view: 2)
    driver = Driver(scheduler, accept=lambda name, drafts: min(drafts, 1))
    seen = []
    for names in ("a", "B", "aB"):
        for name in names:
            scheduler.add_request(request(name, output=30, temperature=float(name.isupper())))
        before = len(recorder.results)
        driver.run()
        results = recorder.results[before:]
        seen.append([result.greedy for result in results if result.decode])
    assert all(seen[0])
    assert not any(seen[1])
    # The last steps may be of one of them alone.
    assert seen[2][:5] == [False] * 5
    status = scheduler._loop.status()
    greedy = [result for result in recorder.results if result.greedy]
    for name in ("drafted", "accepted"):
        counts = [sum(getattr(result, name)[j] for result in greedy) for j in range(4)]
        assert status[f"greedy_{name}_per_position"] == counts
        assert 0 < counts[0] < status[f"{name}_per_position"][0]
