"""`videogen compare OLD NEW`: two throughput reports side by side, if they may be compared at all."""

import argparse
import json
from pathlib import Path
from typing import Any

from eval.bench_report import not_comparable_because, read_report
from videogen.config import Environment
from videogen.errors import bad


def add_compare(commands: Any, environment: Environment) -> None:
    """Register the sub-command."""
    del environment
    parser = commands.add_parser("compare", help="two bench.json side by side")
    parser.add_argument("old", help="bench.json, or its folder")
    parser.add_argument("new", help="bench.json, or its folder")
    parser.add_argument("--max-loss", type=float, metavar="PERCENT", help="exit 4 when clips/h fell by more than this")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run, verbose=False, quiet=False)


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per arm that both reports have: clips per hour of each and their ratio."""
    before = {arm["arm"]: arm for arm in old["arms"]}
    rows = []
    for arm in new["arms"]:
        if arm["arm"] in before:
            was, now = before[arm["arm"]]["clips_per_hour_machine"], arm["clips_per_hour_machine"]
            rows.append({"arm": arm["arm"], "old": was, "new": now, "ratio": now / was if was else None})
    return rows


def run(args: argparse.Namespace) -> int:
    """Print the comparison; exit code 0, 2 when the reports are not comparable, 4 when `--max-loss` is exceeded."""
    old, new = read_report(Path(args.old)), read_report(Path(args.new))
    reasons = not_comparable_because(old, new)
    if reasons:
        raise bad("reports", ", ".join(reasons), "the same workload, model and machine in both", "measure both in one place")
    rows = compare(old, new)
    if not rows:
        raise bad("arms", [arm["arm"] for arm in new["arms"]], f"one of {[arm['arm'] for arm in old['arms']]}", "measure the same recipe")
    if args.json:
        args.say(json.dumps({"schema": "videogen.compare/1", "arms": rows}))
    else:
        lines = [f"{row['arm']}: {row['old']:.2f} -> {row['new']:.2f} clips/h, {row['ratio'] or 0:.3f} times" for row in rows]
        args.say("\n".join(lines))
    lost = [row for row in rows if args.max_loss is not None and (row["ratio"] or 0) < 1 - args.max_loss / 100]
    return 4 if lost else 0
