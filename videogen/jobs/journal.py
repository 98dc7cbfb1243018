"""The run folder's memory: an append-only, fsynced event file and a lock, for one process or several; knows nothing of models."""

import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from videogen.errors import EnvironmentFault, say
from videogen.identity import hash_file

JOURNAL, LOCK = "run.jsonl", ".lock"
_MAX_NAME = 200  # `videogen.jobs.names` makes shorter ones


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

    seeds: drawn seeds by draft; rates: seconds per TFLOP of the finished clips; stamp is added to every event written; damaged:
    lines that were passed over. Every line carries its checksum, every finished clip's sidecar says again what its lines say.
    """

    folder: Path
    jobs: dict[str, Known] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    stamp: dict[str, Any] = field(default_factory=dict)
    damaged: int = 0
    _read: int = 0  # bytes
    _is_checked: bool = False  # a line with a checksum was read: from there on every line has one

    def append(self, event: str, **values: Any) -> None:
        """Write one event durably, then take it into account, and what others wrote meanwhile.

        Raises EnvironmentFault when the disk refuses; the file is then as it was.
        """
        path = self.folder / JOURNAL
        try:
            with path.open("ab", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                before = file.seek(0, os.SEEK_END)
                line = (b"" if not before or _ends_line(path) else b"\n") + _line({"event": event} | self.stamp | values)
                try:
                    while line:
                        line = line[file.write(line) :]
                    os.fsync(file.fileno())
                except OSError:
                    os.ftruncate(file.fileno(), before)
                    raise
        except OSError as error:
            advice = f"{error.strerror or error}; make room, then run the same command to go on"
            raise EnvironmentFault(say("journal", str(path), "a file that can be written", advice)) from None
        self.catch_up()

    def catch_up(self) -> None:
        """Read the lines that were added since; a torn, damaged or foreign one is passed over, never fatal."""
        path = self.folder / JOURNAL
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            whole = file.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in filter(None, whole.split(b"\n")):
            try:
                self._apply(self._checked(json.loads(line)))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                self.damaged += 1

    def _checked(self, entry: dict[str, Any]) -> dict[str, Any]:
        """A line's values. Raises ValueError where its checksum is another, or missing after lines that had one."""
        if not isinstance(entry, dict) or ("crc" not in entry and self._is_checked):
            raise ValueError("no line of ours")
        if "crc" in entry and _crc(entry) != entry["crc"]:
            raise ValueError("damaged")
        self._is_checked |= "crc" in entry
        return entry

    def adopt(self) -> None:
        """Take finished clips into account whose lines are lost: those of whole sidecars under names that no line says."""
        names = {known.name for known in self.jobs.values()}
        for path in sorted(self.folder.glob("*.json")):
            if path.stem in names:
                continue
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                job_id, output, drawn = str(record["job_id"]), record["output"], record.get("drawn")
                known = self.jobs.get(job_id, Known(state="adopted"))
                if record["status"] != "completed" or known.name or output["file"] != f"{path.stem}.mp4":
                    continue
                known.name, known.file = path.stem, output["file"]
                self.jobs[job_id] = known
                if drawn:
                    self.seeds.setdefault(str(drawn["by"]), _seed(drawn["seed"]))
            except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue  # some other file

    def is_done(self, job_id: str) -> bool:
        """Whether the clip is on disk byte for byte, with a completed sidecar: as its line says or, without one, its sidecar."""
        known = self.jobs.get(job_id)
        if known is None or not known.name:
            return False
        clip, sidecar = self.folder / f"{known.name}.mp4", self.folder / f"{known.name}.json"
        try:
            record = json.loads(sidecar.read_text(encoding="utf-8"))
            if known.state != "done" and record["job_id"] != job_id:
                return False
            wanted = known.sha256 if known.state == "done" else record["output"]["sha256"]
            return bool(record["status"] == "completed" and hash_file(clip) == wanted)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return False

    def confirm(self, job_id: str) -> None:
        """Write down what only the sidecar of a finished clip says: its run was killed, or the disk full, before its last line."""
        known = self.jobs[job_id]
        if known.state != "done":
            file = f"{known.name}.mp4"
            self.append("done", job=job_id, name=known.name, file=file, sha256=hash_file(self.folder / file))

    def _apply(self, entry: dict[str, Any]) -> None:
        event, job_id = entry.get("event"), entry.get("job")
        if event == "seed" or (event == "start" and entry.get("draft")):
            self.seeds[str(entry.get("draft"))] = _seed(entry["seed"])
        if not isinstance(job_id, str):
            return
        for key in ("name", "file"):
            if key in entry and not _is_plain(entry[key]):
                raise ValueError(key)
        seconds, tflop = (_measured(entry.get(key, 0)) for key in ("seconds", "tflop"))
        known = self.jobs.setdefault(job_id, Known())
        known.events += 1
        run = str(entry.get("run", ""))
        known.starts = (known.starts if known.run == run else 0) + 1 if event == "start" else 0
        known.state, known.run = str(event), run
        known.name = str(entry.get("name", known.name))
        known.error = str(entry.get("error", ""))
        if event == "done":
            known.file, known.sha256 = str(entry.get("file", "")), str(entry.get("sha256", ""))
            known.seconds = seconds
            if tflop:
                self.rates.append(seconds / tflop)


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _crc(entry: dict[str, Any]) -> int:
    kept = {key: value for key, value in entry.items() if key != "crc"}
    return zlib.crc32(json.dumps(kept, sort_keys=True, ensure_ascii=True).encode())


def _line(entry: dict[str, Any]) -> bytes:
    return (json.dumps(entry | {"crc": _crc(entry)}, sort_keys=True, ensure_ascii=True) + "\n").encode()


def _is_plain(name: Any) -> bool:
    """Whether it names a file of the folder itself: what is swept and written follows these names."""
    is_ours = isinstance(name, str) and name.isascii() and len(name) <= _MAX_NAME
    return is_ours and not name.startswith(".") and "/" not in name and "\0" not in name


def _seed(value: Any) -> int:
    if isinstance(value, int) and 0 <= value < 2**63:
        return value
    raise ValueError("seed")


def _measured(value: Any) -> float:
    if 1e-9 <= value <= 1e9 or value == 0:
        return float(value)
    raise ValueError("a measured value")


def read_journal(folder: Path) -> Journal:
    """The journal of a folder, with the finished clips that it has lost."""
    journal = Journal(folder)
    journal.catch_up()
    journal.adopt()
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
        advice = f"{error.strerror or error}; make room or use another --output-dir, then run the same command"
        raise EnvironmentFault(say("output folder", str(folder), "a folder that can be written", advice)) from None
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            raise EnvironmentFault(say("output folder", str(folder), "no other run in it", "wait for it, or use --output-dir")) from None
        yield file
