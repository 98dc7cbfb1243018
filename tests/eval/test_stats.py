"""Intervals against values computed elsewhere; percentiles stay silent where there is too little to say."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.stats import SUPPORT, bootstrap_mean, is_non_inferior, paired_ratio, percentile, percentile_text, wilson


def test_wilson_equals_published_values() -> None:
    interval = wilson(81, 263)  # Newcombe 1998, table I
    assert interval.low == pytest.approx(0.2553, abs=5e-5) and interval.high == pytest.approx(0.3662, abs=5e-5)
    assert wilson(0, 20).low == 0.0 and wilson(20, 20).high == 1.0 and wilson(0, 0).low is None


@pytest.mark.parametrize(("q", "need"), SUPPORT.items())
def test_a_percentile_needs_enough_values(q: int, need: int) -> None:
    assert 1 - (q / 100) ** need >= 0.95 > 1 - (q / 100) ** (need - 1)
    values = list(range(need))
    assert percentile(values[:-1], q) is None and percentile_text(values[:-1], q) == f"n/a (n={need - 1})"
    assert percentile(values, q) == pytest.approx(np.percentile(values, q))


def test_the_mean_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(60):
        interval = bootstrap_mean(rng.normal(3.0, 1.0, 40).tolist(), seed=trial)
        assert interval.low is not None and interval.high is not None
        hits += interval.low <= 3.0 <= interval.high
    assert 52 <= hits <= 60


def test_few_or_equal_values_give_no_false_interval() -> None:
    assert bootstrap_mean([1.0, 2.0]).low is None
    assert bootstrap_mean([2.0] * 8) == bootstrap_mean([2.0] * 8, seed=9)
    assert math.isnan(bootstrap_mean([]).value)
    assert bootstrap_mean([1.0, math.inf, 2.0, 3.0]).low is None


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=20), st.floats(0.2, 5))
def test_a_constant_factor_is_found_exactly(base: list[float], factor: float) -> None:
    interval = paired_ratio([value * factor for value in base], base)
    assert interval.value == pytest.approx(factor, rel=1e-9)


def test_pairs_that_are_not_pairs_are_refused() -> None:
    for a, b in (([1.0], [1.0, 2.0]), ([], []), ([0.0], [1.0])):
        with pytest.raises(ValueError, match="pairs"):
            paired_ratio(a, b)


def test_non_inferiority_needs_an_interval() -> None:
    assert is_non_inferior(bootstrap_mean([0.0, 0.01, -0.001, 0.0]), margin=0.01)
    assert not is_non_inferior(bootstrap_mean([0.0]), margin=0.01)
    assert not is_non_inferior(bootstrap_mean([-0.5, -0.4, -0.6]), margin=0.01)
