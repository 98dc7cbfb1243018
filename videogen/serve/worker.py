"""One worker process: takes jobs of the queue in turn, reports every step, stops between steps, puts finished clips in place."""

import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from videogen.errors import CancelledRender, EnvironmentFault, VideogenError, say
from videogen.jobs.claims import Claims, group_lock
from videogen.jobs.database import COMPLETED, Database, Job
from videogen.progress import Event, OnEvent, StopFlag
from videogen.serve import checkup
from videogen.serve.checkup import Examine

logger = logging.getLogger(__name__)

IDLE_S = 0.05
WORK, CLIPS = "work", "clips"
ENDINGS = (".mp4", ".jpg", ".json")


class ClipFailed(VideogenError):
    """This clip could not be made; the next one may."""


@dataclass(frozen=True, slots=True)
class Made:
    """Finished files in the job's own folder, `clip.mp4` and what goes with it, and the sidecar's content."""

    files: tuple[Path, ...]
    record: dict[str, Any]


class Maker(Protocol):
    """What renders one job."""

    def make(self, job: Job, folder: Path, on_event: OnEvent, stop: StopFlag) -> Made:
        """Render into `folder`. Raises CancelledRender after `stop` was set, ClipFailed or EnvironmentFault when it cannot."""
        ...


class _Reporter:
    """Hands events on to the queue and turns the queue's wish to stop, or the process's, into the job's stop flag."""

    def __init__(self, claims: Claims, job: Job, process_stop: StopFlag) -> None:
        self.claims, self.job, self.process_stop = claims, job, process_stop
        self.stop = StopFlag()
        self._seen = Event("load")

    def __call__(self, event: Event) -> None:
        if not self.claims.report(self.job, event.phase, event.step, event.total) or self.process_stop.wanted:
            self.stop.set()


class Worker:
    """The loop. Use it inside `group_lock`. `examine` is what it does when a checkup is wanted; without it others do."""

    def __init__(self, root: Path, group: str, maker: Maker, *, retention_s: float, stop: StopFlag, examine: Examine | None = None) -> None:
        self.root, self.maker, self.stop, self.examine = root, maker, stop, examine
        self.claims = Claims(Database(root), group, retention_s=retention_s)

    def run(self, *, until_idle: bool = False) -> int:
        """Work until the stop flag is set, or until there is nothing to do; returns how many jobs were taken."""
        taken = 0
        while not self.stop.wanted:
            if self.examine is not None:
                checkup.do(self.claims.database, self.claims.group, self.examine)
            job = self.claims.claim()
            if job is None:
                if until_idle:
                    break
                time.sleep(IDLE_S)
                continue
            taken += 1
            self.work(job)
        return taken

    def work(self, job: Job) -> None:
        """One job, to its end or until this process is to stop."""
        report = _Reporter(self.claims, job, self.stop)
        folder = self.root / WORK / f"{job.id}-{job.attempt}-{time.monotonic_ns()}"  # a killed attempt's children may still write theirs
        try:
            folder.mkdir(parents=True)
            made = self.maker.make(job, folder, report, report.stop)
            self._publish(job, made)
        except CancelledRender:
            self._stopped(job)
        except ClipFailed as error:
            self.claims.fail(job, "render_failed", str(error))
        except VideogenError as error:
            code = "environment" if isinstance(error, EnvironmentFault) else "invalid_value"
            logger.error("job %s: %s", job.id, error)
            self.claims.fail(job, code, str(error).replace(str(self.root), ""))
        except OSError as error:
            logger.error("job %s: %s", job.id, error)
            told = say("disk", error.strerror or type(error).__name__, "room for a clip", "tell who runs this server, then submit it again")
            self.claims.fail(job, "environment", told)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            (self.root / CLIPS / f"{job.id}.preview.webp").unlink(missing_ok=True)

    def _stopped(self, job: Job) -> None:
        rows = self.claims.database.rows("SELECT cancelling FROM jobs WHERE id = ?", job.id)
        if rows == [(1,)]:
            self.claims.fail(job, "cancelled", "stopped between steps, as asked")
        else:
            self.claims.let_go(job)

    def _publish(self, job: Job, made: Made) -> None:
        """Move the files to their place, the clip last, then say so; who sees `completed` can fetch all of it."""
        clips = self.root / CLIPS
        clips.mkdir(exist_ok=True)
        targets = [clips / f"{job.id}{path.suffix}" for path in made.files]
        size_bytes = sum(path.stat().st_size for path in made.files)
        for path, target in sorted(zip(made.files, targets), key=lambda pair: pair[1].suffix == ".mp4"):
            path.replace(target)
        if self.claims.complete(job, made.record, size_bytes) != COMPLETED:
            for target in targets:
                target.unlink(missing_ok=True)


def tidy(root: Path) -> None:
    """Remove what killed processes left and no job knows: clips, and day-old work folders and pictures. Only names of ours are touched."""
    rows = Database(root).rows("SELECT id, settings FROM jobs")
    known, old = {row[0] for row in rows}, time.time() - 86_400
    for path in (root / CLIPS).glob("video_*.*"):
        if path.name.partition(".")[0] not in known:
            path.unlink(missing_ok=True)
    for path in (root / WORK).glob("video_*"):
        if path.stat().st_mtime < old:
            shutil.rmtree(path, ignore_errors=True)
    named = " ".join(row[1] for row in rows)
    for path in (root / "uploads").glob(f"{'[0-9a-f]' * 32}.*"):
        if path.stat().st_mtime < old and path.name not in named:
            path.unlink(missing_ok=True)


def run_worker(
    root: Path, group: str, maker: Maker, *, retention_s: float, stop: StopFlag, wait_s: float, examine: Examine | None = None
) -> None:
    """Be the worker of a group until `stop` is set. Raises EnvironmentFault when the group has one already."""
    with group_lock(root, group, wait_s=wait_s):
        Worker(root, group, maker, retention_s=retention_s, stop=stop, examine=examine).run()
