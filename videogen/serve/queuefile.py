"""Waiting jobs as a job file, one JSON object a line, and such a file back into the queue; `videogen render` reads the same keys."""

import json
from collections.abc import Sequence
from pathlib import Path

from videogen.errors import RequestError, bad
from videogen.jobs.database import Job
from videogen.jobs.files import read_jobs
from videogen.serve.desk import Checked, Desk

NAME = "queue.jsonl"
_SHOWN_ERRORS = 10


def as_lines(jobs: Sequence[Job]) -> tuple[str, int]:
    """The file, and how many jobs are not in it: pictures have no place in a line, and without them it would be another clip."""
    kept = [job.summary["request"] for job in jobs if not job.summary["pictures"]]
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in kept), len(jobs) - len(kept)


def load(desk: Desk, owner: str, data: bytes) -> list[Job]:
    """Queue every line of a file in its order, or nothing. Seeds, recipes and adapters are checked as for a form.

    Raises RequestError that names the wrong lines, QueueFull when they are too many.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad(NAME, f"byte {error.start} that is no UTF-8", "a text of JSON lines", "save it as UTF-8") from None
    raws, most = read_jobs(Path(NAME), text), desk.options.limits.max_waiting_per_owner
    if len(raws) > most:
        raise bad(NAME, f"{len(raws)} jobs", f"at most {most}", "split the file")
    checked: list[Checked] = []
    errors: list[str] = []
    for raw in raws:
        try:
            checked.append(desk.check(raw.values, {}))
        except RequestError as error:
            errors.append(f"{raw.place}: {error}")
    if errors:
        more = [f"... and {len(errors) - _SHOWN_ERRORS} more"] if len(errors) > _SHOWN_ERRORS else []
        raise RequestError("; ".join([f"{len(errors)} of {len(raws)} jobs are wrong, none was queued", *errors[:_SHOWN_ERRORS], *more]))
    return desk.accept_all(owner, checked)
