"""The SQLite file of the queue: its tables, its connections and one row as a value; knows nothing of what a job renders."""

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videogen.errors import EnvironmentFault, say

FILE = "queue.sqlite3"
QUEUED, RUNNING, COMPLETED, FAILED, CANCELLED = "queued", "in_progress", "completed", "failed", "cancelled"
STATES = (QUEUED, RUNNING, COMPLETED, FAILED, CANCELLED)
ENDS = (COMPLETED, FAILED, CANCELLED)
VERSION = 1
WAIT_MS = 15_000  # how long a writer waits for another one

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, state TEXT NOT NULL, position REAL NOT NULL,
  settings TEXT NOT NULL, summary TEXT NOT NULL, idempotency TEXT, digest TEXT,
  phase TEXT NOT NULL DEFAULT '', step INTEGER NOT NULL DEFAULT 0, total INTEGER NOT NULL DEFAULT 0,
  cancelling INTEGER NOT NULL DEFAULT 0, worker TEXT NOT NULL DEFAULT '', attempt INTEGER NOT NULL DEFAULT 0,
  error_code TEXT NOT NULL DEFAULT '', error TEXT NOT NULL DEFAULT '', record TEXT NOT NULL DEFAULT '{}',
  created REAL NOT NULL, started REAL, finished REAL, expires REAL,
  bytes INTEGER NOT NULL DEFAULT 0, version INTEGER NOT NULL DEFAULT 1);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, position);
CREATE INDEX IF NOT EXISTS jobs_by_owner ON jobs (owner, created);
CREATE UNIQUE INDEX IF NOT EXISTS jobs_by_key ON jobs (owner, idempotency) WHERE idempotency IS NOT NULL;
CREATE TABLE IF NOT EXISTS history (
  id INTEGER PRIMARY KEY, job TEXT NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL, at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS history_by_job ON history (job);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_COLUMNS = (
    *("id", "owner", "state", "position", "settings", "summary", "phase", "step", "total", "cancelling", "worker", "attempt"),
    *("error_code", "error", "record", "created", "started", "finished", "expires", "bytes", "version"),
)
COLUMNS = ", ".join(_COLUMNS)


@dataclass(frozen=True, slots=True)
class Job:
    """One row. settings is what a worker renders (private: it holds paths), summary what anyone may see of it.

    Times are seconds since 1970; `record` is the sidecar of a finished clip; `version` grows with every change.
    """

    id: str
    owner: str
    state: str
    position: float
    settings: dict[str, Any]
    summary: dict[str, Any]
    phase: str
    step: int
    total: int
    cancelling: bool
    worker: str
    attempt: int
    error_code: str
    error: str
    record: dict[str, Any]
    created: float
    started: float | None
    finished: float | None
    expires: float | None
    bytes: int
    version: int

    @property
    def percent(self) -> int:
        """Denoising steps done, 0 to 99; 100 only when the clip can be fetched."""
        if self.state == COMPLETED:
            return 100
        if self.phase in ("decode", "encode"):
            return 99
        return min(99, 100 * self.step // self.total) if self.total else 0

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ENDS


def job_of(row: tuple[Any, ...]) -> Job:
    """A row of `COLUMNS` as a value."""
    values = dict(zip(_COLUMNS, row))
    for name in ("settings", "summary", "record"):
        values[name] = json.loads(values[name])
    values["cancelling"] = bool(values["cancelling"])
    return Job(**values)


class Database:
    """Connections to one file, one per thread. Every write is one transaction; states change through `change` only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._local = threading.local()
        try:
            root.mkdir(parents=True, exist_ok=True)
            with self.writing() as db:
                version = int(db.execute("PRAGMA user_version").fetchone()[0])
                if version not in (0, VERSION):
                    message = say("queue file", f"version {version}", f"version {VERSION}", "use the videogen that wrote it")
                    raise EnvironmentFault(message)
                for statement in _SCHEMA.split(";\n"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise EnvironmentFault(say("queue file", str(root / FILE), "a file that can be written", str(error))) from None

    def _connection(self) -> sqlite3.Connection:
        known: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if known is None:
            known = sqlite3.connect(self.root / FILE, timeout=WAIT_MS / 1000, isolation_level=None)
            known.execute("PRAGMA journal_mode = WAL")
            self._local.connection = known
        return known

    def close(self) -> None:
        """Close this thread's connection."""
        known: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if known is not None:
            known.close()
            self._local.connection = None

    def rows(self, query: str, *values: Any) -> list[Any]:
        """Read, from the last finished transaction."""
        return self._connection().execute(query, values).fetchall()

    @contextmanager
    def writing(self, *, is_durable: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction that sees nobody else's half. `is_durable` also outlives a power cut, not only a killed process."""
        db = self._connection()
        db.execute(f"PRAGMA synchronous = {'FULL' if is_durable else 'NORMAL'}")
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
        except BaseException:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")


def one(db: sqlite3.Connection, job_id: str) -> Job | None:
    """The job of this id, inside a transaction."""
    row = db.execute(f"SELECT {COLUMNS} FROM jobs WHERE id = ?", (job_id,)).fetchone()
    return None if row is None else job_of(row)


def change(db: sqlite3.Connection, job: Job, state: str, **values: Any) -> None:
    """Give a job another state and note it in its history; the caller has checked that the change is allowed."""
    values = {"state": state, "version": job.version + 1} | values
    told = ", ".join(f"{name} = ?" for name in values)
    db.execute(f"UPDATE jobs SET {told} WHERE id = ?", (*values.values(), job.id))
    attempt = values.get("attempt", job.attempt)
    db.execute("INSERT INTO history (job, state, attempt, at) VALUES (?, ?, ?, ?)", (job.id, state, attempt, time.time()))
