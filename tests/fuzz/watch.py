"""What no input may do, watched while one is tried: run long, take memory, write outside its folders, start or call anything."""

import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

DEADLINE_S = 10.0  # of this process's own time, so that a busy machine is no hang; waiting counts too, thirty times as patiently
DEAF_S = 400.0  # native code that does not come back in this time ends the run, with the stack on standard error
MAX_GROWTH_MB = 1500.0  # the largest picture that is taken (100 million pixels) needs 900 to be looked at
_WRITING = ("os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.symlink", "os.link", "os.truncate", "shutil.rmtree", "os.chmod")
_CALLING = ("socket.connect", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")


class Hang(BaseException):
    """The deadline of one input is over."""


@dataclass(slots=True)
class Seen:
    """What happened during one input."""

    writes: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    seconds: float = 0.0
    growth_mb: float = 0.0


_current: list[Seen] = []
_is_hooked: list[bool] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _current:
        return
    if event == "open":
        path, _, flags = args
        is_write = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if is_write and isinstance(path, str | bytes):
            _current[-1].writes.append(os.fsdecode(path))
    elif event in _WRITING:
        _current[-1].writes += [
            os.fsdecode(arg) for arg in args[: 2 if event in ("os.rename", "os.link") else 1] if isinstance(arg, str | bytes)
        ]
    elif event in _CALLING:
        _current[-1].calls.append(f"{event} {str(args)[:200]}")


def _alarm(_number: int, _frame: FrameType | None) -> None:
    raise Hang


def peak_mb() -> float:
    """The most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


@contextmanager
def watched() -> Iterator[Seen]:
    """Watch the block; raises Hang in it when its time is over. One at a time, in the main thread."""
    if not _is_hooked:
        sys.addaudithook(_hook)  # for good: Python has no way to take one off
        _is_hooked.append(True)
    seen, before = Seen(), peak_mb()
    old = {number: signal.signal(number, _alarm) for number in (signal.SIGALRM, signal.SIGPROF)}
    faulthandler.dump_traceback_later(DEAF_S, exit=True)
    signal.setitimer(signal.ITIMER_PROF, DEADLINE_S)
    signal.setitimer(signal.ITIMER_REAL, 30 * DEADLINE_S)
    began = time.perf_counter()
    _current.append(seen)
    try:
        yield seen
    finally:
        _current.clear()
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in old.items():
            signal.signal(number, handler)
        seen.seconds, seen.growth_mb = time.perf_counter() - began, peak_mb() - before


def strays(seen: Seen, allowed: tuple[Path, ...]) -> list[str]:
    """Paths that were written outside these folders."""
    places = tuple(os.path.realpath(each) for each in allowed)
    found = (os.path.realpath(path) for path in seen.writes if not path.startswith("/dev/") and "__pycache__" not in path)
    return [path for path in found if not any(path == place or path.startswith(place + os.sep) for place in places)]
