"""The journal of measured losses, one JSON line each, so that what was interrupted goes on where it stopped.

Several processes and several questions may share a file: a row answers only the question that is written in it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eval.quality_cases import Case
from videogen.config import StepCache, as_plain
from videogen.identity import hash_settings
from videogen.pipeline import Pipeline


def _is_row(row: Any) -> bool:
    """Whether a line says what was measured; what it does not say is measured again. A loss may be NaN, which is a violation."""
    if not isinstance(row, dict) or not isinstance(row.get("case"), str) or not isinstance(row.get("parts"), dict):
        return False
    numbers = [row.get("lam"), row.get("reused"), *row["parts"].values()]
    is_typed = all(isinstance(each, float) or (type(each) is int and abs(each) < 1e300) for each in numbers)
    return is_typed and 0 <= row["lam"] < 1e300 and 0 <= row["reused"] <= 1


def append_line(path: Path, line: str) -> None:
    """Add a line, its end included, and have it on disk: in one write, so that several processes may share the file.

    A process killed while it wrote leaves a line without its end; the next one begins behind it.
    """
    with path.open("ab+") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
        is_cut = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * is_cut + line.encode())
        file.flush()
        os.fsync(file.fileno())


def settings_of(options: StepCache) -> dict[str, Any]:
    """What of a step cache decides a clip, but for its lambda; the prior by its digest."""
    names = ("max_streak", "video_order", "audio_order", "drift_order", "warm_up", "streams")
    return {name: getattr(options, name) for name in names} | {"prior": options.prior and options.prior.digest}


def questions(pipeline: Pipeline, cases: Sequence[Case], asked: Mapping[str, Any], parallel: str = "1") -> dict[str, str]:
    """By case, the digest of everything but lambda that its loss depends on.

    That is its stratum, run as `parallel` says; prompt, pictures and seed; the recipe's savings; and `asked`, which describes the cache.
    """
    found = {}
    for case in cases:
        resolved = pipeline.family.resolve(case.request, pipeline.recipe)
        question = {
            "stratum": asdict(replace(pipeline.stratum(resolved), parallel=parallel)),
            "prompt": resolved.prompt,
            "expand": as_plain(resolved.expand),
            "inputs": [[each.role, each.sha256] for each in resolved.inputs],
            "seed": case.seed,
            "savings": as_plain(pipeline.savings),
            "asked": as_plain(asked),
        }
        found[case.name] = hash_settings(question)
    return found


class Losses:
    """Every measured loss by lambda and case; `reused` is the share of steps.

    With `questions` (by case) rows of any other question count as not measured, and stay in the file for whoever asks it; without
    them the case's own name must say everything.
    """

    def __init__(self, path: Path, questions: Mapping[str, str] | None = None) -> None:
        self.path, self.questions = path, questions
        self.rows: dict[tuple[float, str], dict[str, Any]] = {}
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if _is_row(row) and (questions is None or (row["case"], row.get("question")) in questions.items()):
                    self.rows[row["lam"], row["case"]] = row

    def add(self, row: dict[str, Any]) -> None:
        """Keep one loss, on disk first, with the question it answers."""
        if self.questions is not None:
            row = row | {"question": self.questions[row["case"]]}
        append_line(self.path, json.dumps(row, sort_keys=True) + "\n")
        self.rows[row["lam"], row["case"]] = row
