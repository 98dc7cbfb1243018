"""Puts the step cache into a transformer's block stack for one request, and takes it out again without a trace.

The first block always runs and is the probe. On a reused step the rest of the stack is replaced by its cached residual,
extrapolated over sigma (order 1) or copied (order 0), on the generated rows only: no other row reaches an output.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from caches.drift import Agree, alone, relative_change
from caches.policy import Action, Budget, Decision, History, Step, decide
from caches.trace import Trace

_SHARDED = ("FSDPModule", "FullyShardedDataParallel")

Rule = Callable[[Budget, History, Step, Mapping[str, float]], Decision]


@dataclass(frozen=True, slots=True)
class Channel:
    """Rows of one modality: their positions in the packed sequence, sigmas with the last 0, extrapolation order 0 or 1."""

    rows: torch.Tensor
    sigmas: Sequence[float]
    order: int = 1


@dataclass(slots=True)
class _Point:
    """The rest of the stack's residual at one computed step."""

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
    probe: dict[str, torch.Tensor] = field(default_factory=dict)
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
        kept = [*self.probe.values(), *(point.residual for points in self.points.values() for point in points)]
        return sum(tensor.nbytes for tensor in kept)

    def look(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Score the first block's residual and decide this step."""
        now, drift = self.score(before, after)
        self.decision = self.rule(self.budget, self.history, Step(self.index, self.trace.total), drift)
        if self.decision.action is Action.COMPUTE:
            self.probe = now
        if self.decision.reason == "unknown":
            self.points.clear()  # what came before must not be extrapolated from

    def score(self, before: torch.Tensor, after: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The first block's residual on the generated rows, and its drift since the last computed step.

        Asked of every rank whenever a reference exists, so that no rank waits for another.
        """
        now = {name: (after - before).index_select(1, channel.rows) for name, channel in self.channels.items()}
        if not self.probe:
            return now, {}
        if any(self.probe[name].shape != tensor.shape for name, tensor in now.items()):
            return now, dict.fromkeys(now, math.nan)
        return now, relative_change(now, self.probe, self.agree)

    def keep(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Store the rest of the stack's residual; two points are enough for order 1."""
        for name, channel in self.channels.items():
            residual = (after - before).index_select(1, channel.rows)
            point = _Point(channel.sigmas[self.index], residual)
            self.points[name] = [*self.points.get(name, [])[-1:], point]

    def predict(self, hidden: torch.Tensor) -> torch.Tensor:
        """The stack's output from its cached residuals: (B, S, D), rows outside the channels as they came."""
        out = hidden
        for name, channel in self.channels.items():
            residual = extrapolate(self.points[name], channel.sigmas[self.index], channel.order)
            out = out.index_add(1, channel.rows, residual.to(out.dtype))
        return out

    def finish(self) -> None:
        """The step is over: count it."""
        assert self.decision is not None
        self.trace.append(self.decision)
        self.history = self.history.after(self.decision.action)
        self.index, self.decision = self.index + 1, None


def extrapolate(points: Sequence[_Point], sigma: float, order: int) -> torch.Tensor:
    """A line through the last two residuals over sigma, or the last one where there is no other."""
    last = points[-1]
    if order == 0 or len(points) < 2 or points[-2].sigma == last.sigma:
        return last.residual
    weight = (sigma - last.sigma) / (last.sigma - points[-2].sigma)
    return torch.lerp(last.residual, points[-2].residual, -weight)


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
