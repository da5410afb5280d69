from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_spec.config import Config, ConfigError, check_table, load_config, parse_config


def fault(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree, "x.yaml")
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "config.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize(
    "path",
    # verl's jobs are verl's configurations: tests/verl_integration.
    sorted(path for path in CONFIGS.glob("**/*.yaml") if path.parent.name != "verl"),
    ids=lambda path: path.stem,
)
def test_the_configurations_we_ship_are_valid(path: Path) -> None:
    assert (load_config(path) == Config()) == (path.stem == "worker"), "worker.yaml lists every option's default"


def test_nothing_given_is_the_defaults(file: Any) -> None:
    assert load_config() == load_config(file("")) == load_config(file("# only a comment\n")) == Config()


def test_overrides_win_over_the_file_and_the_last_one_wins(file: Any) -> None:
    path = file("model: a\ndrafter: {method: suffix, k_max: 4, suffix: {max_tree_depth: 9}}\n")
    config = load_config(
        path, ["drafter.k_max=5", "drafter.k_max=6", "drafter.suffix.min_token_prob=0.5", "bench.arms=[off, 'fixed:2']"]
    )
    assert (config.model, config.drafter.method, config.drafter.k_max) == ("a", "suffix", 6)
    assert (config.drafter.suffix.max_tree_depth, config.drafter.suffix.min_token_prob) == (9, 0.5)
    assert config.bench.arms == ["off", "fixed:2"]


def test_an_empty_group_in_the_file_can_be_filled(file: Any) -> None:
    assert load_config(file("drafter:\n"), ["drafter.k_max=5"]).drafter.k_max == 5


def test_extra_takes_any_key() -> None:
    config = load_config(None, ["engine.extra.block_size=32", "drafter.extra={quantization: fp8}"])
    assert config.engine.extra == {"block_size": 32}
    assert config.drafter.extra == {"quantization": "fp8"}


def test_a_bare_off_is_off(file: Any) -> None:
    """YAML 1.1 reads it as false."""
    config = load_config(file("policy: {name: off}\nbench: {arms: [off, table]}\n"))
    assert (config.policy.name, config.bench.arms) == ("off", ["off", "table"])
    assert load_config(None, ["policy.name=off"]).policy.name == "off"


@pytest.mark.parametrize(
    ("tree", "option", "value", "remedy"),
    [
        ({"drafter": {"k_max": 0}}, "drafter.k_max", "0", "greater than or equal to 1"),
        ({"drafter": {"k_max": 129}}, "drafter.k_max", "129", "less than or equal to 128"),
        ({"drafter": {"k_max": "many"}}, "drafter.k_max", "'many'", "valid integer"),
        ({"drafter": {"method": "magic"}}, "drafter.method", "'magic'", "'suffix'"),
        ({"drafter": {"method": "eagle"}}, "drafter", "'eagle'", "needs `model`"),
        ({"drafter": {"prompt_lookup_max": 1}}, "drafter", "prompt_lookup_max 1", "must be at least that"),
        ({"policy": {"name": "magic"}}, "policy.name", "'magic'", "'goodput'"),
        ({"policy": {"name": "table"}}, "policy", "'table'", "needs `table`: [[lo, hi, K], ...]"),
        ({"policy": {"name": "fixed", "k": 9}}, "policy.k", "9", "raise k_max"),
        ({"policy": {"name": "threshold", "k": 9}}, "policy.k", "9", "raise k_max"),
        ({"policy": {"name": "table", "table": [[1, 8, 9]]}}, "policy.table", "K=9", "k_max"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature", "-1", "greater than or equal to 0"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p", "0", "greater than 0"),
        ({"bench": {"arms": []}}, "bench.arms", "[]", "at least 1"),
        ({"bench": {"repeats": 0}}, "bench.repeats", "0", "greater than or equal to 1"),
        ({"engine": "fast"}, "engine", "'fast'", "dictionary"),
        ({"model": 7}, "model", "7", "string"),
    ],
)
def test_a_bad_value_names_option_value_and_remedy(tree: dict[str, Any], option: str, value: str, remedy: str) -> None:
    message = fault(tree)
    assert message.startswith("x.yaml: ")
    assert option in message
    assert value in message
    assert remedy in message


def test_k_max_limits_are_allowed() -> None:
    for k_max in (1, 128):
        assert parse_config({"drafter": {"k_max": k_max}}).drafter.k_max == k_max


def test_policies_that_have_no_k_are_not_held_to_it() -> None:
    assert parse_config({"drafter": {"k_max": 2}}).policy.k == 3
    assert "raise k_max" in fault({"drafter": {"k_max": 2}, "policy": {"name": "fixed"}})


@pytest.mark.parametrize(
    ("tree", "option", "known"),
    [
        ({"modle": "a"}, "modle", ("model", "engine", "drafter", "policy")),
        ({"drafter": {"kmax": 3}}, "drafter.kmax", ("method", "k_max", "suffix")),
        ({"drafter": {"suffix": {"depth": 3}}}, "drafter.suffix.depth", ("max_tree_depth", "max_history_tokens")),
        ({"bench": {"arm": 3}}, "bench.arm", ("arms", "repeats")),
    ],
)
def test_an_unknown_option_is_named_with_the_known_ones(
    tree: dict[str, Any], option: str, known: tuple[str, ...]
) -> None:
    message = fault(tree)
    assert f"{option}: no such option" in message
    listed = message.partition("options here are ")[2].split(", ")
    assert set(known) <= set(listed)


def test_every_fault_has_its_line() -> None:
    lines = fault({"modle": 1, "drafter": {"k_max": 0}, "bench": {"seed": -1}}).splitlines()
    assert len(lines) == 3
    assert [
        option for line, option in zip(lines, ("drafter.k_max", "bench.seed", "modle"), strict=True) if option in line
    ]


GOOD_TABLE = [[5, 8, 3], [1, 4, 5], [9, 32, 0]]


def test_a_table_may_come_in_any_order() -> None:
    assert check_table(GOOD_TABLE) == [(1, 4, 5), (5, 8, 3), (9, 32, 0)]
    assert parse_config({"policy": {"name": "table", "table": GOOD_TABLE}}).policy.table == check_table(GOOD_TABLE)


@pytest.mark.parametrize("where", ["policy", "bench"])
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "empty"),
        ([[1, 4, 5], [6, 8, 3]], "gap: no row for batch sizes 5 to 5"),
        ([[2, 4, 5]], "gap: no row for batch sizes 1 to 1"),
        ([[1, 4, 5], [4, 8, 3]], "[4, 8, 3] overlaps the row before it; it must start at 5"),
        ([[1, 4, 5], [1, 4, 5]], "overlaps"),
        ([[1, 8, 5], [2, 3, 1]], "overlaps"),
        ([[1, 4, 5], [8, 5, 3]], "[8, 5, 3] must have 1 <= lo <= hi"),
        ([[0, 4, 5]], "must have 1 <= lo <= hi"),
        ([[1, 4, -1]], "K must be 0 to 128"),
        ([[1, 4, 129]], "K must be 0 to 128"),
        ([[1, 4]], "table.0"),
        ([[1, 4, "x"]], "valid integer"),
        (7, "valid list"),
    ],
)
def test_a_bad_table_says_what_is_wrong(where: str, rows: Any, said: str) -> None:
    message = fault({where: {"table": rows}})
    assert f"{where}.table" in message
    assert said in message


def test_check_table_refuses_rows_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"\[1, 4\] must be \[lo, hi, K\]"):
        check_table([[1, 4]])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b\n", "must be a mapping of options, is a list"),
        ("just words", "must be a mapping of options, is a str"),
        ("a: [1, 2", "not valid YAML"),
        ("a: b: c", "not valid YAML"),
        (b"\xff\xfe\x00\x01", "not UTF-8"),
        ("1: 2\n", "1"),
    ],
)
def test_a_bad_file_is_named(file: Any, text: str | bytes, said: str) -> None:
    path = file(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*none\.yaml: cannot be read \(No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("drafter.k_max", "must be key=value, for example drafter.k_max=5"),
        ("=5", "must be key=value"),
        ("drafter.k_max=[1", "not valid YAML"),
        ("model.name=a", "'model' is a value, not a group"),
        ("drafter.k_max.x=1", "'k_max' is a value, not a group"),
        ("drafter.kmax=1", "drafter.kmax: no such option"),
        ("bench..seed=1", "bench.: no such option"),
    ],
)
def test_a_bad_override_is_named(file: Any, override: str, said: str) -> None:
    path = file("model: a\ndrafter: {k_max: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert said in str(caught.value)
