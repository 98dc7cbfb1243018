"""The calibrator against exact tables and against simulation."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from caches.calibrate import binomial_cdf, clips_needed, clopper_pearson, is_violation, learn_then_test, split_conformal

# (alpha, delta) -> fewest clips for 0, 1, 2, 3, 5, 8 violations
TABLE = {
    (0.10, 0.10): (22, 38, 52, 65, 91, 128),
    (0.10, 0.05): (29, 46, 61, 76, 103, 142),
    (0.05, 0.10): (45, 77, 105, 132, 184, 258),
    (0.05, 0.05): (59, 93, 124, 153, 208, 286),
}


@given(st.integers(0, 60), st.integers(1, 60), st.floats(0.01, 0.99))
def test_the_binomial_sum_equals_scipy(k: int, n: int, p: float) -> None:
    assert binomial_cdf(k, n, p) == pytest.approx(float(stats.binom.cdf(k, n, p)), abs=1e-12)


@pytest.mark.parametrize(
    ("k", "n", "p"),
    [(0, 3000, 0.001), (120, 3000, 0.05), (1500, 3000, 0.5), (2990, 3000, 0.99), (3000, 3000, 0.5), (90, 1001, 0.1), (90, 1000, 0.1)],
)
def test_the_binomial_sum_equals_scipy_where_a_factor_is_no_float(k: int, n: int, p: float) -> None:
    assert binomial_cdf(k, n, p) == pytest.approx(float(stats.binom.cdf(k, n, p)), rel=1e-9)


def test_round_rates_are_met_exactly() -> None:
    assert clips_needed(0.5, 0.125) == 3 and learn_then_test({0.1: [0.5, 2.0, 0.5]}, alpha=0.5, delta=0.5).lam == 0.1


def test_certain_and_impossible_events() -> None:
    assert [binomial_cdf(1, 3, p) for p in (0.0, 1.0)] == [1.0, 0.0] and binomial_cdf(3, 3, 1.0) == 1.0 and binomial_cdf(-1, 3, 0.5) == 0.0


def test_a_test_of_thousands_of_clips_is_exact() -> None:
    verdict = learn_then_test(losses_with({0.1: 133}, 3000), alpha=0.05, delta=0.1)
    assert verdict.lam == 0.1 and verdict.p_value == pytest.approx(float(stats.binom.cdf(133, 3000, 0.05)), rel=1e-9)
    wanted = stats.binomtest(133, 3000).proportion_ci(method="exact")
    assert clopper_pearson(133, 3000) == pytest.approx((wanted.low, wanted.high), abs=1e-9)


@pytest.mark.parametrize(("rates", "row"), TABLE.items())
def test_the_sample_size_table(rates: tuple[float, float], row: tuple[int, ...]) -> None:
    assert tuple(clips_needed(*rates, violations) for violations in (0, 1, 2, 3, 5, 8)) == row


@pytest.mark.parametrize(("violations", "n"), [(0, 30), (2, 52), (30, 30), (7, 20)])
def test_the_exact_interval_equals_scipy(violations: int, n: int) -> None:
    found = clopper_pearson(violations, n)
    wanted = stats.binomtest(violations, n).proportion_ci(method="exact")
    assert found == pytest.approx((wanted.low, wanted.high), abs=1e-9)


def losses_with(counts: dict[float, int], n: int) -> dict[float, list[float]]:
    return {lam: [2.0] * bad + [0.5] * (n - bad) for lam, bad in counts.items()}


def test_the_walk_certifies_up_to_the_first_failure_and_not_beyond() -> None:
    losses = losses_with({0.1: 0, 0.2: 2, 0.3: 9, 0.4: 0}, 52)
    verdict = learn_then_test(losses, alpha=0.1, delta=0.1)
    assert (verdict.lam, verdict.violations, verdict.n) == (0.2, 2, 52) and verdict.p_value <= 0.1


def test_too_few_clips_say_how_many_are_needed() -> None:
    verdict = learn_then_test(losses_with({0.1: 0}, 10), alpha=0.1, delta=0.1)
    assert verdict.lam == 0.0 and "at least 22 are needed" in verdict.message
    verdict = learn_then_test(losses_with({0.1: 3}, 52), alpha=0.1, delta=0.1)
    assert verdict.lam == 0.0 and "would need 65 clips" in verdict.message
    assert "at least 9 are needed" in split_conformal(losses_with({0.1: 0}, 8), alpha=0.1).message


def test_a_loss_that_is_not_a_number_is_a_violation() -> None:
    assert is_violation(math.nan) and is_violation(math.inf) and is_violation(1.0001) and not is_violation(1.0)


def draw_losses(rng: random.Random, n: int, lams: list[float]) -> dict[float, list[float]]:
    """Heavy-tailed losses that grow with lambda, a sixth of the clips not monotone."""
    rows: dict[float, list[float]] = {lam: [] for lam in lams}
    for _ in range(n):
        scale = math.exp(rng.gauss(-1.2, 0.8))
        odd = rng.random() < 0.15
        for k, lam in enumerate(lams):
            wobble = math.exp(rng.gauss(0, 0.7)) if odd else 1.0
            rows[lam].append(scale * (1 + k) * 0.45 * wobble)
    return rows


@pytest.mark.parametrize(("alpha", "delta", "n"), [(0.10, 0.10, 52), (0.05, 0.10, 105)])
def test_simulated_coverage_holds(alpha: float, delta: float, n: int) -> None:
    lams = [0.05 * (k + 1) for k in range(8)]
    truth = {lam: sum(map(is_violation, values)) / 20_000 for lam, values in draw_losses(random.Random(0), 20_000, lams).items()}
    rng, wrong, used = random.Random(1), 0, 0
    for _ in range(300):
        lam = learn_then_test(draw_losses(rng, n, lams), alpha=alpha, delta=delta).lam
        used += lam > 0
        wrong += lam > 0 and truth[lam] > alpha
    assert wrong / 300 <= delta and used > 100


@settings(max_examples=30)
@given(st.integers(9, 60), st.integers(0, 10_000))
def test_split_conformal_needs_no_monotone_loss(n: int, seed: int) -> None:
    lams = [0.1, 0.2, 0.3]
    verdict = split_conformal(draw_losses(random.Random(seed), n, lams), alpha=0.1)
    assert verdict.lam in (0.0, *lams)


def test_split_conformal_covers_heavy_tails_on_average() -> None:
    lams = [0.05 * (k + 1) for k in range(8)]
    truth = {lam: sum(map(is_violation, values)) / 20_000 for lam, values in draw_losses(random.Random(0), 20_000, lams).items()}
    rng = random.Random(4)
    missed = [({0.0: 0.0} | truth)[split_conformal(draw_losses(rng, 39, lams), alpha=0.1).lam] for _ in range(400)]
    assert 0.03 < sum(missed) / 400 <= 0.1


@pytest.mark.parametrize(("n", "alpha", "expected"), [(19, 0.1, 0.1), (39, 0.1, 0.1), (24, 0.1, 0.08)])
def test_split_conformal_covers_on_average(n: int, alpha: float, expected: float) -> None:
    """A clip loses too much above its own limit, limits are uniform: the share of new clips with a limit below lambda is lambda."""
    lams = [0.002 * (k + 1) for k in range(150)]
    rng, runs = random.Random(3), 600
    missed = []
    for _ in range(runs):
        limits = [rng.random() for _ in range(n)]
        missed.append(split_conformal({lam: [lam / limit for limit in limits] for lam in lams}, alpha=alpha).lam)
    assert sum(missed) / runs <= alpha + 0.006  # three standard errors
    assert sum(missed) / runs == pytest.approx(expected, abs=0.009)  # rank / (n + 1), and not merely nothing reused


@pytest.mark.parametrize("rates", [(0.0, 0.1), (1.0, 0.1), (0.1, 0.0), (math.nan, 0.1)])
def test_wrong_rates_are_refused(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="expected a number between 0 and 1"):
        learn_then_test({0.1: [0.0]}, alpha=rates[0], delta=rates[1])


@pytest.mark.parametrize("losses", [{}, {0.1: []}, {0.1: [0.0], 0.2: [0.0, 0.0]}, {0.0: [0.0]}, {math.inf: [0.0]}])
def test_wrong_losses_are_refused(losses: dict[float, list[float]]) -> None:
    with pytest.raises(ValueError, match=r"got .*, expected"):
        learn_then_test(losses, alpha=0.1, delta=0.1)
