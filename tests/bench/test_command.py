from __future__ import annotations

from pathlib import Path

import pytest

from rollout_spec import cli
from rollout_spec.bench.command import FLAGS, flag_overrides
from rollout_spec.config import Config, ConfigError, load_config


def configured(*argv: str) -> Config:
    args = cli.build_parser().parse_args(["bench", "--out", "out", *argv])
    return load_config(args.config, [*args.set, *flag_overrides(args)])


def test_without_flags_nothing_is_overridden() -> None:
    assert flag_overrides(cli.build_parser().parse_args(["bench", "--out", "out"])) == []


def test_every_flag_sets_its_option() -> None:
    config = configured(
        *("--model", "some/model", "--drafter", "suffix", "--arms", "off, fixed:3,goodput@ngram"),
        *("--workload", "natural", "--temperature", "0.5", "--repeats", "2", "--seed", "9", "--max-num-seqs", "5"),
    )
    assert (config.model, config.drafter.method, config.workload.name) == ("some/model", "suffix", "natural")
    assert config.bench.arms == ["off", "fixed:3", "goodput@ngram"]
    assert (config.sampling.temperature, config.engine.max_num_seqs) == (0.5, 5)
    assert (config.bench.repeats, config.bench.seed) == (2, 9)
    assert len(FLAGS) == 8


@pytest.mark.parametrize(
    "path",
    [
        "it's here.jsonl",
        'a "quoted" one.jsonl',
        "with: colon #and hash.jsonl",
        "[brackets], {braces}.jsonl",
        r"back\slash\n.jsonl",
        "line\nbreak.jsonl",
        "tab\there.jsonl",
        "häßlich 模型 🙂.jsonl",
        " spaces around ",
        "off",
        "123",
        "null",
        "~",
        "&anchor",
        "",
    ],
)
def test_odd_paths_arrive_as_they_are(path: str) -> None:
    assert configured("--workload", path).workload.name == path
    assert configured("--model", path).model == path


def test_an_odd_arm_arrives_as_it_is() -> None:
    assert configured("--arms", "it's,off,[x").bench.arms == ["it's", "off", "[x"]


def test_flags_win_over_set_and_set_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("bench: {repeats: 1, seed: 1, warmup_tokens: 1}\n")
    config = configured("--config", str(file), "--repeats", "3", "--set", "bench.repeats=2", "--set", "bench.seed=2")
    assert (config.bench.repeats, config.bench.seed, config.bench.warmup_tokens) == (3, 2, 1)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--temperature", "warm"], "sampling.temperature: value 'warm'"),
        (["--temperature", "-1"], "sampling.temperature: value -1"),
        (["--repeats", "0"], "bench.repeats: value 0"),
        (["--repeats", "1.5"], "bench.repeats: value 1.5"),
        (["--seed", ""], "bench.seed: value None"),
        (["--max-num-seqs", "[1"], "engine.max_num_seqs=[1"),
        (["--drafter", "magic"], "drafter.method: value 'magic'"),
        (["--arms", ","], "bench.arms: value []"),
    ],
)
def test_a_bad_flag_names_its_option(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(*argv)
    assert said in str(caught.value)


def test_an_output_directory_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench"])
    assert caught.value.code == 2
    assert "--out" in capsys.readouterr().err
