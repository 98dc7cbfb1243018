"""The step cache in Wan's block stacks: a state for each stream of guidance in each expert, all telling one trace.

Guidance asks the transformer twice a step, `cond` then `uncond`; diffusers names the call by its cache context. A second expert begins
with nothing to reuse, at its own place of the schedule; what the first kept is let go then.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from caches.policy import Action, Budget, Decision, History, Step, decide
from caches.step_hook import Channel, Rule, State, replaced, watched
from caches.trace import Trace
from videogen.config import StepCache
from videogen.parallel.sharding import ALONE, Sharding

COND, UNCOND = "cond", "uncond"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one request: their sigmas with the last 0, how many the first expert takes, and the rows that are generated.

    They are a grid (t, h, w) behind `begin` rows of a given first frame (TI2V).
    """

    sigmas: Sequence[float]
    boundary_step: int
    begin: int
    grid: tuple[int, int, int]
    is_guided: bool

    @property
    def steps(self) -> int:
        """Steps of the request."""
        return len(self.sigmas) - 1

    @property
    def end(self) -> int:
        """All rows of the sequence."""
        return self.begin + math.prod(self.grid)

    @property
    def streams(self) -> tuple[str, ...]:
        """The calls of a step, in order."""
        return (COND, UNCOND) if self.is_guided else (COND,)


@dataclass(slots=True)
class Follow:
    """A rule that takes the decision the leading stream took for this step, unless it is not known what would be reused."""

    trace: Trace

    def __call__(self, budget: Budget, history: History, step: Step, drift: Mapping[str, float]) -> Decision:
        """Compute with the leader; reuse with it where this stream's own drift is finite."""
        leader = self.trace.decisions[-1]
        if leader.action is Action.REUSE and not (drift and all(map(math.isfinite, drift.values()))):
            return Decision(Action.COMPUTE, "unknown", drift=drift)
        return Decision(leader.action, f"as {COND}", risk=leader.risk, drift=drift)


@dataclass(slots=True)
class _Experts:
    """The states of a request, by expert and stream, and the stream that is being asked now."""

    states: list[dict[str, State]]
    stream: str = COND
    active: int = field(default=-1)

    def enter(self, expert: int) -> str:
        """The stream an expert is asked for; what the others kept is let go."""
        if expert != self.active:
            for other in self.states[:expert] + self.states[expert + 1 :]:
                forget(other)
            self.active = expert
        return self.stream


def forget(states: Mapping[str, State]) -> None:
    """Drop what the states keep."""
    for state in states.values():
        state.probe.clear()
        state.points.clear()


class _Streams(nn.Module):
    """One of the two modules that stand for a stack (the probe, or the rest), for every stream."""

    def __init__(self, modules: Mapping[str, nn.Module], expert: int, experts: _Experts) -> None:
        super().__init__()
        self.streams = nn.ModuleDict(modules)
        self.expert, self.experts = expert, experts

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """As the stream's own module."""
        out: torch.Tensor = self.streams[self.experts.enter(self.expert)](hidden_states, *args, **kwargs)
        return out


@contextmanager
def _naming(transformer: Any, experts: _Experts) -> Iterator[None]:
    """Inside the scope the transformer's cache contexts, which the pipelines enter around every call, say which stream it is."""
    stock = transformer.cache_context

    @contextmanager
    def cache_context(name: str, **kwargs: Any) -> Iterator[None]:
        experts.stream = name
        with stock(name, **kwargs):
            yield

    transformer.cache_context = cache_context
    try:
        yield
    finally:
        del transformer.cache_context


def _check(transformers: Sequence[Any], schedule: Schedule) -> None:
    if any(later >= earlier for earlier, later in pairwise(schedule.sigmas)):
        raise ValueError("step cache: got sigmas that do not fall, expected a falling schedule; use another scheduler, or lambda 0")
    if any(len(each.blocks) < 2 for each in transformers):
        raise ValueError("step cache: got a stack of one block, expected at least 2; use lambda 0")


def open_states(
    options: StepCache, schedule: Schedule, starts: Sequence[int], device: torch.device, rule: Rule, sharding: Sharding = ALONE
) -> _Experts:
    """A state for every stream of every expert, of this rank's rows; `starts` are the experts' first steps."""
    budget = Budget(lam=options.lam, max_streak=options.max_streak, warm_up=options.warm_up)
    rows = sharding.own(torch.arange(schedule.begin, schedule.end, device=device), schedule.end)
    channels = {"video": Channel(rows, schedule.sigmas, options.video_order, options.drift_order)}
    trace = Trace(options.lam, schedule.steps)
    rules = {COND: rule, UNCOND: Follow(trace) if options.streams == "together" else rule}
    states = [
        {name: State(budget, channels, agree=sharding.agree, rule=rules[name], index=start) for name in schedule.streams}
        for start in starts
    ]
    for each in states:
        for state in each.values():
            state.trace = trace
    return _Experts(states)


@contextmanager
def wan_cache(
    transformers: Sequence[Any], options: StepCache, schedule: Schedule | None, rule: Rule = decide, sharding: Sharding = ALONE
) -> Iterator[Trace]:
    """Cache the steps of one request in one expert or two; their stacks are put back in any case.

    Yields the trace, which tells the streams of a step in turn. Raises ValueError for a schedule or stack that has no cache.
    With lambda 0 nothing is touched.
    """
    if options.lam == 0 or schedule is None:
        yield Trace(0.0, 0)
        return
    _check(transformers, schedule)
    device = transformers[0].proj_out.weight.device
    experts = open_states(options, schedule, (0, schedule.boundary_step)[: len(transformers)], device, rule, sharding)
    with ExitStack() as stack:
        for number, transformer in enumerate(transformers):
            for scope in _scopes(transformer, number, experts):
                stack.enter_context(scope)
        try:
            yield next(iter(experts.states[0].values())).trace
        finally:
            for states in experts.states:
                forget(states)


def _scopes(transformer: Any, number: int, experts: _Experts) -> tuple[AbstractContextManager[None], ...]:
    parts = {name: watched(list(transformer.blocks), state) for name, state in experts.states[number].items()}
    stack = [_Streams({name: part[index] for name, part in parts.items()}, number, experts) for index in range(2)]
    return _naming(transformer, experts), replaced(transformer, "blocks", stack)
