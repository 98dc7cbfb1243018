"""Progress on standard error: a live bar, plain lines, JSON lines, or nothing."""

import json
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from videogen.errors import bad
from videogen.jobs.plan import Clip
from videogen.jobs.run import SilentScreen
from videogen.progress import Event

PLAIN_EVERY_S = 10.0


class QuietScreen(SilentScreen):
    """Nothing, as a context manager like the others."""

    def __enter__(self) -> "QuietScreen":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


def _size(clip: Clip) -> str:
    r = clip.draft.resolved
    return f"{r.workflow} {r.width}x{r.height}, {r.frames} frames, {r.steps} steps, seed {clip.seed}"


def tell(text: str) -> bool:
    """A line on standard error; False where that is gone (a closed pipe, a full disk): clips matter more than being heard."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        return False
    return True


class PlainScreen(QuietScreen):
    """A line per clip and phase, and at most one line in ten seconds between: fit for logs."""

    def __init__(self) -> None:
        self._last = self._began = 0.0
        self._phase = ""
        self._where = ""

    def _say(self, text: str) -> None:
        tell(text)
        self._last = time.monotonic()

    def begin(self, clip: Clip, number: int, total: int) -> None:
        """A line that says what is next."""
        self._where, self._phase, self._began = f"clip {number}/{total}", "", time.monotonic()
        if not clip.is_done:
            self._say(f"{self._where}: {clip.name} ({_size(clip)})")

    def event(self, event: Event) -> None:
        """Phases once, steps every ten seconds and at the end."""
        due = time.monotonic() - self._last >= PLAIN_EVERY_S
        last = event.total > 0 and event.step == event.total
        if event.phase != self._phase and event.total == 0:
            self._say(f"{self._where}: {event.phase}")
        elif event.total and event.step and (due or last):
            self._say(f"{self._where}: {event.phase} step {event.step} of {event.total}")
        self._phase = event.phase

    def end(self, clip: Clip, state: str, seconds: float, message: str) -> None:
        """How it went."""
        if state != "skipped":
            self._say(f"{self._where}: {state} in {seconds:.1f} s: {message}")


class JsonScreen(QuietScreen):
    """One JSON object a line, for wrappers; `on_deaf` is called where nobody takes them any more."""

    def __init__(self, on_deaf: Callable[[], None] = lambda: None) -> None:
        self._clip: dict[str, Any] = {}
        self._on_deaf = on_deaf

    def _emit(self, **values: Any) -> None:
        if not tell(json.dumps(self._clip | values)):
            self._on_deaf()

    def begin(self, clip: Clip, number: int, total: int) -> None:
        """`{"event": "begin", ...}`."""
        self._clip = {"clip": number, "clips": total, "job_id": clip.job_id, "name": clip.name}
        self._emit(event="begin")

    def event(self, event: Event) -> None:
        """`{"event": "step" or "phase", ...}`."""
        counts = {"step": event.step, "steps": event.total} if event.total else {}
        self._emit(event="step" if counts else "phase", phase=event.phase, **counts)

    def end(self, clip: Clip, state: str, seconds: float, message: str) -> None:
        """`{"event": "end", ...}`."""
        self._emit(event="end", state=state, seconds=round(seconds, 3), message=message)


class RichScreen(QuietScreen):
    """A live bar per clip on a terminal, and one for the run."""

    def __init__(self, *, use_color: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
        console = Console(stderr=True, no_color=not use_color)
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)
        self._run: TaskID | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "RichScreen":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, clip: Clip, number: int, total: int) -> None:
        """A new bar; the run's own bar when there are several clips."""
        if self._run is None and total > 1:
            self._run = self._progress.add_task("clips", total=total)
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(f"{number}/{total} load", total=clip.draft.resolved.steps)

    def event(self, event: Event) -> None:
        """The phase as text, steps as the bar."""
        if self._task is None:
            return
        label = f"{event.phase} step {event.step} of {event.total}" if event.total else event.phase
        self._progress.update(self._task, description=label, completed=event.step if event.total else None)

    def end(self, clip: Clip, state: str, seconds: float, message: str) -> None:
        """The run's bar moves on."""
        if self._run is not None:
            self._progress.advance(self._run)
        if state != "skipped":
            self._progress.console.print(f"{clip.name}: {state} in {seconds:.1f} s", highlight=False)


def make_screen(kind: str, *, use_color: bool) -> QuietScreen:
    """`auto` is the live bar on a terminal and plain lines elsewhere.

    Raises RequestError for an unknown kind.
    """
    if kind == "auto":
        kind = "rich" if sys.stderr.isatty() else "plain"
    if kind == "rich":
        return RichScreen(use_color=use_color)
    kinds: dict[str, type[QuietScreen]] = {"plain": PlainScreen, "jsonl": JsonScreen, "none": QuietScreen}
    if kind not in kinds:
        raise bad("--progress", kind, "auto, rich, plain, jsonl or none", "change --progress")
    return kinds[kind]()
