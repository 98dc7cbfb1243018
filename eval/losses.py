"""The journal of measured losses, one JSON line each, so that what was interrupted goes on where it stopped."""

import json
import os
from pathlib import Path
from typing import Any


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


class Losses:
    """Every measured loss by lambda and case; `reused` is the share of steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[tuple[float, str], dict[str, Any]] = {}
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if _is_row(row):
                    self.rows[row["lam"], row["case"]] = row

    def add(self, row: dict[str, Any]) -> None:
        """Keep one loss, on disk first."""
        append_line(self.path, json.dumps(row, sort_keys=True) + "\n")
        self.rows[row["lam"], row["case"]] = row
