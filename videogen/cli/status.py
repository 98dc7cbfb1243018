"""`videogen status FOLDER`: what a run folder holds, read from its journal."""

import argparse
import json
from collections import Counter
from typing import Any

from videogen.config import Environment
from videogen.errors import bad
from videogen.jobs.journal import JOURNAL, read_journal
from videogen.places import is_there, user_path


def add_command(commands: Any, environment: Environment) -> None:
    """Register the sub-command."""
    parser = commands.add_parser("status", help="what a run folder holds")
    parser.add_argument("folder", nargs="?", default=environment.output_dir, help="default: %(default)s")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run, verbose=False, quiet=False)


def run(args: argparse.Namespace) -> int:
    """Print every job's state; exit code 0."""
    folder = user_path("run folder", args.folder)
    if not is_there(folder / JOURNAL):
        raise bad("run folder", str(folder), f"a folder with {JOURNAL}", "pass the --output-dir of a render")
    journal = read_journal(folder)
    rows = []
    for job_id, known in journal.jobs.items():
        state = known.state
        if state == "done" and not journal.is_done(job_id):
            state = "missing"
        elif state == "start":
            state = "unfinished"
        rows.append({"name": known.name, "state": state, "job_id": job_id, "file": known.file, "error": known.error})
    if args.json:
        print(json.dumps({"schema": "videogen.status/1", "folder": str(folder), "jobs": rows}))
        return 0
    for row in rows:
        print(f"{row['state']:<10} {row['name']}{': ' + row['error'] if row['error'] else ''}")
    counts = Counter(row["state"] for row in rows)
    print(", ".join(f"{number} {state}" for state, number in sorted(counts.items())) or "no jobs")
    return 0
