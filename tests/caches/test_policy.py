"""One row per reason, and what must hold for every decision."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caches.policy import Action, Budget, Decision, History, Step, decide
from caches.trace import Trace

ON = Budget(lam=0.1)
LONG = History(computed=5)
FINE = {"video": 0.05, "audio": 0.02}


@pytest.mark.parametrize(
    ("budget", "history", "step", "drift", "action", "reason"),
    [
        (Budget(), LONG, Step(10, 49), FINE, Action.COMPUTE, "off"),
        (ON, LONG, Step(3, 6), FINE, Action.COMPUTE, "few steps"),
        (ON, History(), Step(0, 49), {}, Action.COMPUTE, "first"),
        (ON, History(computed=1), Step(1, 49), FINE, Action.COMPUTE, "first"),
        (ON, History(computed=1), Step(9, 49), FINE, Action.COMPUTE, "first"),
        (ON, LONG, Step(3, 49), FINE, Action.COMPUTE, "first"),
        (ON, LONG, Step(4, 49), FINE, Action.REUSE, "within budget"),
        (Budget(lam=0.1, warm_up=0.0), LONG, Step(2, 49), FINE, Action.REUSE, "within budget"),
        (ON, LONG, Step(48, 49), FINE, Action.COMPUTE, "last"),
        (ON, History(5, 1, 0), Step(5, 8), FINE, Action.COMPUTE, "few steps, one reuse"),
        (ON, History(5, 3, 3), Step(10, 49), FINE, Action.COMPUTE, "streak"),
        (ON, LONG, Step(10, 49), {}, Action.COMPUTE, "unknown"),
        (ON, LONG, Step(10, 49), {"video": math.nan, "audio": 0.0}, Action.COMPUTE, "unknown"),
        (ON, LONG, Step(10, 49), {"video": 0.0, "audio": math.inf}, Action.COMPUTE, "unknown"),
        (ON, LONG, Step(10, 49), {"video": -0.1, "audio": 0.0}, Action.COMPUTE, "unknown"),
        (ON, LONG, Step(10, 49), {"video": 0.2, "audio": 0.01}, Action.COMPUTE, "video drift"),
        (ON, LONG, Step(10, 49), {"video": 0.01, "audio": 0.2}, Action.COMPUTE, "audio drift"),
        (ON, LONG, Step(10, 49), FINE, Action.REUSE, "within budget"),
        (ON, History(5, 0, 0), Step(5, 8), FINE, Action.REUSE, "within budget"),
    ],
)
def test_every_reason(budget: Budget, history: History, step: Step, drift: dict[str, float], action: Action, reason: str) -> None:
    decision = decide(budget, history, step, drift)
    assert (decision.action, decision.reason) == (action, reason)
    assert decision.risk == (0.05 if action is Action.REUSE else 0.0)


def run(budget: Budget, drifts: list[float]) -> list[Decision]:
    history, decisions = History(), []
    for index, drift in enumerate(drifts):
        decision = decide(budget, history, Step(index, len(drifts)), {"video": drift, "audio": drift / 2} if index else {})
        history = history.after(decision.action)
        decisions.append(decision)
    return decisions


DRIFTS = st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=60)


@given(DRIFTS, st.floats(0, 5), st.integers(1, 4), st.integers(1, 3))
def test_risk_never_exceeds_the_budget_and_streaks_and_ends_are_kept(drifts: list[float], lam: float, streak: int, first: int) -> None:
    decisions = run(Budget(lam=lam, max_streak=streak, first=first), drifts)
    longest = current = 0
    for decision in decisions:
        assert 0 <= decision.risk <= lam
        current = current + 1 if decision.action is Action.REUSE else 0
        longest = max(longest, current)
    assert longest <= streak
    assert all(d.action is Action.COMPUTE for d in [*decisions[:first], decisions[-1]])
    if len(drifts) <= 10:
        assert sum(d.action is Action.REUSE for d in decisions) <= (len(drifts) > 6)


@given(DRIFTS)
def test_lambda_zero_computes_everything(drifts: list[float]) -> None:
    assert all(d.action is Action.COMPUTE and d.reason == "off" for d in run(Budget(), drifts))


@given(DRIFTS, st.floats(0, 5))
def test_the_same_inputs_give_the_same_answer(drifts: list[float], lam: float) -> None:
    assert str(run(Budget(lam=lam), drifts)) == str(run(Budget(lam=lam), drifts))


@pytest.mark.parametrize(
    "values", [{"lam": -1.0}, {"lam": math.nan}, {"lam": math.inf}, {"max_streak": 0}, {"first": 0}, {"last": 0}, {"warm_up": 1.1}]
)
def test_a_wrong_budget_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"cache .*: got .*, expected .*; "):
        Budget(**values)  # type: ignore[arg-type]


def test_a_cache_that_does_nothing_says_why() -> None:
    trace = Trace(0.01, 20)
    for decision in run(Budget(lam=0.01), [1.0] * 20):
        trace.append(decision)
    assert trace.warning == "the step cache reused nothing (17 of 20 steps: video drift)"
    record = trace.record()
    assert record["computed"] == 20 and record["reasons"]["compute: first"] == 2 and len(record["steps"]) == 20
    assert Trace(0.0, 20).warning == ""


@pytest.mark.parametrize(
    ("lam", "drift", "warning"),
    [
        (5.0, 1.0, "the step cache reused all that it may, 13 of 20 steps; no drift made it compute (computed: first, last, streak)"),
        (5.0, 9.0, "the step cache reused nothing (17 of 20 steps: video drift)"),
    ],
)
def test_a_cache_that_reuses_all_it_may_says_so(lam: float, drift: float, warning: str) -> None:
    assert Trace(lam, 20, run(Budget(lam=lam), [drift] * 20)).warning == warning


def test_a_cache_whose_drift_decided_anything_is_silent() -> None:
    for odd in (9.0, math.nan):  # one step of twenty
        drifts = [1.0] * 10 + [odd] + [1.0] * 9
        trace = Trace(5.0, 20, run(Budget(lam=5.0), drifts))
        assert 2 * trace.reused > 20 and trace.warning == ""
    few = Trace(5.0, 8, run(Budget(lam=5.0), [1.0] * 8))
    assert few.reused == 1 and few.warning == ""
