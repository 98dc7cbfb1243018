"""The step cache's policy over cached prompt prefixes: which there are, whose weights made them, and whether one may be reused.

Text reuse is exact while the identity is right; its risks are a changed identity, numerics between batch shapes, and models whose
answer to a prefix depends on what follows. So the drift that `caches.policy.decide` is given is `identity` (0 the same, 1 another) and
`shadow`, the largest error that a check of this prefix has found. Units are tokens: a step's index is how many are cached, its total
how many the prompt has; a streak that is over is a check that is due. Knows no tensors: a payload is the engine's.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from caches.policy import Action, Budget, Decision, History, Step, decide
from caches.trace import Trace

TEXT_BUDGET = Budget(lam=1e-3, max_streak=31, first=16, last=1, warm_up=0.0)
MAX_BYTES = 4_000_000_000
MAX_ENTRIES = 64
MAX_SPACING = 255
KEPT_DECISIONS = 4096
_TOKEN = 8  # bytes

Rule = Callable[[Budget, History, Step, Mapping[str, float]], Decision]


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, eight each, so that a prefix of the ids is a prefix of the bytes."""
    return array("q", tokens).tobytes()


@dataclass(slots=True)
class Entry:
    """One cached prefix: what made it, what it holds, and how often it served since it was last checked."""

    key: bytes
    length: int
    payload: Any
    num_bytes: int
    identity: str
    generation: int
    history: History
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Look:
    """The decision for one prompt of `total` tokens. `entry` holds its first `matched`, for a reuse or a check (which computes)."""

    decision: Decision
    total: int
    entry: Entry | None = None
    matched: int = 0

    @property
    def cached(self) -> int:
        """How many tokens need no computing."""
        return self.matched if self.decision.action is Action.REUSE else 0

    @property
    def is_check(self) -> bool:
        """Whether the prompt is to be computed in full and held against the cached prefix."""
        return self.entry is not None and self.decision.reason == "streak"


@dataclass(slots=True)
class PrefixCache:
    """Prefixes of one model as it is now. Every change of weights, adapters or their strength goes through `change`.

    budget.max_streak + 1 is how many hits a check is spent on at first; a clean check doubles that, a missed one halves it and evicts
    everything. With a lambda of 0 nothing is kept or reused. unit: a paged prefix serves in any whole number of so many leading
    tokens; 0 where it serves whole or not at all.
    """

    identity: str
    budget: Budget = TEXT_BUDGET
    max_bytes: int = MAX_BYTES
    max_entries: int = MAX_ENTRIES
    unit: int = 0
    rule: Rule = decide
    generation: int = 0
    spacing: int = field(init=False)
    entries: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)
    counts: Counter[str] = field(default_factory=Counter)
    trace: Trace = field(init=False)

    def __post_init__(self) -> None:
        self.spacing = self.budget.max_streak
        self.trace = Trace(self.budget.lam, 0)

    @property
    def num_bytes(self) -> int:
        """What the kept prefixes hold, by the engine's own count."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def look(self, tokens: Sequence[int]) -> Look:
        """Decide about a prompt: the longest cached prefix that leaves a token to compute, or none."""
        key = packed(tokens)
        entry, matched = self._longest(key)
        drift = {} if entry is None else {"identity": float(not self._is_current(entry)), "shadow": entry.error}
        history = History() if entry is None else entry.history
        decision = self.rule(replace(self.budget, max_streak=self.spacing), history, Step(matched, len(tokens)), drift)
        self.enter(decision)
        if entry is not None and drift["identity"]:
            self.drop(entry, "identity")
            entry, matched = None, 0
        if entry is not None and decision.action is Action.REUSE:
            entry.history = entry.history.after(Action.REUSE)
            self.entries.move_to_end(entry.key)
        return Look(decision, len(tokens), entry, matched)

    def _longest(self, key: bytes) -> tuple[Entry | None, int]:
        """The entry that holds the most leading tokens of a prompt, and how many: as many as the policy lets be reused at all."""
        most = len(key) // _TOKEN - 1 - self.budget.last
        found = [(entry, self._matched(entry, key, most)) for entry in self.entries.values()]
        entry, matched = max(found, key=lambda each: (each[1], each[0].history.streak), default=(None, 0))
        return (entry, matched) if matched else (None, 0)

    def _matched(self, entry: Entry, key: bytes, most: int) -> int:
        if entry.length <= most and key.startswith(entry.key):
            return entry.length
        if not self.unit:
            return 0
        low, high = 0, min(entry.length, most) // self.unit  # pages: `low` are equal, more than `high` cannot be
        while low < high:
            middle = (low + high + 1) // 2
            end = middle * self.unit * _TOKEN
            low, high = (middle, high) if key[:end] == entry.key[:end] else (low, middle - 1)
        return low * self.unit

    def _is_current(self, entry: Entry) -> bool:
        return entry.identity == self.identity and entry.generation == self.generation

    def enter(self, decision: Decision) -> None:
        """Count a decision and keep it in the trace."""
        self.counts[decision.action.value] += 1
        self.trace.append(decision)
        del self.trace.decisions[:-KEPT_DECISIONS]

    def keep(self, tokens: Sequence[int], payload: Any, num_bytes: int = 0) -> Entry | None:
        """Keep a prefix that was just computed; the least recently used go when there are too many. None when it is not worth keeping."""
        if self.budget.lam == 0 or len(tokens) < self.budget.first or num_bytes > self.max_bytes:
            return None
        entry = Entry(packed(tokens), len(tokens), payload, num_bytes, self.identity, self.generation, History(computed=len(tokens)))
        self.entries[entry.key] = entry
        self.entries.move_to_end(entry.key)
        while len(self.entries) > self.max_entries or self.num_bytes > self.max_bytes:
            self.drop(next(iter(self.entries.values())), "room")
        return entry

    def checked(self, look: Look, error: float) -> bool:
        """Enter what a check found (relative error of the answer's first logits); True when the prefix stands.

        A check that fails, or whose error is no number, evicts everything: what made one prefix wrong made the others.
        """
        assert look.entry is not None
        is_good = error <= self.budget.lam  # false for NaN
        self.counts["checks"] += 1
        if is_good:
            look.entry.error = max(look.entry.error, error)
            look.entry.history = replace(look.entry.history, streak=0)
            self.spacing = min(2 * self.spacing + 1, MAX_SPACING)
        else:
            self.counts["misses"] += 1
            self.spacing = max(1, self.spacing // 2)
            self.evict("missed check")
        return is_good

    def unchecked(self, look: Look) -> None:
        """A check could not be made: another is due after as many hits as before, and nothing was learnt."""
        assert look.entry is not None
        self.counts["checks not possible"] += 1
        look.entry.history = replace(look.entry.history, streak=0)

    def change(self, identity: str, reason: str) -> None:
        """The model is another from here on: a new generation, and nothing of the old one is left."""
        self.generation += 1
        self.identity = identity
        self.evict(reason)

    def evict(self, reason: str) -> None:
        """Drop everything."""
        for entry in [*self.entries.values()]:
            self.drop(entry, reason)

    def drop(self, entry: Entry, reason: str) -> None:
        """Drop one prefix; its payload is let go at once."""
        self.entries.pop(entry.key, None)
        entry.payload = None
        self.counts[f"evicted: {reason}"] += 1

    def record(self) -> dict[str, Any]:
        """`cache` in the schema of a clip's sidecar, over the last decisions; `prefixes` since the start."""
        return {
            "cache": self.trace.record(),
            "prefixes": {
                "identity": self.identity,
                "generation": self.generation,
                "entries": len(self.entries),
                "bytes": self.num_bytes,
                "check_share": round(1 / (self.spacing + 1), 6),
                "counts": dict(sorted(self.counts.items())),
            },
        }
