"""Intervals, percentiles and ratios on plain numbers; knows nothing of clips. Every interval is two-sided."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
_RESAMPLES = 10_000
# Clips needed until the largest of them bounds the percentile from above with 95 % confidence: 1 - q^n >= 0.95.
SUPPORT = {50: 5, 90: 29, 95: 59, 99: 299}


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval; `low` and `high` are None where there are too few values for one."""

    value: float
    low: float | None
    high: float | None
    n: int

    def text(self, digits: int = 3) -> str:
        """`0.98 [0.95, 0.99]`, or `0.98 (n=1: no interval)`."""
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f} (n={self.n}: no interval)"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def wilson(successes: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """A proportion with Wilson's score interval (Wilson 1927); with n = 0 the value is NaN and there is no interval."""
    if n == 0:
        return Interval(math.nan, None, None, 0)
    z = float(stats.norm.ppf(0.5 + confidence / 2))
    p, shift = successes / n, z * z / n
    middle = (p + shift / 2) / (1 + shift)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + shift)
    return Interval(p, max(0.0, middle - half), min(1.0, middle + half), n)


def percentile(values: Sequence[float], q: int) -> float | None:
    """The q-th percentile, or None when there are too few values to speak of it (see SUPPORT)."""
    if q not in SUPPORT:
        raise ValueError(f"percentile: got {q}, expected one of {', '.join(map(str, SUPPORT))}; use another")
    return float(np.percentile(values, q)) if len(values) >= SUPPORT[q] else None


def percentile_text(values: Sequence[float], q: int, digits: int = 2) -> str:
    """The percentile as text; `n/a (n=20)` when there are too few values."""
    found = percentile(values, q)
    return f"n/a (n={len(values)})" if found is None else f"{found:.{digits}f}"


def bootstrap_mean(values: Sequence[float], *, seed: int = 0) -> Interval:
    """The mean with its BCa bootstrap interval (Efron 1987); no interval below three values or without spread."""
    data = np.asarray(values, dtype=float)
    if len(data) == 0:
        return Interval(math.nan, None, None, 0)
    mean = float(data.mean())
    if len(data) < 3 or not np.isfinite(data).all():
        return Interval(mean, None, None, len(data))
    if float(np.ptp(data)) == 0.0:
        return Interval(mean, mean, mean, len(data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns where the acceleration is 0/0; that case is answered below
        found = stats.bootstrap(
            (data,), np.mean, n_resamples=_RESAMPLES, confidence_level=CONFIDENCE, method="BCa", rng=np.random.default_rng(seed)
        )
    low, high = float(found.confidence_interval.low), float(found.confidence_interval.high)
    if not (math.isfinite(low) and math.isfinite(high)):
        return Interval(mean, None, None, len(data))
    return Interval(mean, low, high, len(data))


def paired_ratio(a: Sequence[float], b: Sequence[float], *, seed: int = 0) -> Interval:
    """The geometric mean of a/b over pairs, with its bootstrap interval over pairs.

    Raises ValueError when the lists differ in length or hold a value that is not positive.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"pairs: got {len(a)} and {len(b)} values, expected equal counts above 0; pair the runs first")
    if min(min(a), min(b)) <= 0:
        raise ValueError(f"pairs: got {min(min(a), min(b))}, expected positive values; check the runs")
    logs = bootstrap_mean(np.log(np.asarray(a, dtype=float) / np.asarray(b, dtype=float)).tolist(), seed=seed)
    low, high = (None if bound is None else math.exp(bound) for bound in (logs.low, logs.high))
    return Interval(math.exp(logs.value), low, high, logs.n)


def is_non_inferior(difference: Interval, margin: float) -> bool:
    """Whether `new - old` (higher is better) is above `-margin` with the interval's confidence; never without an interval."""
    return difference.low is not None and difference.low > -margin
