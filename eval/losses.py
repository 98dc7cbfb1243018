"""The journal of measured losses, one JSON line each, so that what was interrupted goes on where it stopped."""

import json
from pathlib import Path
from typing import Any


class Losses:
    """Every measured loss by lambda and case; `reused` is the share of steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[tuple[float, str], dict[str, Any]] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self.rows[row["lam"], row["case"]] = row

    def add(self, row: dict[str, Any]) -> None:
        """Keep one loss, on disk first."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, sort_keys=True) + "\n")
        self.rows[row["lam"], row["case"]] = row
