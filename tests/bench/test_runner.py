from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_run

from rollout_spec import cli
from rollout_spec.bench import runner
from rollout_spec.bench.arms import ArmSpec
from rollout_spec.bench.engine_process import EngineFailed
from rollout_spec.bench.results import Results, Run
from rollout_spec.bench.runner import Benchmark, check_context, warm_up_groups
from rollout_spec.config import Config, ConfigError, parse_config
from rollout_spec.workload import Group, Workload, build_workload

ARMS = ["off", "fixed:3", "goodput"]


class FakeEngine:
    """Takes the place of an engine's process. A process that dies at a chosen moment of a chosen arm, or that is
    never started at all, cannot be arranged with a real one. Runs are those of a toy cost model."""

    started: list[str]
    closed: list[str]
    log: list[tuple[str, str, int]]  # (what, arm, repeat)
    trouble: dict[tuple[str, str, int], BaseException]

    def __init__(self, config: Config, arm: ArmSpec, log: Path) -> None:
        self.arm = arm
        self.started.append(arm.name)

    def _do(self, what: str, repeat: int = -1) -> None:
        self.log.append((what, self.arm.name, repeat))
        error = self.trouble.get((what, self.arm.name, repeat))
        if error is not None:
            raise error

    def wait_ready(self) -> None:
        self._do("ready")

    def warm_up(self, groups: Sequence[Group]) -> None:
        self._do("warm_up")

    def run(self, groups: Sequence[Group], repeat: int, on_finished: Callable[[int], object]) -> Run:
        self._do("run", repeat)
        on_finished(sum(group.n for group in groups))
        return make_run(lambda live: 0 if self.arm.kind == "off" else 3, repeat)

    def close(self) -> None:
        self.closed.append(self.arm.name)


class WordTokenizer:
    """One token a word. The checks before an engine starts need lengths; a real tokenizer needs a real model."""

    def encode(self, text: str) -> list[int]:
        return [1] * len(text.split())

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **options: Any) -> list[int]:
        return self.encode(" ".join(message["content"] for message in messages))


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    for name, empty in (("started", []), ("closed", []), ("log", []), ("trouble", {})):
        monkeypatch.setattr(FakeEngine, name, empty, raising=False)
    monkeypatch.setattr(runner, "EngineProcess", FakeEngine)
    monkeypatch.setattr(runner, "load_tokenizer", lambda model: WordTokenizer())
    return FakeEngine


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def benchmark(model: Path, tmp_path: Path) -> Callable[..., Benchmark]:
    def make(arms: list[str] | None = None, repeats: int = 3, **tree: Any) -> Benchmark:
        bench = {"arms": arms or ARMS, "repeats": repeats}
        return Benchmark(parse_config({"model": str(model), "bench": bench, **tree}), tmp_path / "out")

    return make


def runs(engine: type[FakeEngine]) -> list[tuple[str, int]]:
    return [(arm, repeat) for what, arm, repeat in engine.log if what == "run"]


def saved(tmp_path: Path) -> dict[str, list[int]]:
    arms = Results.load(tmp_path / "out" / "results.json").arms
    return {arm.name: [run.repeat for run in arm.runs] for arm in arms}


def test_arms_take_turns_and_the_first_one_rotates(
    benchmark: Callable[..., Benchmark], engine: type[FakeEngine], tmp_path: Path
) -> None:
    assert benchmark().run() == []
    a, b, c = ARMS
    order = runs(engine)
    assert order == [(a, 0), (b, 0), (c, 0), (b, 1), (a, 1), (c, 1), (c, 2), (a, 2), (b, 2)]
    # No arm always follows the same one.
    for arm in ARMS:
        before = {order[i - 1][0] for i, (name, _) in enumerate(order) if name == arm and i}
        assert len(before) > 1
    assert saved(tmp_path) == {arm: [0, 1, 2] for arm in ARMS}
    assert engine.started == ARMS
    assert engine.closed == ARMS


def test_every_engine_is_warm_before_the_first_run(
    benchmark: Callable[..., Benchmark], engine: type[FakeEngine]
) -> None:
    benchmark(repeats=1).run()
    assert [what for what, _, _ in engine.log] == ["ready", "warm_up"] * 3 + ["run"] * 3


def test_the_warm_up_is_a_full_batch_that_drains(benchmark: Callable[..., Benchmark]) -> None:
    config = benchmark(engine={"max_num_seqs": 6}).config
    groups = warm_up_groups(config)
    lengths = [group.output_tokens[0] for group in groups if group.output_tokens]
    assert len(lengths) == 6
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == config.bench.warmup_tokens
    # Nothing of it is measured later.
    measured = [group for repeat in range(3) for group in build_workload(config.workload, 0, repeat).groups]
    assert {str(group.prompt) for group in groups}.isdisjoint(str(group.prompt) for group in measured)


def test_every_arm_gets_the_same_workload_and_each_repeat_another(benchmark: Callable[..., Benchmark]) -> None:
    first, second = benchmark(), benchmark()
    assert first.workloads == second.workloads
    assert len({str(workload.groups) for workload in first.workloads}) == 3


def test_resume_runs_only_what_is_missing(
    benchmark: Callable[..., Benchmark], engine: type[FakeEngine], tmp_path: Path
) -> None:
    benchmark(arms=["off", "goodput"], repeats=1).run()
    before = Results.load(tmp_path / "out" / "results.json").arm("off").run(0)
    engine.log.clear()
    engine.started.clear()
    assert benchmark(arms=["off", "goodput", "table"], repeats=2).run() == []
    assert sorted(runs(engine)) == [("goodput", 1), ("off", 1), ("table", 0), ("table", 1)]
    assert Results.load(tmp_path / "out" / "results.json").arm("off").run(0) == before
    engine.started.clear()
    assert benchmark(arms=["off", "goodput", "table"], repeats=2).run() == []
    assert engine.started == []


def test_the_interrupted_run_is_the_only_one_lost(
    benchmark: Callable[..., Benchmark], engine: type[FakeEngine], tmp_path: Path
) -> None:
    engine.trouble["run", "goodput", 1] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        benchmark().run()
    assert saved(tmp_path) == {"off": [0, 1], "fixed:3": [0, 1], "goodput": [0]}
    assert sorted(engine.closed) == sorted(ARMS)
    engine.trouble.clear()
    engine.log.clear()
    benchmark().run()
    assert sorted(runs(engine)) == [("fixed:3", 2), ("goodput", 1), ("goodput", 2), ("off", 2)]


@pytest.mark.parametrize(
    ("moment", "kept"),
    [(("ready", "fixed:3", -1), []), (("warm_up", "fixed:3", -1), []), (("run", "fixed:3", 1), [0])],
)
def test_a_failed_engine_does_not_lose_the_others(
    benchmark: Callable[..., Benchmark],
    engine: type[FakeEngine],
    tmp_path: Path,
    moment: tuple[str, str, int],
    kept: list[int],
) -> None:
    engine.trouble[moment] = EngineFailed("the engine of arm 'fixed:3' failed: out of memory; see its log")
    failures = benchmark().run()
    assert failures == ["the engine of arm 'fixed:3' failed: out of memory; see its log"]
    assert saved(tmp_path) == {"off": [0, 1, 2], "fixed:3": kept, "goodput": [0, 1, 2]}
    assert sorted(engine.closed) == sorted(ARMS)


def bench(model: Path, tmp_path: Path, *argv: str) -> int:
    out = ["--out", str(tmp_path / "out")]
    return cli.main(["bench", "--model", str(model), "--arms", ",".join(ARMS), "--repeats", "2", *out, *argv])


def test_the_exit_code_tells_of_a_failed_arm_and_the_report_is_there(
    model: Path, engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.trouble["run", "goodput", 1] = EngineFailed("the engine of arm 'goodput' failed: it is gone")
    assert bench(model, tmp_path) == 1
    printed = capsys.readouterr()
    assert "failed: the engine of arm 'goodput' failed: it is gone" in printed.err
    assert "fixed:3" in printed.out
    assert "it is gone" not in printed.out
    report = tmp_path / "out" / "report.html"
    assert str(report) in printed.out
    assert report.stat().st_size > 1000
    engine.trouble.clear()
    engine.log.clear()
    assert bench(model, tmp_path) == 0
    assert runs(engine) == [("goodput", 1)]


def test_no_arm_at_all_is_a_failure_without_a_report(model: Path, engine: type[FakeEngine], tmp_path: Path) -> None:
    for arm in ARMS:
        engine.trouble["ready", arm, -1] = EngineFailed(f"the engine of arm {arm!r} failed")
    assert bench(model, tmp_path) == 1
    assert not (tmp_path / "out" / "report.html").exists()


def test_an_interruption_is_exit_code_130_with_what_there_is(
    model: Path, engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.trouble["run", "goodput", 0] = KeyboardInterrupt()
    assert bench(model, tmp_path) == 130
    assert (tmp_path / "out" / "report.html").exists()
    assert "the same command goes on from there" in capsys.readouterr().err


# -- bad input, before any engine


def prompts_file(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--arms", "off,magic"], ["bench.arms: 'magic'", "known are off, fixed:K"]),
        (["--drafter", "magic"], ["drafter.method", "'magic'", "'ngram'"]),
        (["--arms", "goodput@magic"], ["bench.arms: 'goodput@magic'", "unknown drafter", "ngram"]),
        (["--set", "policy.name=magic"], ["policy.name", "'magic'", "'goodput'"]),
        (["--set", "drafter.k_max=0"], ["drafter.k_max", "value 0", "1"]),
        (["--set", "drafter.k_max=129"], ["drafter.k_max", "value 129", "128"]),
        (["--arms", "fixed:129"], ["bench.arms: 'fixed:129'", "up to 128"]),
        (["--set", "bench.table=[[1,4,5],[4,8,0]]"], ["bench.table", "overlaps", "must start at 5"]),
        (["--set", "bench.table=[[1,4,5],[6,8,0]]"], ["bench.table", "gap", "5 to 5"]),
        (["--workload", "magic"], ["--workload 'magic'", "heavy_tail"]),
        (["--workload", "none.jsonl"], ["--workload none.jsonl", "cannot be read"]),
        (["--config", "none.yaml"], ["--config none.yaml", "cannot be read"]),
        (["--set", "engine.max_len=3"], ["engine.max_len", "no such option", "max_model_len"]),
        (["--model", "/none/at/all"], ["model '/none/at/all'", "no such folder"]),
    ],
)
def test_bad_input_ends_before_an_engine_starts(
    model: Path,
    engine: type[FakeEngine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    said: list[str],
) -> None:
    assert bench(model, tmp_path, *argv) == 2
    message = capsys.readouterr().err
    assert message.startswith("rollout-spec: error: ")
    assert [words for words in said if words not in message] == []
    assert engine.started == []
    assert not (tmp_path / "out").exists()


def test_a_model_without_weights_ends_before_an_engine_starts(
    model: Path, engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "model.safetensors").unlink()
    assert bench(model, tmp_path) == 2
    assert f"model {str(model)!r}: the folder has no weights" in capsys.readouterr().err
    assert engine.started == []


@pytest.mark.parametrize("argv", [["--drafter", "draft_model"], ["--arms", "off,goodput@draft_model"]])
def test_a_draft_model_without_weights_ends_before_an_engine_starts(
    model: Path, engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    assert bench(model, tmp_path, "--set", f"drafter.model={draft}", *argv) == 2
    assert f"model {str(draft)!r}: the folder has no weights" in capsys.readouterr().err
    assert engine.started == []


def test_a_bad_workload_line_is_named_by_its_number(
    model: Path, engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prompts_file(tmp_path, '{"prompt": "one"}', '{"prompt": "two"', '{"prompt": "three"}')
    assert bench(model, tmp_path, "--workload", path) == 2
    assert f"--workload {path}:2: is not valid JSON" in capsys.readouterr().err
    assert engine.started == []


def test_a_prompt_beyond_the_context_is_named(
    model: Path, engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prompts_file(
        tmp_path,
        json.dumps({"prompt": "short", "output_tokens": 10}),
        json.dumps({"id": "the long one", "prompt": "word " * 91, "n": 2, "output_tokens": [3, 10]}),
    )
    options = ["--workload", path, "--set", "engine.max_model_len=100"]
    assert bench(model, tmp_path, *options) == 2
    message = capsys.readouterr().err
    assert "prompt 'the long one' has 91 tokens and a response of up to 10" in message
    assert "engine.max_model_len 100; raise it" in message
    assert engine.started == []
    assert bench(model, tmp_path, "--workload", path, "--set", "engine.max_model_len=101") == 0


def test_the_cap_of_a_natural_response_counts_for_the_context() -> None:
    workload = Workload("x", (Group("p", "word " * 60, 1, None),), 0, {})
    config = parse_config({"engine": {"max_model_len": 100}, "workload": {"max_tokens": 40}})
    tokenizer: Any = WordTokenizer()
    check_context([workload], config, tokenizer)
    with pytest.raises(ConfigError, match="a response of up to 41"):
        check_context(
            [workload],
            parse_config({"engine": {"max_model_len": 100}, "workload": {"max_tokens": 41}}),
            tokenizer,
        )


def test_results_of_another_configuration_are_not_mixed(
    model: Path, engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(model, tmp_path) == 0
    before = (tmp_path / "out" / "results.json").read_bytes()
    engine.started.clear()
    capsys.readouterr()
    assert bench(model, tmp_path, "--temperature", "0.5") == 2
    message = capsys.readouterr().err
    assert "holds results of another configuration" in message
    assert "give another output directory" in message
    assert engine.started == []
    assert (tmp_path / "out" / "results.json").read_bytes() == before


@pytest.mark.parametrize("content", ["not json", '{"schema": "another/1"}', '{"schema": "rollout-spec/bench/1"}'])
def test_a_results_file_that_is_none_is_kept(
    model: Path, engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text(content)
    assert bench(model, tmp_path) == 2
    assert str(tmp_path / "out" / "results.json") in capsys.readouterr().err
    assert engine.started == []
    assert (tmp_path / "out" / "results.json").read_text() == content


def test_an_output_directory_that_is_a_file_is_bad_input(
    model: Path, engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file")
    assert bench(model, tmp_path) == 2
    assert f"--out {tmp_path / 'out'}: is no directory" in capsys.readouterr().err
    assert engine.started == []
