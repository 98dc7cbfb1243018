"""Puts the step cache into a transformer's block stack for one request, and takes it out again without a trace.

The first block always runs and is the probe: how far its residual is from what its own past foretells is the drift. On a reused
step the rest of the stack is replaced by a combination of its cached residuals, on the generated rows only: no other row reaches an
output. The combination is the polynomial over sigma through them, or, where a prior is known for the schedule, the best linear one;
the drift then is the error expected of that, times how much farther the probe is off than expected.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from caches.drift import Agree, alone, relative_change
from caches.policy import Action, Budget, Decision, History, Step, decide
from caches.prior import Gram, foretell
from caches.trace import Trace

_SHARDED = ("FSDPModule", "FullyShardedDataParallel")
PROBED_ROWS = 1024  # of a channel, where a prior says how far off the probe may be: its size needs no more

Rule = Callable[[Budget, History, Step, Mapping[str, float]], Decision]


@dataclass(frozen=True, slots=True)
class Channel:
    """Rows of one modality: their positions in the packed sequence, and their sigmas with the last 0.

    order is that of the polynomial over sigma through the last computed steps that replaces the rest of the stack (0 copies);
    drift_order that of the one the probe is held against (0: the last computed step). prior is what the schedule's prior knows of
    the channel's probe and of the rest; the last order + 1 computed steps are combined as it says.
    """

    rows: torch.Tensor
    sigmas: Sequence[float]
    order: int = 2
    drift_order: int = 1
    prior: tuple[Gram, Gram] | None = None

    @property
    def probed(self) -> torch.Tensor:
        """The rows whose first residual is looked at: all, or with a prior an even choice of them."""
        return self.rows if self.prior is None else self.rows[:: max(1, len(self.rows) // PROBED_ROWS)]


@dataclass(slots=True)
class _Point:
    """A residual at one computed step: of the first block, or of the rest of the stack."""

    index: int
    sigma: float
    residual: torch.Tensor


@dataclass(slots=True)
class State:
    """Everything the cache keeps for one request; dies with the scope. Hidden states are (B, S, D)."""

    budget: Budget
    channels: Mapping[str, Channel]
    agree: Agree = alone
    rule: Rule = decide
    index: int = 0
    history: History = field(default_factory=History)
    probe: dict[str, list[_Point]] = field(default_factory=dict)
    points: dict[str, list[_Point]] = field(default_factory=dict)
    decision: Decision | None = None
    trace: Trace = field(init=False)

    def __post_init__(self) -> None:
        self.trace = Trace(self.budget.lam, len(next(iter(self.channels.values())).sigmas) - 1)

    @property
    def is_reusing(self) -> bool:
        """Whether this step's rest of the stack is to be predicted."""
        return self.decision is not None and self.decision.action is Action.REUSE

    @property
    def num_bytes(self) -> int:
        """What the cache holds now."""
        kept = [*self.probe.values(), *self.points.values()]
        return sum(point.residual.nbytes for points in kept for point in points)

    def look(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Score the first block's residual and decide this step."""
        now, drift = self.score(before, after)
        self.decision = self.rule(self.budget, self.history, Step(self.index, self.trace.total), drift)
        if not all(map(math.isfinite, drift.values())):  # what came before must not be extrapolated from
            self.probe.clear()
            self.points.clear()
        if self.decision.action is Action.COMPUTE:
            for name, residual in now.items():
                channel = self.channels[name]
                self._remember(self.probe, name, residual, channel.order if channel.prior else channel.drift_order)

    def _remember(self, kept: dict[str, list[_Point]], name: str, residual: torch.Tensor, order: int) -> None:
        """Keep as many points as a polynomial of this order takes."""
        point = _Point(self.index, self.channels[name].sigmas[self.index], residual)
        kept[name] = [*kept.get(name, []), point][-order - 1 :]

    def score(self, before: torch.Tensor, after: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The first block's residual on the generated rows, and its drift from what the computed steps foretell.

        Asked of every rank whenever a reference exists, so that no rank waits for another.
        """
        now = {name: (after - before).index_select(1, channel.probed) for name, channel in self.channels.items()}
        if not self.probe:
            return now, {}
        if any(self.probe[name][-1].residual.shape != tensor.shape for name, tensor in now.items()):
            return now, dict.fromkeys(now, math.nan)
        foretold = {name: combine(points, self._weights(name, points, 0)[0]) for name, points in self.probe.items()}
        drift = relative_change(now, foretold, self.agree)
        return now, {name: self._expected(name, value) for name, value in drift.items()}

    def _weights(self, name: str, points: Sequence[_Point], which: int) -> tuple[list[float], float]:
        """How points of a channel are combined for this step, of the probe (0) or of the rest (1), and the error expected of that."""
        channel = self.channels[name]
        if channel.prior is None:
            return polynomial([point.sigma for point in points], channel.sigmas[self.index]), math.nan
        return foretell(channel.prior[which], [point.index for point in points], self.index)

    def _expected(self, name: str, drift: float) -> float:
        """The channel's drift: the probe's own, or the error that the prior expects of a reuse, grown as the probe's is beyond its."""
        if self.channels[name].prior is None or not math.isfinite(drift):
            return drift
        usual, error = (self._weights(name, points[name], which)[1] for which, points in enumerate((self.probe, self.points)))
        return error * max(1.0, drift / usual if usual > 0 else math.inf)

    def keep(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Store the rest of the stack's residual."""
        for name, channel in self.channels.items():
            self._remember(self.points, name, (after - before).index_select(1, channel.rows), channel.order)

    def predict(self, hidden: torch.Tensor) -> torch.Tensor:
        """The stack's output from its cached residuals: (B, S, D), rows outside the channels as they came."""
        out = hidden
        for name, channel in self.channels.items():
            residual = combine(self.points[name], self._weights(name, self.points[name], 1)[0])
            out = out.index_add(1, channel.rows, residual.to(out.dtype))
        return out

    def finish(self) -> None:
        """The step is over: count it."""
        assert self.decision is not None
        self.trace.append(self.decision)
        self.history = self.history.after(self.decision.action)
        self.index, self.decision = self.index + 1, None


def polynomial(known: Sequence[float], sigma: float) -> list[float]:
    """The weights that read the polynomial through values at `known` sigmas at another (Lagrange)."""
    return [math.prod((sigma - other) / (here - other) for other in known if other != here) for here in known]


def combine(points: Sequence[_Point], weights: Sequence[float]) -> torch.Tensor:
    """The weighted sum of the points' residuals, in float32; a single point is copied where its weight is 1."""
    if len(points) == 1 and weights[0] == 1:
        return points[0].residual
    out = torch.zeros_like(points[-1].residual, dtype=torch.float32)
    for point, weight in zip(points, weights):
        out.add_(point.residual, alpha=weight)
    return out


class _First(nn.Module):
    """The first block, watched."""

    def __init__(self, block: nn.Module, state: State) -> None:
        super().__init__()
        self.block = block
        self.state = state

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Run the block, then decide about the others."""
        out: torch.Tensor = self.block(hidden_states, *args, **kwargs)
        self.state.look(hidden_states, out)
        return out


class _Rest(nn.Module):
    """The other blocks, run or replaced."""

    def __init__(self, blocks: Sequence[nn.Module], state: State) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.state = state

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Run every block and keep the residual, or predict it."""
        state = self.state
        if state.is_reusing:
            out = state.predict(hidden_states)
        else:
            out = hidden_states
            for block in self.blocks:
                out = block(out, *args, **kwargs)
            state.keep(hidden_states, out)
        state.finish()
        return out


def _check(owner: nn.Module, stack: str, channels: Mapping[str, Channel]) -> nn.ModuleList:
    blocks = getattr(owner, stack, None)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) < 2:
        raise ValueError(f"step cache: got {stack!r} of {type(owner).__name__}, expected a stack of at least 2 blocks; use lambda 0")
    if isinstance(blocks[0], _First):
        raise ValueError("step cache: got a stack that has one already, expected none; leave the first scope before entering another")
    if any(base.__name__ in _SHARDED for block in blocks for base in type(block).__mro__):
        raise ValueError("step cache: got blocks sharded by FSDP, expected whole blocks; a skipped block would leave ranks waiting")
    lengths = {len(channel.sigmas) for channel in channels.values()}
    if len(lengths) != 1:
        raise ValueError(f"step cache: got schedules of {sorted(lengths)} points, expected one length; pass the sigmas really used")
    for name, channel in channels.items():
        if channel.prior is not None and len(channel.prior[0]) != len(channel.sigmas) - 1:
            steps = len(channel.sigmas) - 1
            raise ValueError(f"step cache: got a prior of {len(channel.prior[0])} steps, expected {steps}; measure one for this schedule")
        if any(later >= earlier for earlier, later in pairwise(channel.sigmas)):
            raise ValueError(f"step cache: got {name} sigmas that do not fall, expected a falling schedule; pass the sigmas really used")
    return blocks


@contextmanager
def replaced(owner: nn.Module, stack: str, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """`owner.<stack>` is `blocks` inside the scope, and what it was afterwards in any case."""
    before = getattr(owner, stack)
    setattr(owner, stack, nn.ModuleList(blocks))
    try:
        yield
    finally:
        setattr(owner, stack, before)


def watched(blocks: Sequence[nn.Module], state: State) -> list[nn.Module]:
    """The same stack as two modules under this state: the first block as the probe, and the rest."""
    return [_First(blocks[0], state), _Rest(list(blocks)[1:], state)]


@contextmanager
def step_cache(owner: nn.Module, stack: str, channels: Mapping[str, Channel], budget: Budget, *, agree: Agree = alone) -> Iterator[Trace]:
    """Cache the steps of one request: `owner.<stack>` is replaced inside the scope and put back in any case.

    `channels` names the generated rows of each modality. Yields the trace, which fills as steps run. Raises ValueError
    when the model has no plain block stack, or has a cache already. With a budget of 0 the model is not touched.
    """
    blocks = _check(owner, stack, channels)
    state = State(budget, channels, agree)
    if budget.lam == 0:
        yield state.trace
        return
    with replaced(owner, stack, watched(list(blocks), state)):
        try:
            yield state.trace
        finally:
            state.probe.clear()
            state.points.clear()
