"""The only clock of measurements: it is `videogen.timing`, which `videogen doctor` reads too."""

from videogen.timing import MIN_RUNS, Clock, CpuClock, Timing, WallClock, synchronizer, time_call, time_once

__all__ = ["MIN_RUNS", "Clock", "CpuClock", "Timing", "WallClock", "synchronizer", "time_call", "time_once"]
