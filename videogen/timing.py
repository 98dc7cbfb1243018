"""The only clock: how long things take, with warm-up, synchronisation and spread; knows nothing of clips."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

MIN_RUNS = 5


class Clock(Protocol):
    """Seconds that only go forward."""

    def now(self) -> float:
        """The time in seconds since some fixed moment."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter()


class CpuClock:
    """The processor time of this process, all threads together: what a busy machine changes least."""

    def now(self) -> float:
        """Seconds."""
        return time.process_time()


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured runs in seconds, in the order they ran."""

    runs_s: tuple[float, ...]
    warmup: int

    @property
    def median_s(self) -> float:
        """The middle run."""
        return statistics.median(self.runs_s)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.runs_s) - min(self.runs_s)) / self.median_s if self.median_s else 0.0

    def row(self) -> dict[str, float | int]:
        """Plain data for a report."""
        return {
            "median_s": self.median_s,
            "min_s": min(self.runs_s),
            "max_s": max(self.runs_s),
            "spread": self.spread,
            "runs": len(self.runs_s),
            "warmup": self.warmup,
        }


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Waits until the device has done what was asked of it; nothing on the CPU, which is never ahead."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None


def time_once(call: Callable[[], object], *, synchronize: Callable[[], None] = lambda: None, clock: Clock | None = None) -> float:
    """Seconds of one call without warm-up, for what cannot be repeated."""
    source = clock or WallClock()
    synchronize()
    began = source.now()
    call()
    synchronize()
    return source.now() - began


def time_call(
    call: Callable[[], object],
    *,
    runs: int = MIN_RUNS,
    warmup: int = 2,
    min_runs: int = MIN_RUNS,
    synchronize: Callable[[], None] = lambda: None,
    clock: Clock | None = None,
) -> Timing:
    """Time `call` after `warmup` calls of the same, waiting for the device before each reading.

    Raises ValueError for fewer than five runs: a median of less says nothing. Lower `min_runs` only where one run takes many
    seconds, and print the number of runs beside the figure.
    """
    if runs < min_runs or warmup < 1:
        raise ValueError(f"runs and warmup: got {runs} and {warmup}, expected at least {min_runs} and 1; measure longer")
    source = clock or WallClock()
    for _ in range(warmup):
        call()
    synchronize()
    measured = []
    for _ in range(runs):
        began = source.now()
        call()
        synchronize()
        measured.append(source.now() - began)
    return Timing(tuple(measured), warmup)
