from __future__ import annotations

from pathlib import Path

import pytest

from rollout_spec.cli import main
from rollout_spec.config import Config, ConfigError, parse_config
from rollout_spec.draft.command import _ks
from rollout_spec.draft.prompts import PROFILE_REPEAT, split_prompts, unseen_prompts
from rollout_spec.draft.samples import Sample, append_sample, read_samples
from rollout_spec.draft.schedule import Clock
from rollout_spec.profile.run import HELD_OUT_REPEAT
from rollout_spec.workload import build_workload, generate_prompts


def test_no_benchmark_or_held_out_question_is_trained_on() -> None:
    config = Config(draft={"responses": 600, "held_out": 40})
    split = split_prompts(config)
    trained = {prompt.prompt_id for prompt in split.training}
    held_out = {prompt.prompt_id for prompt in split.held_out}
    bench = {
        group.prompt_id
        for repeat in range(5)
        for group in build_workload(config.workload.model_copy(update={"num_prompts": 64}), 0, repeat).groups
    }
    assert (len(trained), len(held_out)) == (600, 40)
    assert not trained & held_out
    assert not (trained | held_out) & bench


def test_prompts_of_a_file_are_split_and_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f'{{"id": "p{i}", "prompt": "{i} + 2 = ?", "n": 8}}\n' for i in range(20)))
    options = {"prompts": str(path), "held_out": 5, "responses": 12}
    split = split_prompts(Config(draft=options))
    held_out, training = ({group.prompt_id for group in some} for some in (split.held_out, split.training))
    assert (len(held_out), len(training)) == (5, 12)
    assert not held_out & training
    assert held_out != {f"p{i}" for i in range(5)}  # at random
    assert split == split_prompts(Config(draft=options))
    with path.open("a") as file:  # the same words under other ids
        file.writelines(f'{{"id": "again{i}", "prompt": "{i} + 2 = ?"}}\n' for i in range(20))
    again = split_prompts(Config(draft=options | {"responses": 100}))
    assert len({group.prompt for group in [*again.held_out, *again.training]}) == 20 == len(again.training) + 5
    with pytest.raises(ConfigError, match=r"mine.jsonl: has 20 different prompts, and draft.held_out 20"):
        split_prompts(Config(draft=options | {"held_out": 20}))
    path.write_text('{"prompt": 3}\n')
    with pytest.raises(ConfigError, match=r"draft.prompts .*mine.jsonl:1: prompt 3"):
        split_prompts(Config(draft=options))
    with pytest.raises(ConfigError, match=r"draft\.prompts"):
        parse_config({"draft": {"prompts": "mine.txt"}})


def test_a_forbidden_question_is_replaced() -> None:
    first = generate_prompts(20, seed=3)
    fresh = unseen_prompts(20, 3, {prompt.id for prompt in first[:15]})
    assert len({prompt.id for prompt in fresh}) == 20
    assert not {prompt.id for prompt in fresh} & {prompt.id for prompt in first[:15]}


def test_the_profilers_held_out_repeat_is_known() -> None:
    assert PROFILE_REPEAT == HELD_OUT_REPEAT


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    samples = [Sample("a", [1, 2], [3], 1.0, True), Sample("b", [1], [4, 5], 0.0, False)]
    with path.open("w") as file:
        for sample in samples:
            append_sample(file, sample)
        file.write('{"prompt_id": "c", "prom')
    assert read_samples(path) == samples
    assert read_samples(tmp_path / "none.jsonl") == []


def test_the_clock_adds_sessions_up_and_knows_its_run(tmp_path: Path) -> None:
    clock = Clock(tmp_path, "one", minutes=1)
    with pytest.raises(KeyboardInterrupt), clock.phase("generate"):
        raise KeyboardInterrupt
    again = Clock(tmp_path, "one", minutes=1)
    assert again.seconds["generate"] == clock.seconds["generate"] > 0
    assert again.finished == []
    with again.phase("generate"):
        pass
    assert Clock(tmp_path, "one", minutes=2).finished == ["generate"]
    with pytest.raises(ConfigError, match="another configuration"):
        Clock(tmp_path, "two", minutes=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["draft", "train", "--out", "OUT", "--set", "draft.minutes=0"], "draft.minutes"),
        (["draft", "train", "--out", "OUT", "--set", "draft.features_gib=1e6"], "draft.features_gib"),
        (["draft", "train", "--out", "OUT", "--set", "draft.max_tokens=4000"], "draft.max_tokens 4000"),
        (["draft", "train", "--out", "OUT", "--set", "draft.aux_layers=[9]"], "draft.aux_layers"),
        (["draft", "train", "--out", "OUT", "--set", "model=/nowhere/model"], "no such folder"),
        (["draft", "train", "--out", "OUT", "--init", "OUT/none"], "none"),
        (["draft", "eval", "--head", "OUT"], "OUT"),
        (["draft", "info", "OUT"], "config.json"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_target: Path
) -> None:
    words = [word.replace("OUT", str(tmp_path)) for word in arguments]
    if "train" in words and not any("model=" in word for word in words):
        words += ["--set", f"model={tiny_target}"]
    assert main(words) == 2
    assert said.replace("OUT", str(tmp_path)) in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "a", "0", "1,,2", "99"])
def test_ks_are_checked(text: str) -> None:
    with pytest.raises(ConfigError, match="--ks"):
        _ks(text)


def test_eagle3_drafts_by_sampling_unless_told_otherwise() -> None:
    from rollout_spec.engine.launch import speculative_config

    drafter = parse_config({"drafter": {"method": "eagle3", "model": "some/head"}}).drafter
    spec = speculative_config(drafter)
    assert spec["draft_sample_method"] == "probabilistic"
    assert spec["draft_load_config"] == {"load_format": "auto"}
    greedy = speculative_config(drafter.model_copy(update={"sampling": "greedy"}))
    assert greedy["draft_sample_method"] == "greedy"
    assert "draft_sample_method" not in speculative_config(parse_config({}).drafter)
