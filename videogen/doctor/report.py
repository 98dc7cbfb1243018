"""One finding of the doctor as a value, and many of them as a table or as plain data."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "videogen.doctor/1"


@dataclass(frozen=True, slots=True)
class Row:
    """What was asked for in one area, what ran, why, what it costs and what to do. `is_slow`: a slower way than need be."""

    area: str
    requested: str
    executed: str
    reason: str = ""
    cost: str = ""
    fix: str = ""
    is_slow: bool = False


def as_plain_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For `--json`."""
    return [asdict(row) for row in rows]


def table(rows: Sequence[Row]) -> str:
    """A few lines a row: the area, what was asked for and what ran; then why, cost and fix where there is something to say."""
    width = max(len(row.area) for row in rows)
    lines = []
    for row in rows:
        same = row.executed.startswith(row.requested)
        lines.append(f"{'!' if row.is_slow else ' '} {row.area:<{width}}  {row.executed}" + ("" if same else f"  (asked: {row.requested})"))
        lines += [f"  {'':<{width}}  {name}: {text}" for name, text in (("why", row.reason), ("cost", row.cost), ("do", row.fix)) if text]
    slow = sum(row.is_slow for row in rows)
    return "\n".join(
        [*lines, "", f"{slow} of {len(rows)} areas run on a slower way than need be" if slow else "nothing runs on a slow way"]
    )
