"""The doctor's look at a worker's device, kept in the queue's file: anybody asks, a worker does it between two jobs, pages read it."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from videogen.errors import VideogenError
from videogen.jobs.claims import is_alive
from videogen.jobs.database import Database

WANTED, RUNNING, DONE, FAILED = "wanted", "running", "done", "failed"
FRESH_S = 60.0  # findings are not looked up again so soon: a clip waits for every look
Examine = Callable[[], dict[str, Any]]
_NAME = "checkup"


@dataclass(frozen=True, slots=True)
class Checkup:
    """The last one asked for: its state, since when (seconds since 1970), the worker group that does it, findings or error."""

    state: str
    at: float
    group: str = ""
    report: dict[str, Any] | None = None
    error: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it is still to come."""
        return self.state in (WANTED, RUNNING)


def read(database: Database) -> Checkup | None:
    """The last one, or None before the first. One whose worker died reads as failed."""
    found = _stored(database)
    if found is not None and found.state == RUNNING and not is_alive(database.root, found.group):
        return replace(found, state=FAILED, error="its worker died")
    return found


def ask(database: Database) -> Checkup:
    """Ask for one, unless one is still to come or was just done; returns the one that counts."""
    known = read(database)
    is_fresh = known is not None and known.state == DONE and time.time() - known.at < FRESH_S
    return known if known is not None and (known.is_open or is_fresh) else _change(database, known, Checkup(WANTED, time.time()))


def do(database: Database, group: str, examine: Examine) -> bool:
    """A worker's part: do the one that is wanted, if any. Says whether it did."""
    known = _stored(database)
    if known is None or known.state != WANTED:
        return False
    mine = Checkup(RUNNING, time.time(), group)
    if _change(database, known, mine) != mine:
        return False  # another group was faster
    try:
        ended = Checkup(DONE, time.time(), group, examine())
    except VideogenError as error:
        ended = Checkup(FAILED, time.time(), group, error=str(error).replace(str(database.root), ""))
    except BaseException:
        _change(database, mine, Checkup(FAILED, time.time(), group, error="it broke off; see the worker's log"))
        raise
    _change(database, mine, replace(ended, at=time.time()))
    return True


def _stored(database: Database) -> Checkup | None:
    rows = database.rows("SELECT value FROM facts WHERE name = ?", _NAME)
    return Checkup(**json.loads(rows[0][0])) if rows else None


def _change(database: Database, known: Checkup | None, new: Checkup) -> Checkup:
    """Put `new` in the place of `known` and return it; what is there instead when somebody else changed it meanwhile."""
    with database.writing() as db:
        row = db.execute("SELECT value FROM facts WHERE name = ?", (_NAME,)).fetchone()
        there = Checkup(**json.loads(row[0])) if row else None
        is_dead = there is not None and there.state == RUNNING and not is_alive(database.root, there.group)
        if there is not None and there != known and not is_dead:
            return there
        db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_NAME, json.dumps(_plain(new))))
    return new


def _plain(checkup: Checkup) -> dict[str, Any]:
    return {name: getattr(checkup, name) for name in ("state", "at", "group", "report", "error")}
