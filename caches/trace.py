"""What a cache did to one request, as plain data; knows nothing of tensors."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from caches.policy import Action, Decision

_DIGITS = 6


@dataclass(slots=True)
class Trace:
    """The decisions of one request, in order."""

    lam: float
    total: int
    decisions: list[Decision] = field(default_factory=list)

    def append(self, decision: Decision) -> None:
        """Keep one decision."""
        self.decisions.append(decision)

    @property
    def reused(self) -> int:
        """How many steps were reused."""
        return sum(decision.action is Action.REUSE for decision in self.decisions)

    @property
    def warning(self) -> str:
        """Said when the cache was on and reused nothing, or all that it may, with the reasons; empty otherwise."""
        if self.lam == 0 or not self.decisions:
            return ""
        total, computed = len(self.decisions), Counter(each.reason for each in self.decisions if each.action is Action.COMPUTE)
        if not self.reused:
            reason, times = computed.most_common(1)[0]
            return f"the step cache reused nothing ({times} of {total} steps: {reason})"
        if 2 * self.reused > total and not any(reason == "unknown" or reason.endswith(" drift") for reason in computed):
            told = ", ".join(sorted(computed))
            return f"the step cache reused all that it may, {self.reused} of {total} steps; no drift made it compute (computed: {told})"
        return ""

    def record(self) -> dict[str, Any]:
        """The sidecar's `cache` entry."""
        steps = [
            {
                "action": decision.action.value,
                "reason": decision.reason,
                "risk": round(decision.risk, _DIGITS),
                "drift": {name: _number(value) for name, value in decision.drift.items()},
            }
            for decision in self.decisions
        ]
        counts = Counter(f"{decision.action.value}: {decision.reason}" for decision in self.decisions)
        return {
            "lambda": self.lam,
            "reused": self.reused,
            "computed": len(self.decisions) - self.reused,
            "reasons": dict(sorted(counts.items())),
            "warning": self.warning,
            "steps": steps,
        }


def _number(value: float) -> float | str:
    """JSON has no NaN; the word says more than null would."""
    return round(value, _DIGITS) if value == value and abs(value) != float("inf") else str(value)
