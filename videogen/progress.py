"""Events of a render and the wish to stop; knows nothing of how they are shown."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from videogen.errors import CancelledRender

PHASES = ("expand", "load", "text", "prepare", "denoise", "decode", "encode")


@dataclass(frozen=True, slots=True)
class Event:
    """One moment: a phase begins (`step` 0) or a step of it is done; `total` is 0 for phases without steps."""

    phase: str
    step: int = 0
    total: int = 0


OnEvent = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """The do-nothing listener."""


def at_once() -> None:
    """The wait for a device that is done when a call returns."""


@dataclass(slots=True)
class StopFlag:
    """Set from a signal handler or another thread, read between steps."""

    wanted: bool = False

    def set(self) -> None:
        """Ask for a stop at the next step."""
        self.wanted = True

    def check(self) -> None:
        """Raise CancelledRender when a stop is wanted."""
        if self.wanted:
            raise CancelledRender("stopped between steps")


@dataclass(slots=True)
class PhaseClock:
    """Emits phase events and keeps how long each phase took, in seconds; `wait` lets the device finish what a phase has asked for.

    `steps_s` is how long each step took by the host's clock: the device's own time where a step waits for it, as under a step cache.
    """

    on_event: OnEvent
    stop: StopFlag
    wait: Callable[[], None] = at_once
    stages_s: dict[str, float] = field(default_factory=dict)
    steps_s: list[float] = field(default_factory=list)
    _phase: str = ""
    _began: float = 0.0
    _stepped: float = 0.0

    def enter(self, phase: str) -> None:
        """End the running phase and begin another; phases of one name add up."""
        self.stop.check()
        if phase == self._phase:
            return
        self.close()
        self._phase, self._began = phase, time.perf_counter()
        self.on_event(Event(phase))

    def step(self, done: int, total: int) -> None:
        """Report a finished step of the running phase, then give way to a wish to stop."""
        began, self._stepped = self._stepped, time.perf_counter()
        if done:
            self.steps_s.append(self._stepped - began)
        self.on_event(Event(self._phase, done, total))
        if done < total:
            self.stop.check()

    def close(self) -> None:
        """End the running phase."""
        if self._phase:
            self.wait()
            self.stages_s[self._phase] = self.stages_s.get(self._phase, 0.0) + time.perf_counter() - self._began
        self._phase = ""


class StepBar:
    """Takes the place of a denoising loop's tqdm bar and reports each step; raising here is outside the loop's error log."""

    def __init__(self, total: int, clock: PhaseClock) -> None:
        self.total, self.done, self.clock = total, 0, clock

    def __enter__(self) -> "StepBar":
        self.clock.step(0, self.total)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def update(self, steps: int = 1) -> None:
        """Count steps that are done."""
        self.done += steps
        self.clock.step(self.done, self.total)
