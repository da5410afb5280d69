from __future__ import annotations

import random

import pytest

from rollout_spec.control.makespan import ALL_MEMORY, MEMORY, Lengths, longest_first


def test_remaining_is_the_mean_of_what_responses_that_got_this_far_had_left() -> None:
    lengths, rng = Lengths(), random.Random(0)
    seen = [rng.randint(1, 500) for _ in range(ALL_MEMORY + 300)]
    for tokens in seen:
        lengths.finished("other", tokens)
    kept = seen[-ALL_MEMORY:]
    assert lengths.expected("new") == pytest.approx(sum(kept) / len(kept))
    for so_far in (0, 17, 250, 499):
        longer = [tokens - so_far for tokens in kept if tokens > so_far]
        assert lengths.remaining("new", so_far) == pytest.approx(sum(longer) / len(longer))
    # Beyond everything seen.
    assert lengths.remaining("new", 600) == 300.0


def test_a_prompts_own_responses_outweigh_the_others_and_old_ones_are_forgotten() -> None:
    lengths = Lengths()
    for _ in range(200):
        lengths.finished("short", 10)
    for tokens in [1000] * MEMORY + [2000] * MEMORY:
        lengths.finished("long", tokens)
    assert lengths.expected("long") > 1700
    assert lengths.remaining("long", 500) > 1300


def test_memory_is_bounded_and_the_prompt_seen_longest_ago_goes_first() -> None:
    lengths = Lengths(prompts=3)
    for prompt in "abcad":
        lengths.finished(prompt, 1000 if prompt == "a" else 10)
    assert len(lengths) == 3
    assert longest_first(["b", "c", "a", "d"], lengths)[0] == 2  # b is gone, a is not
    assert lengths.expected("b") == lengths.expected("never seen")
    for prompt in range(10_000):
        lengths.finished(prompt, 5)
    assert len(lengths) == 3


def test_nothing_is_known_before_a_response_has_finished() -> None:
    lengths = Lengths(cap=50)
    assert not lengths.known
    assert lengths.remaining("a", 10) == 40
    assert longest_first(["a", "b", "a"], lengths) == [0, 1, 2]
    lengths.finished("a", 20)
    assert lengths.known
