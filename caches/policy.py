"""Decides whether a step is computed or reused: pure, standard library only, the same on every rank.

The policies form one family ordered by `lam`; `lam = 0` computes everything. Unknown means compute. Whether a `lam` is
safe is not decided here: `calibrate` measures it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

FEWEST_STEPS = 7
ONE_REUSE_UP_TO = 10
WARM_UP = 0.08  # 4 of 49 steps


class Action(StrEnum):
    """What happens to a step."""

    COMPUTE = "compute"
    REUSE = "reuse"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much drift may be reused over.

    lam: the largest relative drift of the probe, in any channel; 0 is off. max_streak: reuses in a row. first and last:
    computed steps at either end of the schedule. warm_up: the share of the schedule that is computed at its beginning,
    where an error changes the whole composition.
    """

    lam: float = 0.0
    max_streak: int = 3
    first: int = 2
    last: int = 1
    warm_up: float = WARM_UP

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lam) and self.lam >= 0):
            raise ValueError(f"cache lambda: got {self.lam}, expected a finite number of at least 0; use 0 to switch the cache off")
        for name in ("max_streak", "first", "last"):
            if getattr(self, name) < 1:
                raise ValueError(f"cache {name}: got {getattr(self, name)}, expected at least 1; change it")
        if not 0 <= self.warm_up <= 1:
            raise ValueError(f"cache warm-up: got {self.warm_up}, expected a share from 0 to 1; change it")


@dataclass(frozen=True, slots=True)
class History:
    """What has happened to this request so far."""

    computed: int = 0
    reused: int = 0
    streak: int = 0

    def after(self, action: Action) -> "History":
        """The history once `action` was taken."""
        if action is Action.REUSE:
            return History(self.computed, self.reused + 1, self.streak + 1)
        return History(self.computed + 1, self.reused, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """The step to decide: `index` from 0 of `total` forwards."""

    index: int
    total: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The action, why, and the predicted risk: the drift of the worst channel (0 for a computed step)."""

    action: Action
    reason: str
    risk: float = 0.0
    drift: Mapping[str, float] = field(default_factory=dict)


def must_compute(budget: Budget, history: History, step: Step) -> str:
    """Why the step is computed whatever its drift, or an empty string when the drift decides."""
    if budget.lam == 0:
        return "off"
    if step.total < FEWEST_STEPS:
        return "few steps"
    if step.index < max(budget.first, math.ceil(budget.warm_up * step.total)) or history.computed < budget.first:
        return "first"
    if step.index >= step.total - budget.last:
        return "last"
    if step.total <= ONE_REUSE_UP_TO and history.reused >= 1:
        return "few steps, one reuse"
    if history.streak >= budget.max_streak:
        return "streak"
    return ""


def decide(budget: Budget, history: History, step: Step, drift: Mapping[str, float]) -> Decision:
    """Compute or reuse.

    `drift` holds per channel (`video`, `audio`) how far the probe is from what the computed steps foretell, relative to
    that. A channel that is not finite, negative or missing altogether means compute.
    """
    forced = must_compute(budget, history, step)
    if forced:
        return Decision(Action.COMPUTE, forced, drift=drift)
    if not drift or not all(math.isfinite(value) and value >= 0 for value in drift.values()):
        return Decision(Action.COMPUTE, "unknown", drift=drift)
    worst = max(sorted(drift), key=lambda channel: drift[channel])
    if drift[worst] > budget.lam:
        return Decision(Action.COMPUTE, f"{worst} drift", drift=drift)
    return Decision(Action.REUSE, "within budget", risk=drift[worst], drift=drift)
