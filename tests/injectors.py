"""Ways to disturb a run of the command line, and what must lie in its folder afterwards.

A run is a forked process with the real command line around a stand-in renderer (`tests.videogen.jobs.fakes`), so that a trial takes
a fraction of a second: options, plan, lock, journal, ffmpeg, sidecars and exit codes are the product's own.
"""

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.videogen.jobs.fakes import FakeRenderer
from videogen.cli import planning, render
from videogen.cli.main import main
from videogen.errors import RequestError
from videogen.identity import hash_file
from videogen.jobs.journal import JOURNAL, read_journal
from videogen.media import probe

PRODUCT = tuple(f"{Path(render.__file__).parents[1]}/{part}" for part in ("jobs/", "media.py", "ffmpeg.py", "cli/render.py"))
JOBS = [{"prompt": "one", "seed": 5}, {"prompt": "two"}, {"prompt": "three", "seed": 7, "repeat": 2}, {"prompt": "four"}]
Hit = Callable[[str], None]
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def made(path: Path) -> Path:
    """The folder, which is there now."""
    path.mkdir(parents=True, exist_ok=True)
    return path


def kill() -> None:
    """The end, as a power cut or the kernel brings it."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class At:
    """Does something at the n-th moment, and counts all of them."""

    number: int
    act: Callable[[], None]
    only: frozenset[str] = frozenset()
    seen: int = 0

    def __call__(self, what: str) -> None:
        """A moment."""
        if not self.only or what in self.only:
            self.seen += 1
            if self.seen == self.number:
                self.act()


class _TwoHalves(io.FileIO):
    """A file whose every write goes out in two halves, with a moment between them."""

    hit: Hit

    def write(self, data: Any) -> int:
        """Both halves."""
        data = bytes(data)
        done = super().write(data[: len(data) // 2])
        self.hit("write")
        return done + super().write(data[done:])


@contextmanager
def at_writes(hit: Hit) -> Iterator[None]:
    """Calls `hit` before everything by which the product changes a disk, and in the middle of every line of the journal."""
    opened = Path.open

    def open_for(path: Path, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
        if set(mode) & set("wax"):
            hit("open")
        if buffering:
            return opened(path, mode, buffering, *more, **named)
        file = _TwoHalves(path, mode)
        file.hit = hit
        return file

    def around(owner: Any, name: str) -> None:
        stock = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            hit(name)
            return stock(*given, **named)

        patch.setattr(owner, name, call)

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "fsync"), (os, "replace"), (os, "mkdir"), (os, "unlink"), (Path, "write_bytes"), (subprocess, "run")):
            around(owner, name)
        patch.setattr(Path, "open", open_for)
        yield


@contextmanager
def at_lines(hit: Hit) -> Iterator[None]:
    """Calls `hit` before every line that runs of the files that write."""

    def inside(_frame: Any, event: str, _arg: Any) -> Any:
        if event == "line":
            hit("line")
        return inside

    sys.settrace(lambda frame, event, arg: inside if frame.f_code.co_filename.startswith(PRODUCT) else None)
    try:
        yield
    finally:
        sys.settrace(None)


def forked(job: Callable[[], int], log: Path, timeout_s: float = 120.0) -> int:
    """The exit code of `job` in a process of its own, negative for a signal; what it said is in `log`."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            code = job()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -999
        time.sleep(0.004)


@dataclass
class Batch:
    """Jobs with given and with drawn seeds, run in one folder as often as need be; a run draws other seeds than the one before."""

    place: Path
    renderer: Callable[[], Any] = FakeRenderer
    jobs: list[dict[str, Any]] = field(default_factory=lambda: JOBS)
    options: tuple[str, ...] = ()
    runs: int = 0
    log: str = "log"

    @property
    def names(self) -> tuple[str, ...]:
        """What its clips are called."""
        prompts = [job["prompt"] for job in self.jobs for _ in range(job.get("repeat", 1))]
        return tuple(f"{k:04d}-{prompt}" for k, prompt in enumerate(prompts, 1))

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.place / "out"

    @property
    def said(self) -> str:
        """What the last run wrote to its terminal."""
        return (self.place / self.log).read_text(errors="replace")

    def run(self, around: Callable[[], Any] | None = None) -> int:
        """`videogen render` in a process of its own, inside the scope that `around` opens there; its exit code."""
        (self.place / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in self.jobs))
        self.runs += 1
        words = ["render", str(self.place / "jobs.jsonl"), "-o", str(self.folder), "--name", "{index:04d}-{prompt}", *self.options]

        def job() -> int:
            planning.draw_seed = lambda: self.runs * 1000
            render.opener = lambda _wanted, _args: lambda _recipe: self.renderer()
            if around is None:
                return main(words)
            with around():
                return main(words)

        return forked(job, self.place / self.log)

    def count(self, hits: Callable[[Hit], Any], only: frozenset[str] = frozenset()) -> int:
        """How many moments an undisturbed run has; it fills the folder."""

        def around() -> Any:
            return _counting(hits, only, self.place / "count")

        assert self.run(around) == 0, self.said
        return int((self.place / "count").read_text())


@contextmanager
def _counting(hits: Callable[[Hit], Any], only: frozenset[str], into: Path) -> Iterator[None]:
    moments = At(0, lambda: None, only)
    with hits(moments):
        yield
    into.write_text(str(moments.seen))


def spoil(path: Path, rng: random.Random, *, may_vanish: bool = False) -> None:
    """Damage a file, for sure."""
    before = path.read_bytes()
    data = bytearray(before)
    kind = rng.choice(["cut", "flip", "flip", "zero", "swap", *(["gone", "lines"] if may_vanish else [])])
    if kind == "gone":
        path.unlink()
        return
    if kind == "cut":
        del data[rng.randrange(len(data) or 1) :]
    elif kind == "lines":
        lines = data.splitlines(keepends=True)
        data = bytearray(b"".join(line for line in lines for _ in range(rng.choice([0, 1, 1, 2]))))
    else:
        start = rng.randrange(len(data) or 1)
        for index in [rng.randrange(len(data)) for _ in range(rng.choice([1, 1, 4]))] if kind == "flip" and data else ():
            data[index] ^= 1 << rng.randrange(8)
        if kind == "zero":
            data[start : start + 64] = bytes(len(data[start : start + 64]))
        elif kind == "swap":
            data[start : start + 32] = data[start : start + 32][::-1]
    if bytes(data) == before and data:
        data[rng.randrange(len(data))] ^= 1
    path.write_bytes(bytes(data))


def is_torn(folder: Path) -> int:
    """1 for a journal with damaged lines, or with half a line at its end."""
    path = folder / JOURNAL
    return int(path.is_file() and (read_journal(folder).damaged > 0 or not path.read_bytes().endswith(b"\n")) and path.stat().st_size > 0)


def clips_in(folder: Path) -> dict[str, str]:
    """The clips of a folder by name, each with its hash."""
    return {path.stem: hash_file(path) for path in sorted(folder.glob("*.mp4"))} if folder.is_dir() else {}


def half_written(folder: Path) -> list[str]:
    """Clips that cannot be played or have no sidecar of theirs."""
    found = []
    for name, digest in clips_in(folder).items():
        try:
            record = json.loads((folder / f"{name}.json").read_text())
            is_whole = record["output"]["sha256"] == digest and probe(folder / f"{name}.mp4").frames == record["output"]["frames"]
        except (OSError, ValueError, KeyError, RequestError):
            is_whole = False
        found += [] if is_whole else [name]
    return found


def strays(folder: Path, names: tuple[str, ...]) -> list[str]:
    """What lies in a finished folder beside the clips and what belongs to it."""
    fine = {JOURNAL, ".lock"} | {f"{name}{end}" for name in names for end in (".mp4", ".json")}
    return sorted(path.name for path in folder.iterdir() if path.name not in fine)


def faults_of(
    folder: Path, names: tuple[str, ...], wanted: list[dict[str, str]], seen: dict[str, str], *, is_journal_whole: bool = True
) -> Counter[str]:
    """What is wrong with a folder after its last run: clips lost, made twice, half-written, or different from all of `wanted` or from
    how they were `seen` before; and damaged lines where there should be none."""
    clips, journal = clips_in(folder), read_journal(folder)
    told: Counter[str] = Counter(trials=1)
    told["lost"] = len(set(names) - clips.keys())
    told["duplicated"] = len(clips.keys() - set(names))
    told["half-written"] = len(half_written(folder)) + len(strays(folder, tuple(clips)))
    told["different"] = sum(digest not in {each.get(name) for each in wanted} for name, digest in clips.items() if name in names)
    told["different"] += sum(clips.get(name, digest) != digest for name, digest in seen.items())
    if is_journal_whole:
        text = (folder / JOURNAL).read_text(errors="replace")
        dones = Counter(json.loads(line)["job"] for line in text.splitlines() if '"event": "done"' in line and line.endswith("}"))
        told["duplicated"] += sum(count - 1 for count in dones.values())
        told["not done"] = sum(not journal.is_done(job_id) for job_id in journal.jobs)
    return told
