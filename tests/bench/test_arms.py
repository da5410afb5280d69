from __future__ import annotations

from typing import Any

import pytest

from rollout_spec.bench.arms import ArmSpec, parse_arm, parse_arms
from rollout_spec.config import Config, ConfigError, PolicyConfig, parse_config


def config(**tree: Any) -> Config:
    return parse_config(tree)


def arm(text: str, **tree: Any) -> ArmSpec:
    return parse_arm(text, config(**tree))


def test_off_has_no_drafter_and_no_plugin() -> None:
    assert arm("off") == ArmSpec("off", "off", None, None)
    assert arm("off").drafter_name is None


def test_a_fixed_k_is_vllms_own() -> None:
    spec = arm("fixed:3", drafter={"k_max": 8})
    assert spec.drafter
    assert (spec.kind, spec.policy, spec.vllm_table, spec.drafter.k_max) == ("fixed", None, None, 3)
    # It is not bound to the controller's limit.
    assert arm("fixed:12", drafter={"k_max": 8}).drafter.k_max == 12  # type: ignore[union-attr]


def test_fixed_0_is_the_plugin_that_never_speculates() -> None:
    spec = arm("fixed:0", drafter={"k_max": 8})
    assert spec.policy == PolicyConfig(name="fixed", k=0)
    assert spec.drafter
    assert spec.drafter.k_max == 8


@pytest.mark.parametrize(("text", "batch", "k"), [("threshold", 6, 2), ("threshold:4", 4, 2), ("threshold:4:7", 4, 7)])
def test_threshold_takes_what_is_missing_from_the_policy(text: str, batch: int, k: int) -> None:
    spec = arm(text, policy={"threshold": 6, "k": 2})
    assert spec.policy == PolicyConfig(name="threshold", threshold=batch, k=k)
    assert spec.drafter
    assert spec.drafter.k_max == 8


def test_table_is_vllms_own_with_its_highest_k() -> None:
    spec = arm("table", bench={"table": [[5, 64, 0], [1, 2, 6], [3, 4, 2]]})
    assert spec.policy is None
    assert spec.vllm_table == [(1, 2, 6), (3, 4, 2), (5, 64, 0)]
    assert spec.drafter
    assert spec.drafter.k_max == 6


def test_goodput_may_use_all_of_k_max() -> None:
    spec = arm("goodput", drafter={"k_max": 5})
    assert spec.policy == PolicyConfig(name="goodput")
    assert spec.drafter
    assert (spec.drafter.method, spec.drafter.k_max) == ("ngram", 5)


@pytest.mark.parametrize(
    "text", ["fixed:3@suffix", "fixed:0@suffix", "table@suffix", "goodput@suffix", "threshold@suffix"]
)
def test_an_arm_may_name_its_drafter(text: str) -> None:
    spec = arm(text, drafter={"method": "ngram", "suffix": {"max_tree_depth": 7}})
    assert spec.name == text
    assert spec.drafter_name == "suffix"
    assert spec.drafter
    assert spec.drafter.suffix.max_tree_depth == 7


def test_a_drafter_with_weights_takes_them_from_the_configuration() -> None:
    spec = arm("goodput@draft_model", drafter={"method": "ngram", "model": "some/model"})
    assert spec.drafter
    assert (spec.drafter.method, spec.drafter.model) == ("draft_model", "some/model")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "unknown policy ''"),
        ("magic", "unknown policy 'magic'; known are off, fixed:K"),
        ("fixed", "the form is not one of"),
        ("fixed:", "must be a whole number"),
        ("fixed:x", "'x' must be a whole number, 0 or more"),
        ("fixed:-1", "'-1' must be a whole number, 0 or more"),
        ("fixed:²", "'²' must be a whole number"),
        ("fixed:1:2", "the form is not one of"),
        ("fixed:129", "vLLM takes K up to 128"),
        ("threshold:1:2:3", "the form is not one of"),
        ("threshold:4:9", "K=9 is above drafter.k_max 8; raise k_max"),
        ("goodput:3", "the form is not one of"),
        ("table:3", "the form is not one of"),
        ("off:1", "the form is not one of"),
        ("off@ngram", "off has no drafter; for K=0 with one loaded say fixed:0@ngram"),
        ("off@", "the form is not one of"),
        ("goodput@", "the form is not one of"),
        ("goodput@magic", "unknown drafter 'magic'; known are ngram, suffix"),
        ("goodput@eagle", "drafter 'eagle' needs drafter.model"),
    ],
)
def test_a_bad_arm_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arm(text)
    assert f"bench.arms: {text!r}: " in str(caught.value)
    assert said in str(caught.value)


def test_a_table_without_drafts_is_no_arm() -> None:
    with pytest.raises(ConfigError, match=r"bench\.table: every K is 0; give at least one row with K > 0"):
        arm("table", bench={"table": [[1, 64, 0]]})


def test_arms_keep_their_order_and_must_differ() -> None:
    names = ["goodput", "off", "fixed:3", "goodput@suffix"]
    assert [spec.name for spec in parse_arms(config(bench={"arms": names}))] == names
    with pytest.raises(ConfigError, match=r"bench\.arms: 'off' is there twice"):
        parse_arms(config(bench={"arms": ["off", "goodput", "off"]}))
