"""The run folder's memory: an append-only, fsynced event file and a lock, for one process or several; knows nothing of models."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from videogen.errors import EnvironmentFault, say
from videogen.identity import hash_file

JOURNAL, LOCK = "run.jsonl", ".lock"


@dataclass(slots=True)
class Known:
    """What the journal says of one job: its file name (no ending), its last state and the run that wrote it.

    starts: how often that run began it without an end.
    """

    name: str = ""
    state: str = ""
    error: str = ""
    file: str = ""
    sha256: str = ""
    events: int = 0
    run: str = ""
    starts: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Journal:
    """The events of one folder, read and appended to. Append only inside `locked`.

    seeds: drawn seeds by draft; rates: seconds per TFLOP of the finished clips; stamp is added to every event written.
    """

    folder: Path
    jobs: dict[str, Known] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    stamp: dict[str, Any] = field(default_factory=dict)
    _read: int = 0  # bytes

    def append(self, event: str, **values: Any) -> None:
        """Write one event durably, then take it into account, and what others wrote meanwhile.

        Raises EnvironmentFault when the disk refuses.
        """
        line = json.dumps({"event": event} | self.stamp | values, sort_keys=True, ensure_ascii=True) + "\n"
        path = self.folder / JOURNAL
        try:
            with path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if file.tell() and not _ends_line(path):
                    file.write(b"\n")
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise EnvironmentFault(say("journal", str(path), "a file that can be written", error.strerror or str(error))) from None
        self.catch_up()

    def catch_up(self) -> None:
        """Read the lines that were added since; a torn or foreign one (a crash mid-write) is passed over, never fatal."""
        path = self.folder / JOURNAL
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            whole = file.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.split(b"\n"):
            try:
                entry = json.loads(line)
                if isinstance(entry, dict):
                    self._apply(entry)
            except (ValueError, TypeError, KeyError):
                continue

    def is_done(self, job_id: str) -> bool:
        """Whether the clip is finished and still on disk, byte for byte, with a completed sidecar."""
        known = self.jobs.get(job_id)
        if known is None or known.state != "done":
            return False
        clip, sidecar = self.folder / known.file, self.folder / f"{known.name}.json"
        try:
            completed = json.loads(sidecar.read_text(encoding="utf-8")).get("status") == "completed"
            return completed and hash_file(clip) == known.sha256
        except (OSError, ValueError, AttributeError):
            return False

    def _apply(self, entry: dict[str, Any]) -> None:
        event, job_id = entry.get("event"), entry.get("job")
        if event == "seed":
            self.seeds[str(entry.get("draft"))] = int(entry["seed"])
        if not isinstance(job_id, str):
            return
        known = self.jobs.setdefault(job_id, Known())
        known.events += 1
        run = str(entry.get("run", ""))
        known.starts = (known.starts if known.run == run else 0) + 1 if event == "start" else 0
        known.state, known.run = str(event), run
        known.name = str(entry.get("name", known.name))
        known.error = str(entry.get("error", ""))
        if event == "done":
            known.file, known.sha256 = str(entry.get("file", "")), str(entry.get("sha256", ""))
            known.seconds = float(entry.get("seconds", 0))
            if entry.get("tflop"):
                self.rates.append(float(entry.get("seconds", 0)) / float(entry["tflop"]))


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_journal(folder: Path) -> Journal:
    """The journal of a folder."""
    journal = Journal(folder)
    journal.catch_up()
    return journal


@contextmanager
def locked(folder: Path, *, is_shared: bool = False) -> Iterator[IO[str]]:
    """Hold the folder for one run, or share it with others that claim their clips. The kernel drops the lock with the process.

    Raises EnvironmentFault when another run holds it or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise EnvironmentFault(say("output folder", str(folder), "a folder that can be written", error.strerror or str(error))) from None
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            raise EnvironmentFault(say("output folder", str(folder), "no other run in it", "wait for it, or use --output-dir")) from None
        yield file
