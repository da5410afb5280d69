"""The file: what follows from the cells, and what is refused."""

import dataclasses

import numpy as np
import pytest

from rollout_spec.config import ConfigError
from rollout_spec.control.policy import StepResult
from rollout_spec.control.registry import make_policy
from rollout_spec.profile.acceptance import Acceptance, count
from rollout_spec.profile.cell import Cell
from rollout_spec.profile.level import level, prompt_tokens, rows
from rollout_spec.profile.record import Profile, as_step_times, best_k
from rollout_spec.profile.run import capped, held_out, prefill_rate
from rollout_spec.simulate.acceptance_curve import POSITION_BLOCK
from rollout_spec.simulate.step_model import Tabulated, steady
from rollout_spec.workload import Group

SURVIVAL = (0.6, 0.36, 0.2, 0.12)


def step_seconds(batch, k, context):
    return 0.02 + 2e-4 * max(0, batch * (k + 1) - 16) + 5e-4 * k + 1e-7 * batch * context


def make_cell(batch, k, context):
    draft = 5e-4 * k
    rest = step_seconds(batch, k, context) - step_seconds(batch, 0, context) - draft
    return Cell(
        batch, k, context, step_seconds(batch, k, context), 0.01, 9, 1.0, draft if k else None, rest if k else None
    )


def profile(**changes):
    cells = [make_cell(b, k, 100.0) for b in (1, 8, 32) for k in (0, 2, 4)]
    cells += [make_cell(b, k, 1000.0) for b in (1, 32) for k in (0, 2, 4)]
    made = Profile(
        provenance={}, engine={"dtype": "bfloat16"}, k_max=4, max_num_seqs=32, cells=cells,
        off={1: 0.019, 8: 0.02, 32: 0.022}, prefill_token_seconds=1e-4,
        acceptance=Acceptance(SURVIVAL, (1.0,) * 4, 1000, "test"),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_a_profile_survives_its_file_and_starts_the_controller(tmp_path):
    path = tmp_path / "profile.json"
    profile().save(path)
    assert Profile.load(path) == profile()
    policy = make_policy({"name": "goodput", "profile": str(path)}, 4)
    assert policy.cost.known
    assert list(tmp_path.iterdir()) == [path]


def test_step_times_hold_at_the_cells_and_between_contexts():
    times = profile().step_times()
    for batch in (1, 8, 32):
        for context in (100, 400, 1000):
            got = times.by_k(batch, 4, context)
            assert got[::2] == pytest.approx([step_seconds(batch, k, context) for k in (0, 2, 4)], rel=0.03)
    assert times.draft_share == pytest.approx(0.3, abs=0.3)
    assert times.drafter_tax()[0] == pytest.approx(step_seconds(1, 0, 100) / 0.019)


def test_a_simulation_reckons_with_hiccups_a_choice_does_not():
    cells = [dataclasses.replace(cell, mean_seconds=1.05 * cell.seconds) for cell in profile().cells]
    calm, rough = profile().step_times(), profile(cells=cells).step_times()
    assert rough.by_k(8, 4, 100) == calm.by_k(8, 4, 100)
    one = np.array([8.0])
    ratio = steady(Tabulated(rough, 4), one, 100 * one, 4) / steady(Tabulated(calm, 4), one, 100 * one, 4)
    assert ratio == pytest.approx(1.05)


def rollout_of(factor, k, steps=60, count=8):
    """As a rollout that takes `factor` times what the profile says, after a step that computes prompts."""
    first = StepResult(9.0, 0, 500, 0, k, (0,) * 4, (0,) * 4, 0)
    drafted = tuple(count * (j < k) for j in range(4))
    context = [count * (200 + i) for i in range(steps)]
    seconds = [factor * step_seconds(count, k, c / count) for c in context]
    warm = StepResult(8.0, count, 0, 0, k, (0,) * 4, (0,) * 4, 0, context[0])
    more = [StepResult(s, count, 0, k, k, drafted, (0,) * 4, count, c) for s, c in zip(seconds, context, strict=True)]
    return [first, warm, *more]


def test_a_rollout_longer_than_the_cells_say_is_the_level_of_a_prediction(tmp_path):
    made = profile()
    times = made.step_times()
    got = level(rows(rollout_of(1.07, 4)), times, 4)
    assert got == pytest.approx(1.07, abs=0.005)
    assert level(rows(rollout_of(1.07, 4, steps=30)), times, 4) is None
    # A step that reads a prompt beside decoding counts, and what reading takes by itself is not the level's.
    steps = [dataclasses.replace(step, seconds=step.seconds + 0.01, prefill_tokens=100) for step in rollout_of(1.07, 4)]
    found = rows(steps)
    assert prompt_tokens(found) == 6000
    assert level(found, times, 4, reading=6000 * 1e-4) == pytest.approx(1.07, abs=0.005)
    made = dataclasses.replace(made, rollout_level=1.07, off_level=1.2)
    made.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json").step_times()
    assert (loaded.hiccups, loaded.without_drafter().hiccups) == (1.07, 1.2)
    assert times.without_drafter().hiccups == times.hiccups  # where no rollout was measured


def test_tables_name_the_best_k_for_each_batch():
    made = profile()
    times, length, drafts = made.step_times(), made.acceptance.length(), made.acceptance.drafts()
    table = made.table()
    assert table[0][0] == 1
    assert table[-1][1] == 32
    for lo, hi, k in table:
        for batch in (lo, hi):
            rates = [length[j] / s for j, s in enumerate(times.by_k(batch, 4, times.context[0]))]
            assert rates[k] == max(rates)
            assert best_k(times, length, drafts, batch, times.context[0]) == k
    schedule = made.draft_len_schedule()
    assert all(schedule[hi] == k for _, hi, k in table if k)
    assert table[0][2] > table[-1][2]


def test_a_drafter_that_finds_little_pays_little():
    times = profile().step_times()
    full, half = times.expected(32, [0, 1, 2, 3, 4], 100), times.expected(32, [0, 0.5, 1, 1.5, 2], 100)
    assert full == pytest.approx(times.by_k(32, 4, 100))
    assert full[0] == half[0]
    assert all(h < f for h, f in zip(half[1:], full[1:], strict=True))


def test_k_without_a_cell_takes_the_line():
    cells = [make_cell(b, k, 100.0) for b in (1, 32) for k in (0, 2, 4) if (b, k) != (32, 2)]
    times = as_step_times(cells, {}, Acceptance())
    assert times.by_k(32, 2, 100)[2] == pytest.approx((step_seconds(32, 0, 100) + step_seconds(32, 4, 100)) / 2)
    assert times.off_seconds == ()


def test_k_beyond_those_measured_goes_on_and_is_not_free():
    cells = [make_cell(b, k, 100.0) for b in (1, 32) for k in (0, 2, 4) if (b, k) != (32, 4)]
    cells += [make_cell(8, 0, 100.0)]  # no drafts were found there at all
    times = as_step_times(cells, {}, Acceptance())
    assert times.batch == (1, 32)
    slope = step_seconds(32, 2, 100) - step_seconds(32, 0, 100)
    assert times.by_k(32, 4, 100)[4] == pytest.approx(step_seconds(32, 2, 100) + slope)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[]", "has schema None"), ('{"schema": "rollout-spec/profile/1"}', "incomplete")],
)
def test_a_damaged_file_says_so(tmp_path, text, message):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Profile.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Profile.load(tmp_path / "none.json")


def test_acceptance_is_counted_by_sequence_and_by_position():
    rng = np.random.default_rng(0)
    steps = []
    for n in range(400):
        decode, rate = 8, 0.3 if n < 200 else 0.8  # the model begins to repeat itself
        runs = np.minimum(rng.geometric(1 - rate, decode) - 1, 4)
        accepted = [int((runs >= j).sum()) for j in range(1, 5)]
        steps.append(StepResult(0.02, decode, 0, 4, 4, [8, 8, 8, 6], accepted, decode, decode * (100 + n)))
    found = count(steps, 4, "test")
    assert found.sequence_steps == 3200
    assert found.drafted == (1.0, 1.0, 1.0, 0.75)
    assert found.accepted[0] == pytest.approx(0.55, abs=0.03)
    early, late = found.by_position[1], found.by_position[350 // POSITION_BLOCK]
    assert sum(s**early for s in found.accepted) == pytest.approx(0.3 + 0.09 + 0.027 + 0.008, abs=0.08)
    assert sum(s**late for s in found.accepted) == pytest.approx(0.8 + 0.64 + 0.512 + 0.41, abs=0.15)
    assert count(steps, 3, "test").accepted == ()


def test_held_out_groups_are_as_long_as_the_longest():
    groups = [Group("a", "x", 2, (3, 40)), Group("b", "y", 2, (7, 9)), Group("c", "z", 2, (1, 99))]
    assert [g.output_tokens for g in held_out(groups, 2)] == [(40, 40), (40, 40)]
    free = [Group("a", "x", 2, None)]
    assert held_out(free, 5) == free


def test_a_held_out_rollout_is_no_longer_than_a_profile_should_take():
    assert capped(Group("a", "x", 2, (40, 30_000)), 512).output_tokens == (40, 512)
    assert capped(Group("b", "x", 2, None), 512).output_tokens == (512, 512)


def test_prefill_rate_leaves_out_the_warm_up_and_small_steps():
    steps = [[1000, 9.0], [1000, 0.22], [1000, 0.22], [900, 0.2], [10, 0.02]]
    assert prefill_rate(steps, 0.02) == pytest.approx(2e-4)
    assert prefill_rate([], 0.02) == 0.0
