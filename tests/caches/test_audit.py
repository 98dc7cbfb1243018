"""The audit against simulation: quiet while the promise holds, loud when it breaks, however late."""

import math
import random
from statistics import median

import pytest

from caches.audit import Audit, is_drawn


def clips_to_alarm(rng: random.Random, alpha: float, rate: float, most: int, quiet: int = 0) -> float:
    """Clips of this rate until the alarm, infinity for none; before them `quiet` ones of a third of alpha."""
    audit = Audit(alpha)
    for _ in range(quiet):
        audit = audit.after(2.0 if rng.random() < alpha / 3 else 0.0)
    for clip in range(1, most + 1):
        audit = audit.after(2.0 if rng.random() < rate else 0.0)
        if audit.is_alarm():
            return clip
    return math.inf


@pytest.mark.parametrize(("alpha", "twice", "thrice"), [(0.10, 70, 30), (0.05, 140, 60)])
def test_false_alarms_are_rare_and_breaks_are_found(alpha: float, twice: int, thrice: int) -> None:
    rng = random.Random(3)
    false = [clips_to_alarm(rng, alpha, alpha, 200) for _ in range(200)]
    assert sum(map(math.isfinite, false)) / 200 <= 0.05
    for rate, clips in ((2 * alpha, twice), (3 * alpha, thrice)):
        assert median(clips_to_alarm(rng, alpha, rate, 300) for _ in range(40)) <= clips


def test_a_long_quiet_time_does_not_delay_the_alarm_for_ever() -> None:
    rng = random.Random(4)
    assert median(clips_to_alarm(rng, 0.1, 0.5, 400, quiet=1000) for _ in range(20)) <= 60


def test_the_evidence_is_fair_at_alpha_and_an_alarm_stays() -> None:
    for alpha in (0.05, 0.1, 0.6):
        audit = Audit(alpha).after(2.0).after(0.0)
        expected = alpha * audit.after(2.0).e_value + (1 - alpha) * audit.after(0.0).e_value
        assert Audit(alpha).e_value == 1 and expected == pytest.approx(audit.e_value, rel=1e-12)
    audit = Audit(0.1)
    for _ in range(6):
        audit = audit.after(math.nan)  # unknown is a violation
    for _ in range(3000):
        audit = audit.after(0.5)
    assert (audit.violations, audit.clips) == (6, 3006) and audit.e_value < 1 and audit.is_alarm() and not audit.is_alarm(1e-6)


def test_the_draw_is_fixed_nested_and_of_the_share() -> None:
    names = [f"clip {k}" for k in range(3000)]
    tenth, half = ({name for name in names if is_drawn(name, share)} for share in (0.1, 0.5))
    assert tenth < half and 240 < len(tenth) < 360 and all(is_drawn(name, 1) for name in names)


def test_wrong_numbers_are_refused() -> None:
    for share in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="audit share: got"):
            is_drawn("x", share)
    for rate in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="audit alpha: got"):
            Audit(rate)
        with pytest.raises(ValueError, match="audit level: got"):
            Audit(0.1).is_alarm(rate)
