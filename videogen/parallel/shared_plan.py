"""One plan for all workers of a run: the first settles seeds and names and writes them down, the others read them."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from videogen.errors import EnvironmentFault, say
from videogen.identity import hash_text
from videogen.jobs.plan import Clip, Draft
from videogen.jobs.run import write_json
from videogen.parallel.claims import Claims

KEPT_S = 86_400.0  # plan files older than this are swept by the next run


def plan_file(folder: Path, run: str) -> Path:
    """Where the plan of a run is."""
    return folder / f".plan-{hash_text(run)[:16]}"


def settled_once(folder: Path, run: str, drafts: Sequence[Draft], claims: Claims, settle: Callable[[], list[Clip]]) -> list[Clip]:
    """The clips of a run: `settle()` in the process that comes first, the same ones with this process's drafts in the others.

    Raises EnvironmentFault where the jobs are no longer those that were settled.
    """
    path = plan_file(folder, run)
    with claims.planning():
        if path.is_file():
            return _read(path, drafts)
        _sweep(folder)
        clips = settle()
        places = {id(draft): index for index, draft in enumerate(drafts)}
        rows = [[places[id(clip.draft)], clip.seed, clip.job_id, clip.name, clip.is_done, clip.drawn] for clip in clips]
        write_json(path, {"drafts": _identity(drafts), "clips": rows})
        return clips


def _identity(drafts: Sequence[Draft]) -> str:
    return hash_text("\n".join(f"{draft.place} {draft.request!r} {draft.output}" for draft in drafts))


def _read(path: Path, drafts: Sequence[Draft]) -> list[Clip]:
    plan = json.loads(path.read_text(encoding="utf-8"))
    if plan["drafts"] != _identity(drafts):
        raise EnvironmentFault(say("jobs", "others than those this run began with", "the same in every worker", "start the run again"))
    return [Clip(drafts[index], *values) for index, *values in plan["clips"]]


def _sweep(folder: Path) -> None:
    """Remove the plans of runs that were killed; one of today may still be in use."""
    for path in folder.glob(".plan-*"):
        if time.time() - path.stat().st_mtime > KEPT_S:
            path.unlink(missing_ok=True)
