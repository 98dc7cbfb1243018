"""The trials of an evaluation that are scored, one JSON line each in its folder: a stopped run goes on, several share one.

A line belongs to one question: both recipes, the model, what the clip is, the code. Lines of another question are passed over, and
so are those whose clips were replaced since.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eval.losses import append_line
from eval.metrics.registry import Measured
from eval.quality import Measures, Scored
from eval.quality_trials import Stored
from eval.report_folder import make_folder
from videogen.errors import EnvironmentFault, say
from videogen.identity import hash_settings

NAME = "trials.jsonl"


def as_line(question: str, row: Scored) -> str:
    """One trial, its contact sheet included; records stay in the sidecars, of which the line knows the digests."""
    found = {name: getattr(row, name) for name in ("name", "prompt", "seed", "is_identical", "curve", "alarms", "judged")}
    found |= {arm: _plain(getattr(row, arm)) for arm in ("new", "floor", "ceiling")}
    stored = {arm: [each.path.name, _digest(json.dumps(each.record))] for arm, each in row.stored.items()}
    found |= {"stored": stored, "sheet": base64.b64encode(row.sheet).decode()}
    return json.dumps({"question": question, **found}) + "\n"


def _digest(record: str) -> str:
    """Of a sidecar's content, however it is written."""
    return hash_settings(json.loads(record))


def _plain(measures: Measures | None) -> dict[str, Any] | None:
    return None if measures is None else {name: asdict(each) for name, each in measures.items()}


def _measures(plain: dict[str, Any] | None) -> Measures | None:
    return None if plain is None else {name: Measured(**each) for name, each in plain.items()}


def _as_row(line: dict[str, Any], folder: Path) -> Scored:
    stored = {}
    for arm, (name, digest) in line["stored"].items():
        path = folder / arm / name
        text = path.with_suffix(".json").read_text(encoding="utf-8")
        if not path.is_file() or _digest(text) != digest:
            raise ValueError(f"{path} is gone, or of another run")
        stored[arm] = Stored(path, json.loads(text))
    new = _measures(line["new"])
    assert new is not None
    kept = {name: line[name] for name in ("name", "prompt", "seed", "is_identical", "curve", "alarms", "judged")}
    sheet = base64.b64decode(line["sheet"], validate=True)
    return Scored(**kept, new=new, floor=_measures(line["floor"]), ceiling=_measures(line["ceiling"]), stored=stored, sheet=sheet)


@contextmanager
def _disk(path: Path) -> Iterator[Path]:
    try:
        yield path
    except OSError as error:
        advice = f"{error.strerror or error}; make room, then run the same command to go on"
        raise EnvironmentFault(say("file", str(path), "a file that can be read and written", advice)) from None


@dataclass(slots=True)
class TrialJournal:
    """The scored trials of one folder by case; `questions` says what each case asks now."""

    folder: Path
    questions: dict[str, str]
    rows: dict[str, Scored] = field(default_factory=dict)

    def prepare(self) -> None:
        """Make the folder and see whether lines can be added. Raises EnvironmentFault where the disk refuses."""
        make_folder(self.folder)
        with _disk(self.folder / NAME) as path, path.open("ab"):
            pass

    def read(self) -> None:
        """Take up what is there and can be read; a line cut off, or whose clips are gone or others, is measured again."""
        with _disk(self.folder / NAME) as path:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        for text in lines:
            try:
                line = json.loads(text)
                if self.questions.get(line["name"]) == line["question"]:
                    self.rows[line["name"]] = _as_row(line, self.folder)
            except (ValueError, KeyError, TypeError, AttributeError, AssertionError, OSError, RecursionError):
                continue

    def add(self, row: Scored) -> None:
        """Keep one trial: on disk at once, in one write, so that several processes may share a folder.

        Raises EnvironmentFault where the disk refuses.
        """
        with _disk(self.folder / NAME) as path:
            append_line(path, as_line(self.questions[row.name], row))
        self.rows[row.name] = row

    def forget(self) -> None:
        """Begin anew."""
        with _disk(self.folder / NAME) as path:
            path.unlink(missing_ok=True)
        self.rows.clear()

    def ordered(self, names: Sequence[str]) -> list[Scored]:
        """The rows of these cases, in their order, those that are there."""
        return [self.rows[name] for name in names if name in self.rows]
