"""`videogen render --gpus N`: starts the workers, shows one progress for all of them, and says what became of clips and workers."""

import argparse
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from videogen.cli.planning import read_wanted
from videogen.cli.render import exit_code, report, settle, signals
from videogen.cli.worker import whole_summary
from videogen.config import read_environment
from videogen.jobs.journal import locked, read_journal
from videogen.parallel.claims import CLAIMS, Claims
from videogen.parallel.fleet import watch
from videogen.parallel.shared_plan import plan_file, settled_once
from videogen.progress import StopFlag

logger = logging.getLogger(__name__)

FINE = (0, 130, 143)  # exit codes of a worker that lived to its end
WORKER_LOST = 5


def run(args: argparse.Namespace) -> int:
    """Render on several devices; exit code 5 where a worker died, else as `render`."""
    text = sys.stdin.read() if "-" in args.jobs else ""
    sys.stdin = io.StringIO(text) if text else sys.stdin
    wanted, stop, number = read_wanted(args), StopFlag(), f"{os.getpid()} {time.time_ns()}"
    with signals(stop) as came, locked(wanted.folder, is_shared=True):
        journal = read_journal(wanted.folder)
        journal.stamp = {"run": number}
        with Claims(wanted.folder) as claims:
            clips = settled_once(wanted.folder, number, wanted.drafts, claims, lambda: settle(wanted, args, journal))
        todo = sum(not clip.is_done for clip in clips)
        screen = Machine(kind_of(args), todo, stop)
        try:
            with screen:
                codes = watch(_commands(args, number, text), screen.line, screen.ended, stop) if todo else []
        finally:
            plan_file(wanted.folder, number).unlink(missing_ok=True)
    _tidy(wanted.folder)
    summary = whole_summary(clips, journal, number, is_stopped=stop.wanted)
    lost = 0 if stop.wanted else sum(code not in FINE for code in codes)  # a launcher that is stopped ends in its own ways
    report(args, wanted, summary, lost=lost)
    if codes and set(codes) <= {2, 3}:  # they all said why
        return codes[0]
    ending = exit_code(summary, came)
    return ending or (WORKER_LOST if lost else 0)


def kind_of(args: argparse.Namespace) -> str:
    """How a run of several workers is shown."""
    if args.quiet or args.progress != "auto":
        return "none" if args.quiet else str(args.progress)
    return "rich" if sys.stderr.isatty() else "plain"


def _commands(args: argparse.Namespace, number: str, text: str) -> Any:
    from videogen.parallel.launch import Launch, visible_devices, worker_commands

    devices = visible_devices(args.device, dict(read_environment().values).get("CUDA_VISIBLE_DEVICES", ""))
    launch = Launch(max(args.gpus, args.ulysses), args.ulysses, devices)
    if not devices:
        logger.warning("no CUDA device in use: %d processes share this machine's processor", launch.world_size)
    return worker_commands(launch, args.words, number, text, _link_settings(launch.world_size) if devices else {})


def _link_settings(ranks: int) -> dict[str, str]:
    """The environment that `videogen doctor --link N --save` found fastest for so many devices."""
    from videogen.cli.doctor import link_path

    path = link_path(read_environment(), ranks)
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["use"]
        return {name: str(value) for name, value in found.items() if name.startswith("NCCL_")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s: got %s, expected a file of `videogen doctor --link`; it is not used", path, error)
        return {}


def _tidy(folder: Any) -> None:
    """Remove the file of claims where nobody uses the folder any more."""
    try:
        with locked(folder):
            (folder / CLAIMS).unlink(missing_ok=True)
    except RuntimeError:
        logger.debug("another run is in the folder")


class Machine:
    """All workers on one screen, from the JSON lines they write: `rich`, `plain`, `jsonl` or `none`."""

    def __init__(self, kind: str, todo: int, stop: StopFlag) -> None:
        self.kind, self.todo, self.over, self.stop = kind, todo, 0, stop
        self._said: set[str] = set()
        self._running: dict[int, str] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=Console(stderr=True, no_color=read_environment().no_color), transient=True)
        self._tasks: dict[int, TaskID] = {}

    def __enter__(self) -> "Machine":
        if self.kind == "rich":
            self._bars.start()
            self._tasks[-1] = self._bars.add_task("clips", total=self.todo)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.kind == "rich":
            self._bars.stop()

    def _say(self, text: str) -> None:
        if self.kind == "rich":
            self._bars.console.print(text, highlight=False, markup=False)
        elif self.kind == "plain":
            print(text, file=sys.stderr, flush=True)

    def line(self, worker: int, text: str) -> None:
        """One line of a worker: an event, or something it said, which is shown once."""
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if not isinstance(event, dict) or "event" not in event:
            if text.strip() and text not in self._said:
                self._said.add(text)
                print(f"worker {worker}: {text}", file=sys.stderr, flush=True)
            return
        if self.kind == "jsonl":
            print(json.dumps({"worker": worker} | event), file=sys.stderr, flush=True)
            return
        told: dict[str, Callable[[int, dict[str, Any]], None]] = {"begin": self._begin, "step": self._step, "end": self._end}
        told.get(event["event"], self._phase)(worker, event)

    def _begin(self, worker: int, event: dict[str, Any]) -> None:
        self._running[worker] = event["name"]
        if self.kind == "rich":
            if worker not in self._tasks:
                self._tasks[worker] = self._bars.add_task("", total=None)
            self._bars.reset(self._tasks[worker], description=f"worker {worker}: {event['name'][:40]}", total=None)
        elif self.kind == "plain":
            self._say(f"worker {worker}: clip {event['clip']}/{event['clips']}, {event['name']}")

    def _phase(self, worker: int, event: dict[str, Any]) -> None:
        if worker in self._tasks:
            self._bars.update(self._tasks[worker], description=f"worker {worker}: {event.get('phase', '')}")

    def _step(self, worker: int, event: dict[str, Any]) -> None:
        if worker in self._tasks:
            self._bars.update(self._tasks[worker], completed=event["step"], total=event["steps"])

    def _end(self, worker: int, event: dict[str, Any]) -> None:
        self._running.pop(worker, None)
        self.over += 1
        self._say(f"worker {worker}: {event['name']} {event['state']} in {event['seconds']:.1f} s; {self.over} of {self.todo} clips")
        if self.kind == "rich":
            self._bars.update(self._tasks[-1], completed=self.over)

    def ended(self, worker: int, code: int) -> None:
        """A worker is gone."""
        if code not in FINE and self.kind != "none" and not self.stop.wanted:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            name = self._running.get(worker)
            again = f"; {name} goes back to the others" if name else ""
            print(f"worker {worker} died ({how}){again}", file=sys.stderr, flush=True)
        if worker in self._tasks:
            self._bars.remove_task(self._tasks.pop(worker))
