"""The journal of measured losses, one JSON line each, so that what was interrupted goes on where it stopped."""

import json
import os
from pathlib import Path
from typing import Any


class Losses:
    """Every measured loss by lambda and case; `reused` is the share of steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[tuple[float, str], dict[str, Any]] = {}
        self._is_whole = True  # a process killed while it wrote leaves a line without its end
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            self._is_whole = not text or text.endswith("\n")
            for line in text.splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self.rows[row["lam"], row["case"]] = row

    def add(self, row: dict[str, Any]) -> None:
        """Keep one loss, on disk first."""
        line = json.dumps(row, sort_keys=True) + "\n"
        with self.path.open("ab") as file:
            file.write((line if self._is_whole else "\n" + line).encode())
            file.flush()
            os.fsync(file.fileno())
        self._is_whole = True
        self.rows[row["lam"], row["case"]] = row
