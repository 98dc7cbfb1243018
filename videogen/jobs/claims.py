"""The queue as a worker sees it: claim, report, finish; a dead worker's job goes to the next one, and every job ends once."""

import fcntl
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from videogen.errors import EnvironmentFault, say
from videogen.jobs.database import CANCELLED, COLUMNS, COMPLETED, FAILED, QUEUED, RUNNING, Database, Job, change, job_of, one

MAX_ATTEMPTS = 5  # a job that kills its worker this often is at fault itself
LOCKS = "workers"


def _lock_file(root: Path, group: str) -> Path:
    return root / LOCKS / f"{group}.lock"


@contextmanager
def group_lock(root: Path, group: str, *, wait_s: float) -> Iterator[None]:
    """Be the one worker of a GPU group; the kernel ends that when the process dies, however it dies.

    Raises EnvironmentFault when another one still holds it after `wait_s` seconds.
    """
    path = _lock_file(root, group)
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    expected, advice = "no other worker of it", "stop that one, or give this one another --group"
                    raise EnvironmentFault(say(f"worker group {group}", "a running worker", expected, advice)) from None
                time.sleep(0.02)
        yield


def is_alive(root: Path, group: str) -> bool:
    """Whether a worker process of the group runs on this machine."""
    path = _lock_file(root, group)
    if not group or not path.is_file():
        return False
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


class Claims:
    """One worker's hold on jobs. Use it inside `group_lock`: a job whose worker's lock is free has no worker."""

    def __init__(self, database: Database, group: str, *, retention_s: float) -> None:
        self.database, self.group, self.retention_s = database, group, retention_s

    def claim(self) -> Job | None:
        """The next job, now this worker's: first what a dead worker left, then the head of the queue.

        None when there is none or the queue is paused. What a dead worker left too often, or was to stop, ends here.
        """
        if not self.database.rows("SELECT 1 FROM jobs WHERE state IN (?, ?) LIMIT 1", QUEUED, RUNNING):
            return None
        with self.database.writing() as db:
            orphans = [job for job in self._orphans(db) if not self._bury(db, job)]
            if db.execute("SELECT value FROM facts WHERE name = 'paused'").fetchone() == ("1",):
                return None
            if orphans:
                return self._take(db, orphans[0])
            query = f"SELECT {COLUMNS} FROM jobs WHERE state = ? ORDER BY position LIMIT 1"
            row = db.execute(query, (QUEUED,)).fetchone()
            return None if row is None else self._take(db, job_of(row))

    def _orphans(self, db: sqlite3.Connection) -> list[Job]:
        rows = db.execute(f"SELECT {COLUMNS} FROM jobs WHERE state = ? ORDER BY position", (RUNNING,)).fetchall()
        jobs = [job_of(row) for row in rows]
        return [job for job in jobs if job.worker == self.group or not is_alive(self.database.root, job.worker)]

    def _bury(self, db: sqlite3.Connection, job: Job) -> bool:
        """End an orphan that nobody should render again."""
        if job.cancelling:
            self._end(db, job, CANCELLED, "cancelled", "cancelled while it was rendered")
        elif job.attempt >= MAX_ATTEMPTS:
            self._end(db, job, FAILED, "interrupted", f"its worker died {job.attempt} times")
        else:
            return False
        return True

    def _take(self, db: sqlite3.Connection, job: Job) -> Job:
        started = job.started or time.time()
        fresh = {"phase": "load", "step": 0, "total": 0, "worker": self.group, "attempt": job.attempt + 1, "started": started}
        change(db, job, RUNNING, **fresh)
        taken = one(db, job.id)
        assert taken is not None
        return taken

    def report(self, job: Job, phase: str, step: int, total: int) -> bool:
        """Store how far the job is; True when it should go on, False when it should stop or is not ours any more."""
        with self.database.writing(is_durable=False) as db:
            row = db.execute(
                "UPDATE jobs SET phase = ?, step = MAX(step, ?), total = MAX(total, ?), version = version + 1"
                " WHERE id = ? AND state = ? AND worker = ? AND attempt = ? RETURNING cancelling",
                (phase, step, total, job.id, RUNNING, self.group, job.attempt),
            ).fetchone()
        return row is not None and row[0] == 0

    def complete(self, job: Job, record: dict[str, Any], size_bytes: int) -> str:
        """End a job whose clip lies at its place; returns the state it got: `cancelled` when somebody asked for that meanwhile.

        Empty when the job was not this worker's any more.
        """
        with self.database.writing() as db:
            now = self._mine(db, job)
            if now is None:
                return ""
            if now.cancelling:
                self._end(db, now, CANCELLED, "cancelled", "cancelled as it was finished")
                return CANCELLED
            change(db, now, COMPLETED, record=json.dumps(record), bytes=size_bytes, worker="", **self._times())
        return COMPLETED

    def fail(self, job: Job, code: str, message: str) -> None:
        """End a job without a clip: `cancelled` when the code says so, else failed."""
        with self.database.writing() as db:
            now = self._mine(db, job)
            if now is not None:
                self._end(db, now, CANCELLED if code == "cancelled" else FAILED, code, message[:2000])

    def let_go(self, job: Job) -> None:
        """Give the job back because this worker stops, not because of the job: the attempt does not count."""
        with self.database.writing() as db:
            now = self._mine(db, job)
            if now is not None:
                change(db, now, RUNNING, worker="", attempt=now.attempt - 1, phase="waiting")

    def _mine(self, db: sqlite3.Connection, job: Job) -> Job | None:
        now = one(db, job.id)
        is_mine = now is not None and (now.state, now.worker, now.attempt) == (RUNNING, self.group, job.attempt)
        return now if is_mine else None

    def _end(self, db: sqlite3.Connection, job: Job, state: str, code: str, message: str) -> None:
        change(db, job, state, error_code=code, error=message, bytes=0, worker="", **self._times())

    def _times(self) -> dict[str, float]:
        now = time.time()
        return {"finished": now, "expires": now + self.retention_s}
