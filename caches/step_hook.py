"""Puts the step cache into a transformer's block stack for one request, and takes it out again without a trace.

The first block always runs and is the probe: how far its residual is from what its own past foretells is the drift. On a reused
step the rest of the stack is replaced by its cached residual, extrapolated over sigma, on the generated rows only: no other row
reaches an output.
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
from caches.trace import Trace

_SHARDED = ("FSDPModule", "FullyShardedDataParallel")

Rule = Callable[[Budget, History, Step, Mapping[str, float]], Decision]


@dataclass(frozen=True, slots=True)
class Channel:
    """Rows of one modality: their positions in the packed sequence, and their sigmas with the last 0.

    order is that of the polynomial over sigma through the last computed steps that replaces the rest of the stack (0 copies);
    drift_order that of the one the probe is held against (0: the last computed step).
    """

    rows: torch.Tensor
    sigmas: Sequence[float]
    order: int = 2
    drift_order: int = 1


@dataclass(slots=True)
class _Point:
    """A residual at one computed step: of the first block, or of the rest of the stack."""

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
                self._remember(self.probe, name, residual, self.channels[name].drift_order)

    def _remember(self, kept: dict[str, list[_Point]], name: str, residual: torch.Tensor, order: int) -> None:
        """Keep as many points as a polynomial of this order takes."""
        point = _Point(self.channels[name].sigmas[self.index], residual)
        kept[name] = [*kept.get(name, []), point][-order - 1 :]

    def score(self, before: torch.Tensor, after: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The first block's residual on the generated rows, and its drift from what the computed steps foretell.

        Asked of every rank whenever a reference exists, so that no rank waits for another.
        """
        now = {name: (after - before).index_select(1, channel.rows) for name, channel in self.channels.items()}
        if not self.probe:
            return now, {}
        if any(self.probe[name][-1].residual.shape != tensor.shape for name, tensor in now.items()):
            return now, dict.fromkeys(now, math.nan)
        foretold = {name: extrapolate(points, self.channels[name].sigmas[self.index]) for name, points in self.probe.items()}
        return now, relative_change(now, foretold, self.agree)

    def keep(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Store the rest of the stack's residual."""
        for name, channel in self.channels.items():
            self._remember(self.points, name, (after - before).index_select(1, channel.rows), channel.order)

    def predict(self, hidden: torch.Tensor) -> torch.Tensor:
        """The stack's output from its cached residuals: (B, S, D), rows outside the channels as they came."""
        out = hidden
        for name, channel in self.channels.items():
            residual = extrapolate(self.points[name], channel.sigmas[self.index])
            out = out.index_add(1, channel.rows, residual.to(out.dtype))
        return out

    def finish(self) -> None:
        """The step is over: count it."""
        assert self.decision is not None
        self.trace.append(self.decision)
        self.history = self.history.after(self.decision.action)
        self.index, self.decision = self.index + 1, None


def extrapolate(points: Sequence[_Point], sigma: float) -> torch.Tensor:
    """The polynomial over sigma through the points (Lagrange), read at `sigma`, in float32; a single point is copied."""
    last = points[-1]
    if len(points) == 1:
        return last.residual
    out = torch.zeros_like(last.residual, dtype=torch.float32)
    for point in points:
        others = [other.sigma for other in points if other is not point]
        weight = math.prod((sigma - other) / (point.sigma - other) for other in others)
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
