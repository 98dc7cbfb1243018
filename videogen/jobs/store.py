"""The queue as its users see it: submit, look, edit, order, pause, cancel, remove; rows outlive every process."""

import json
import secrets
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videogen.errors import VideogenError, say
from videogen.jobs.database import CANCELLED, COLUMNS, ENDS, QUEUED, RUNNING, STATES, Database, Job, change, job_of, one

ID_PREFIX = "video_"


class Conflict(VideogenError):
    """What was asked does not fit the state the job is in, or an idempotency key came back with another request."""


class QueueFull(VideogenError):
    """A limit of the queue or of the disk; later it may work."""


class NoSuchJob(VideogenError, LookupError):
    """No job of this id, or somebody else's."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Most unfinished jobs in all and per owner; most bytes of clips, those still to come estimated; how long a finished job is kept."""

    max_waiting: int = 1000
    max_waiting_per_owner: int = 500
    quota_bytes: int = 20_000_000_000
    retention_s: float = 30 * 86_400.0


class Store:
    """The queue in one folder. An `owner` of None sees everybody's jobs; others see their own only."""

    def __init__(self, root: Path, limits: Limits = Limits()) -> None:
        self.limits = limits
        self.database = Database(root)

    def submit(
        self, owner: str, settings: dict[str, Any], summary: dict[str, Any], *, size_bytes: int = 0, key: str = "", digest: str = ""
    ) -> tuple[Job, bool]:
        """Accept a job at the end of the queue; when this returns it is on the disk. The flag says whether it is new.

        The same `key` with the same `digest` gives the job it made before. Raises Conflict for another digest, QueueFull at a limit.
        """
        with self.database.writing() as db:
            if key and (known := self._known(db, owner, key, digest)):
                return known, False
            return self._accept(db, owner, settings, summary, size_bytes, key, digest), True

    def submit_all(self, owner: str, wanted: Sequence[tuple[dict[str, Any], dict[str, Any], int]]) -> list[Job]:
        """Accept all of these (settings, summary, bytes) in their order, or none of them. Raises QueueFull at a limit."""
        with self.database.writing() as db:
            return [self._accept(db, owner, settings, summary, size_bytes) for settings, summary, size_bytes in wanted]

    def _accept(
        self,
        db: sqlite3.Connection,
        owner: str,
        settings: dict[str, Any],
        summary: dict[str, Any],
        size_bytes: int,
        key: str = "",
        digest: str = "",
    ) -> Job:
        self._check_limits(db, owner, size_bytes)
        job_id, now = ID_PREFIX + secrets.token_hex(16), time.time()
        db.execute(
            "INSERT INTO jobs (id, owner, state, position, settings, summary, idempotency, digest, created, bytes)"
            " VALUES (?, ?, ?, (SELECT COALESCE(MAX(position), 0) + 1 FROM jobs), ?, ?, ?, ?, ?, ?)",
            (job_id, owner, QUEUED, json.dumps(settings), json.dumps(summary), key or None, digest, now, size_bytes),
        )
        db.execute("INSERT INTO history (job, state, attempt, at) VALUES (?, ?, 0, ?)", (job_id, QUEUED, now))
        job = one(db, job_id)
        assert job is not None
        return job

    def _known(self, db: sqlite3.Connection, owner: str, key: str, digest: str) -> Job | None:
        row = db.execute(f"SELECT digest, {COLUMNS} FROM jobs WHERE owner = ? AND idempotency = ?", (owner, key)).fetchone()
        if row is not None and row[0] != digest:
            raise Conflict(say("Idempotency-Key", key, "the request it came with first", "use a new key for a new request"))
        return None if row is None else job_of(row[1:])

    def known(self, owner: str, key: str, digest: str) -> Job | None:
        """The job a key made before. Raises Conflict as `submit` does."""
        with self.database.writing(is_durable=False) as db:
            return self._known(db, owner, key, digest)

    def _check_limits(self, db: sqlite3.Connection, owner: str, size_bytes: int) -> None:
        waiting = "SELECT COUNT(*), COALESCE(SUM(owner = ?), 0) FROM jobs WHERE state IN (?, ?)"
        everyone, own = db.execute(waiting, (owner, QUEUED, RUNNING)).fetchone()
        for count, most in ((everyone, self.limits.max_waiting), (own, self.limits.max_waiting_per_owner)):
            if count >= most:
                raise QueueFull(say("queue", f"{count} jobs waiting", f"fewer than {most}", "wait for some of them"))
        used = db.execute("SELECT COALESCE(SUM(bytes), 0) FROM jobs").fetchone()[0]
        if used + size_bytes > self.limits.quota_bytes:
            quota = self.limits.quota_bytes
            raise QueueFull(say("disk quota", f"{used + size_bytes:,} bytes", f"at most {quota:,}", "delete clips, or raise --quota-gb"))

    def get(self, job_id: str, owner: str | None = None) -> Job | None:
        """The job, unless it is somebody else's."""
        rows = self.database.rows(f"SELECT {COLUMNS} FROM jobs WHERE id = ? AND (? IS NULL OR owner = ?)", job_id, owner, owner)
        return job_of(rows[0]) if rows else None

    def jobs(
        self, owner: str | None = None, *, states: tuple[str, ...] = STATES, limit: int = 20, after: str = "", is_newest_first: bool = True
    ) -> list[Job]:
        """Jobs by the time they were accepted, a page of `limit` beginning behind the job `after`."""
        order, than = ("DESC", "<") if is_newest_first else ("ASC", ">")
        marks = ", ".join("?" * len(states))
        behind = f"AND rowid {than} (SELECT rowid FROM jobs WHERE id = ?)" if after else ""
        query = f"SELECT {COLUMNS} FROM jobs WHERE (? IS NULL OR owner = ?) AND state IN ({marks}) {behind} ORDER BY rowid {order} LIMIT ?"
        return [job_of(row) for row in self.database.rows(query, owner, owner, *states, *([after] if after else []), limit)]

    def waiting(self, owner: str | None = None) -> list[Job]:
        """Running jobs, then queued ones in the order they will run."""
        query = f"SELECT {COLUMNS} FROM jobs WHERE state IN (?, ?) AND (? IS NULL OR owner = ?) ORDER BY state = ?, position"
        return [job_of(row) for row in self.database.rows(query, RUNNING, QUEUED, owner, owner, QUEUED)]

    def counts(self) -> dict[str, int]:
        """Jobs by state."""
        return dict.fromkeys(STATES, 0) | dict(self.database.rows("SELECT state, COUNT(*) FROM jobs GROUP BY state"))

    def used_bytes(self) -> int:
        """Bytes of all clips, those still to come estimated."""
        return int(self.database.rows("SELECT COALESCE(SUM(bytes), 0) FROM jobs")[0][0])

    def history(self, job_id: str) -> list[str]:
        """The states a job went through, in order."""
        return [row[0] for row in self.database.rows("SELECT state FROM history WHERE job = ? ORDER BY id", job_id)]

    def edit(self, job_id: str, owner: str | None, settings: dict[str, Any], summary: dict[str, Any]) -> Job:
        """Replace what a queued job asks for. Raises Conflict once a worker has it, NoSuchJob when there is none."""
        with self.database.writing() as db:
            job = _own(db, job_id, owner)
            if job.state != QUEUED:
                raise Conflict(say(f"job {job_id}", job.state, "a queued job", "duplicate it instead"))
            change(db, job, QUEUED, settings=json.dumps(settings), summary=json.dumps(summary))
        return self._again(job_id)

    def move(self, job_id: str, owner: str | None, places: int) -> Job:
        """Move a queued job past its owner's other queued jobs: up for negative `places`. Other people's jobs keep their turn."""
        with self.database.writing() as db:
            job = _own(db, job_id, owner)
            if job.state != QUEUED:
                raise Conflict(say(f"job {job_id}", job.state, "a queued job", "only waiting jobs have an order"))
            query = "SELECT id, position FROM jobs WHERE state = ? AND owner = ? ORDER BY position"
            found = db.execute(query, (QUEUED, job.owner)).fetchall()
            order, slots = [row[0] for row in found], [row[1] for row in found]
            index = order.index(job_id)
            order.insert(max(0, min(len(order) - 1, index + places)), order.pop(index))
            for each, slot in zip(order, slots):
                db.execute("UPDATE jobs SET position = ?, version = version + 1 WHERE id = ? AND position != ?", (slot, each, slot))
        return self._again(job_id)

    def cancel(self, job_id: str, owner: str | None = None) -> Job:
        """End a queued job now, ask a running one to stop at its next step; a finished one stays as it is."""
        with self.database.writing() as db:
            job = _own(db, job_id, owner)
            if job.state == QUEUED:
                now = time.time()
                times = {"finished": now, "expires": now + self.limits.retention_s}
                change(db, job, CANCELLED, error_code="cancelled", error="cancelled before it began", bytes=0, **times)
            elif job.state == RUNNING:
                db.execute("UPDATE jobs SET cancelling = 1, version = version + 1 WHERE id = ?", (job_id,))
        return self._again(job_id)

    def remove(self, job_id: str, owner: str | None = None) -> Job:
        """Forget a finished job; its files are the caller's to delete. Raises Conflict while it is not over."""
        with self.database.writing() as db:
            job = _own(db, job_id, owner)
            if not job.is_over:
                raise Conflict(say(f"job {job_id}", job.state, "a job that is over", "cancel it first"))
            db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
            db.execute("DELETE FROM history WHERE job = ?", (job_id,))
        return job

    def expired(self, now: float) -> list[Job]:
        """Finished jobs whose time is over."""
        marks = ", ".join("?" * len(ENDS))
        rows = self.database.rows(f"SELECT {COLUMNS} FROM jobs WHERE state IN ({marks}) AND expires < ?", *ENDS, now)
        return [job_of(row) for row in rows]

    def pause(self, is_paused: bool) -> None:
        """Whether workers leave queued jobs alone; what runs goes on."""
        with self.database.writing() as db:
            db.execute("INSERT OR REPLACE INTO facts VALUES ('paused', ?)", (str(int(is_paused)),))

    @property
    def is_paused(self) -> bool:
        """Whether the queue is paused."""
        return self.database.rows("SELECT value FROM facts WHERE name = 'paused'") == [("1",)]

    def _again(self, job_id: str) -> Job:
        job = self.get(job_id)
        if job is None:
            raise NoSuchJob(job_id)
        return job


def _own(db: sqlite3.Connection, job_id: str, owner: str | None) -> Job:
    job = one(db, job_id)
    if job is None or (owner is not None and job.owner != owner):
        raise NoSuchJob(job_id)
    return job
