"""`videogen plan` (= `render --dry-run`): what would be rendered, with nothing loaded and nothing written."""

import argparse
import json
from typing import Any

from videogen.cli import layouts
from videogen.cli.options import add_request_options
from videogen.cli.planning import Wanted, clip_row, no_duplicates_note, read_wanted, seconds_per_tflop, settle_clips
from videogen.config import Environment
from videogen.jobs.journal import read_journal
from videogen.jobs.plan import Clip

_PROMPT_CHARACTERS = 44


def add_command(commands: Any, environment: Environment) -> None:
    """Register the sub-command."""
    parser = commands.add_parser("plan", help="show what would be rendered; loads nothing", allow_abbrev=False)
    add_request_options(parser, environment)
    layouts.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; exit code 0, or 2 with every wrong job listed."""
    if layouts.is_asked(args):
        return layouts.run(args)
    wanted = read_wanted(args)
    journal = read_journal(wanted.folder)
    clips = settle_clips(wanted, args, journal, lambda _key, _seed: None)
    rows = [clip_row(clip, seconds_per_tflop(journal)) for clip in clips]
    if args.json:
        print(json.dumps({"schema": "videogen.plan/1", "model": wanted.source.record(), "clips": rows}, ensure_ascii=False))
    else:
        _print_table(wanted, clips, rows)
    return 0


def _print_table(wanted: Wanted, clips: list[Clip], rows: list[dict[str, Any]]) -> None:
    print(f"{'name':<34} {'flow':<6} {'size':>9} {'frames':>6} {'steps':>5} {'seed':>10} {'rows':>7} {'TFLOP':>7}  prompt")
    for row in rows:
        seed = "drawn" if row["seed"] is None else str(row["seed"])
        prompt = " ".join(row["prompt"].split())[:_PROMPT_CHARACTERS]
        numbers = f"{row['size']:>9} {row['frames']:>6} {row['steps']:>5} {seed:>10} {row['rows']:>7} {row['tflop']:>7.2f}"
        print(f"{row['name'][:34]:<34} {row['workflow']:<6} {numbers}  {prompt}")
        for note in [*row["notes"], *(["already finished: will be skipped"] if row["is_done"] else [])]:
            print(f"    {note}")
    todo = [row for row in rows if not row["is_done"]]
    disk_mb = sum(row["disk_bytes"] for row in todo) / 1e6
    known = [row["estimated_s"] for row in todo if row["estimated_s"] is not None]
    time = f"about {sum(known):.0f} s, from the clips this folder has finished" if known else "time unknown until the first clip here"
    tflop = sum(row["tflop"] for row in todo)
    print(f"{len(todo)} of {len(rows)} clips to render: {tflop:.1f} TFLOP of denoising ({time}), about {disk_mb:.1f} MB on disk")
    for note in (no_duplicates_note(wanted, clips), wanted.source.label and f"{wanted.source.name}: {wanted.source.label}"):
        if note:
            print(note)
