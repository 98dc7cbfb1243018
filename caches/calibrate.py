"""From losses at ordered lambdas to a certificate: Learn-then-Test, split conformal. Pure, standard library only.

Sources: Learn-then-Test with fixed-sequence testing (Angelopoulos et al., arXiv 2110.01052); split conformal prediction
(Vovk et al. 2005).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_AS_FLOATS = 1000  # binomial coefficients of more than 1,029 are no floats; logarithms round at the 12th digit


@dataclass(frozen=True, slots=True)
class Verdict:
    """The lambda that may be used, and what it rests on: clips and how many of them lost too much at it."""

    lam: float
    violations: int
    n: int
    p_value: float
    message: str = ""


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(X <= k) for X ~ Binomial(n, p), summed term by term."""
    if k < 0:
        return 0.0
    if k >= n or p <= 0:
        return 1.0
    if p >= 1:
        return 0.0
    if n <= _AS_FLOATS:
        return min(1.0, math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1)))
    hit, miss, whole = math.log(p), math.log1p(-p), math.lgamma(n + 1)
    logs = (whole - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * hit + (n - i) * miss for i in range(k + 1))
    return min(1.0, math.fsum(map(math.exp, logs)))


def clips_needed(alpha: float, delta: float, violations: int = 0) -> int:
    """The fewest clips with which `violations` of them still certify (alpha, delta)."""
    _check_rates(alpha, delta)
    n = violations + 1
    while binomial_cdf(violations, n, alpha) > delta:
        n += 1
    return n


def _check_rates(alpha: float, delta: float) -> None:
    for name, value in (("alpha", alpha), ("delta", delta)):
        if not 0 < value < 1:
            raise ValueError(f"{name}: got {value}, expected a number between 0 and 1; change {name}")


def _check_losses(losses: Mapping[float, Sequence[float]]) -> int:
    sizes = {len(values) for values in losses.values()}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(f"losses: got {sorted(sizes)} clips per lambda, expected one count above 0; measure every lambda on every clip")
    if any(not (math.isfinite(lam) and lam > 0) for lam in losses):
        raise ValueError(f"lambdas: got {sorted(losses)}, expected positive finite numbers; lambda 0 needs no test")
    return sizes.pop()


def is_violation(loss: float) -> bool:
    """A loss is in units of its tolerance: above 1 is a violation, and so is one that is not a number."""
    return not loss <= 1.0


def learn_then_test(losses: Mapping[float, Sequence[float]], *, alpha: float, delta: float) -> Verdict:
    """Walk the lambdas upwards and certify each while the exact binomial test rejects P(loss > 1) > alpha; stop at the first that fails.

    `losses` maps each lambda to one loss per calibration clip, in units of the tolerance. With probability at least
    1 - delta over the draw of the clips, a new clip at the returned lambda violates with probability at most alpha.
    Lambda 0 (the exact model) is returned when none is certified, with what is missing in the message.
    """
    _check_rates(alpha, delta)
    n = _check_losses(losses)
    best = Verdict(0.0, 0, n, 1.0)
    for lam in sorted(losses):
        violations = sum(is_violation(loss) for loss in losses[lam])
        p_value = binomial_cdf(violations, n, alpha)
        if p_value > delta:
            if best.lam == 0.0:
                return Verdict(0.0, violations, n, p_value, _missing(n, violations, alpha, delta))
            break
        best = Verdict(lam, violations, n, p_value)
    return best


def _missing(n: int, violations: int, alpha: float, delta: float) -> str:
    fewest = clips_needed(alpha, delta)
    if n < fewest:
        return f"{n} clips are too few for alpha {alpha:g} at delta {delta:g}: at least {fewest} are needed, and no violation among them"
    needed = clips_needed(alpha, delta, violations)
    return f"the smallest lambda has {violations} violations in {n} clips; so many would need {needed} clips, or a smaller lambda"


def split_conformal(losses: Mapping[float, Sequence[float]], *, alpha: float) -> Verdict:
    """The cheap development mode: each clip's largest lambda with no violation up to it, then their conformal quantile.

    The bound P(loss > 1) <= alpha holds on average over calibrations, not for the one at hand (see `learn_then_test`).
    """
    _check_rates(alpha, 0.5)
    n = _check_losses(losses)
    ordered = sorted(losses)
    largest = []
    for clip in range(n):
        good = 0.0
        for lam in ordered:
            if is_violation(losses[lam][clip]):
                break
            good = lam
        largest.append(good)
    rank = math.floor(alpha * (n + 1))
    if rank < 1:
        return Verdict(0.0, 0, n, 1.0, f"{n} clips are too few for alpha {alpha:g}: at least {math.ceil(1 / alpha) - 1} are needed")
    lam = sorted(largest)[rank - 1]
    violations = sum(is_violation(loss) for loss in losses[lam]) if lam else 0
    return Verdict(lam, violations, n, rank / (n + 1))


def clopper_pearson(violations: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact two-sided interval of a rate (Clopper and Pearson 1934), by bisection on the binomial tails."""
    if not 0 <= violations <= n or n < 1:
        raise ValueError(f"violations: got {violations} of {n}, expected 0 <= violations <= n and n >= 1; count again")
    tail = (1 - confidence) / 2
    low = 0.0 if violations == 0 else _solve(lambda p: 1 - binomial_cdf(violations - 1, n, p) <= tail)
    high = 1.0 if violations == n else _solve(lambda p: binomial_cdf(violations, n, p) > tail)
    return low, high


def _solve(is_below: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low
