"""Clips of one folder claimed by several processes: the kernel holds a claim as long as its process lives, however that dies."""

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from videogen.errors import EnvironmentFault, say
from videogen.jobs.journal import Journal
from videogen.jobs.plan import Clip
from videogen.jobs.run import sweep_name
from videogen.progress import StopFlag

CLAIMS = ".claims"
MAX_DEATHS = 2  # workers that died over a clip in one run: after that the clip is at fault
POLL_S = 0.2
_PLANNING = 1 << 60  # a place in the file that no clip has


class Claims:
    """Byte ranges of one file, a place for every clip; one object a process, open while it works."""

    def __init__(self, folder: Path) -> None:
        try:
            self._file = (folder / CLAIMS).open("a+b")
        except OSError as error:
            raise EnvironmentFault(say("output folder", str(folder), "a folder that can be written", error.strerror or "")) from None

    def __enter__(self) -> "Claims":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    @contextmanager
    def claimed(self, job_id: str) -> Iterator[bool]:
        """Whether the clip is this process's inside the scope."""
        place = int(job_id[:14], 16)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """One process at a time."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _PLANNING)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _PLANNING)


OnEnd = Callable[[int, Clip], None]


def _ignore(number: int, clip: Clip) -> None:
    """The do-nothing listener."""


@dataclass(slots=True)
class SharedQueue:
    """A run's clips as one of its workers takes them: always the first that nobody has and that is not settled in this run.

    Waits for what others are rendering, because a clip whose worker dies is free again. on_end hears of clips that others settled.
    """

    journal: Journal
    claims: Claims
    run: str
    on_end: OnEnd = _ignore
    pause: Callable[[float], None] = time.sleep
    _mine: set[str] = field(default_factory=set)

    def take(self, clips: Sequence[Clip], stop: StopFlag) -> Iterator[tuple[int, Clip]]:
        """Every clip that was free when its turn came, claimed until the next is asked for."""
        waiting = {clip.job_id: (number, clip) for number, clip in enumerate(clips, 1) if not clip.is_done}
        while not stop.wanted:
            self.journal.catch_up()
            for number, clip in [entry for entry in waiting.values() if self.is_settled(entry[1])]:
                del waiting[clip.job_id]
                if clip.job_id not in self._mine:
                    self.on_end(number, clip)
            if not waiting:
                return
            is_idle = True
            for number, clip in waiting.values():
                with self.claims.claimed(clip.job_id) as is_mine:
                    if is_mine and self._is_due(clip):
                        self._mine.add(clip.job_id)
                        yield number, clip
                        is_idle = False
                        break
            if is_idle:
                self.pause(POLL_S)

    def is_settled(self, clip: Clip) -> bool:
        """Whether this run has finished the clip or given it up."""
        known = self.journal.jobs.get(clip.job_id)
        return known is not None and known.run == self.run and known.state in ("done", "failed")

    def _is_due(self, clip: Clip) -> bool:
        """Whether a claimed clip is still to be made: not settled a moment ago, and not deadly."""
        self.journal.catch_up()
        known = self.journal.jobs.get(clip.job_id)
        if self.is_settled(clip):
            return False
        sweep_name(self.journal.folder, clip.name)
        if known is not None and known.run == self.run and known.starts >= MAX_DEATHS:
            self.journal.append("failed", job=clip.job_id, error=f"{known.starts} workers died while rendering it")
            return False
        return True
