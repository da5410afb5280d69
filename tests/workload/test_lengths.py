from importlib.resources import files
from math import exp
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.config import ConfigError
from rollout_spec.workload.lengths import (
    MAX_TOKENS,
    PROFILES,
    DrainCurve,
    LogNormal,
    describe,
    length_profile,
    sample_lengths,
    scaled_cap,
)

profiles = st.sampled_from(PROFILES)
seeds = st.integers(0, 2**32)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def true_quantile(profile: str, u: float) -> float:
    """Published figures written out again, without the module's own code."""
    if profile == "drain_curve":
        finished = [0, 100, 300, 500, 540, 585, 599, 600]
        seconds = [115.5, 137, 180, 234, 263, 489, 580, 647]
        return float(np.interp(u * 600, finished, seconds))
    median, sigma, cap = {"heavy_tail": (2000, 0.99, 32768), "clipped_math": (5900, 0.62, 16384)}[profile]
    return min(median * exp(sigma * NormalDist().inv_cdf(u)), cap)


def test_every_profile_names_its_source() -> None:
    assert "arXiv 2510.12633" in length_profile("heavy_tail").source
    assert "pull request 3663" in length_profile("drain_curve").source
    assert files("rollout_spec.workload").joinpath("published.json").is_file()


@given(profiles, st.integers(2, 300), seeds)
def test_each_slice_of_the_distribution_gives_one_length(profile: str, count: int, seed: int) -> None:
    lengths = np.sort(sample_lengths(profile, count, 1.0, rng(seed)))
    for i, length in enumerate(lengths):
        low = true_quantile(profile, max(i / count, 1e-12))
        high = true_quantile(profile, min((i + 1) / count, 1 - 1e-12))
        assert low - 0.51 <= length <= high + 0.51


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("u", [0.1, 0.5, 0.9, 0.99])
def test_quantiles_of_a_large_sample(profile: str, u: float) -> None:
    lengths = sample_lengths(profile, 20_000, 1.0, rng())
    assert np.quantile(lengths, u) == pytest.approx(true_quantile(profile, u), rel=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_a_small_batch_has_the_tail_each_time(seed: int) -> None:
    lengths = sample_lengths("heavy_tail", 32, 1.0, rng(seed))
    assert np.median(lengths) == pytest.approx(2000, rel=0.1)
    assert lengths.max() >= true_quantile("heavy_tail", 31 / 32) - 1


def test_the_published_tails() -> None:
    heavy = describe(sample_lengths("heavy_tail", 50_000, 1.0, rng()))
    assert true_quantile("heavy_tail", 0.99) / heavy.median == pytest.approx(10, rel=0.02)
    clipped = describe(sample_lengths("clipped_math", 50_000, 1.0, rng()), scaled_cap("clipped_math", 1.0))
    assert clipped.share_clipped is not None
    assert 0.04 <= clipped.share_clipped <= 0.06
    assert clipped.mean == pytest.approx(6900, rel=0.03)


def test_600_sessions_drain_as_recorded() -> None:
    seconds = sample_lengths("drain_curve", 600, 100.0, rng()) / 100
    for finished, second in zip((100, 300, 500, 540, 585, 599), (137, 180, 234, 263, 489, 580), strict=True):
        assert np.sum(seconds <= second + 0.01) == finished
    assert 580 <= seconds.max() <= 647
    assert seconds.min() >= 115.5


@given(profiles, st.integers(1, 50), st.floats(0.001, 30), seeds)
def test_one_factor_scales_every_length(profile: str, count: int, scale: float, seed: int) -> None:
    cap = scaled_cap(profile, scale)
    lengths = sample_lengths(profile, count, scale, rng(seed))
    unscaled = sample_lengths(profile, count, 1.0, rng(seed))
    assert np.all(np.abs(lengths - np.maximum(unscaled * scale, 1)) <= 0.5 + 0.5 * scale + 1e-6)
    assert cap is None or lengths.max() <= max(cap, 1)


@given(profiles, st.integers(1, 64), seeds, st.integers(1, 900))
def test_same_generator_same_lengths_and_none_below_the_minimum(profile: str, count: int, seed: int, low: int) -> None:
    lengths = sample_lengths(profile, count, 0.02, rng(seed), low)
    assert lengths.shape == (count,)
    assert lengths.dtype == np.int64
    assert lengths.min() >= low
    assert np.array_equal(lengths, sample_lengths(profile, count, 0.02, rng(seed), low))


def test_lengths_are_not_sorted() -> None:
    lengths = sample_lengths("heavy_tail", 64, 1.0, rng())
    assert abs(np.corrcoef(np.arange(64), lengths)[0, 1]) < 0.5
    assert not np.array_equal(lengths, sample_lengths("heavy_tail", 64, 1.0, rng(1)))


def test_no_lengths() -> None:
    assert sample_lengths("heavy_tail", 0, 1.0, rng()).size == 0
    with pytest.raises(ValueError, match="no lengths"):
        describe([])


@pytest.mark.parametrize("scale", [1000.0, float("inf"), float("nan")])
def test_a_scale_beyond_reason_is_named(scale: float) -> None:
    with pytest.raises(ConfigError, match=rf"workload.scale {scale}.*{MAX_TOKENS}"):
        sample_lengths("heavy_tail", 8, scale, rng())


def test_an_unknown_profile_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'heavy'.*heavy_tail, clipped_math, drain_curve"):
        length_profile("heavy")


def test_a_curve_that_starts_late_never_goes_below_zero() -> None:
    curve = DrainCurve((50, 100), (10, 100), "test")
    assert curve.quantile(np.array([0.0, 0.5, 1.0])).tolist() == [0, 10, 100]


def test_describe() -> None:
    summary = describe([1, 2, 3, 4, 10, 10], cap=10)
    assert (summary.median, summary.mean, summary.max) == (3.5, 5.0, 10)
    assert summary.p90 == 10
    assert summary.share_clipped == pytest.approx(1 / 3)
    assert describe([5]).share_clipped is None


def test_the_cap_comes_before_the_scale() -> None:
    assert LogNormal(10, 1.0, 20, "test").quantile(np.array([0.999])).tolist() == [20]
    assert scaled_cap("heavy_tail", 0.02) == 655
    assert sample_lengths("heavy_tail", 2000, 0.02, rng()).max() == 655
    assert scaled_cap("drain_curve", 2.0) is None
