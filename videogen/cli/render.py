"""`videogen render`: job files and prompts to clips in a folder, resumable at any moment, on one device or several."""

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from videogen.cli import plan
from videogen.cli.options import add_request_options
from videogen.cli.planning import Wanted, no_duplicates_note, read_wanted, settle_clips
from videogen.cli.screen import make_screen
from videogen.config import Environment, Recipe, read_environment
from videogen.errors import bad
from videogen.jobs.journal import JOURNAL, Journal, locked, read_journal
from videogen.jobs.plan import Clip
from videogen.jobs.run import Renderer, Summary, run_clips, sweep
from videogen.progress import StopFlag

logger = logging.getLogger(__name__)


def add_command(commands: Any, environment: Environment) -> None:
    """Register the sub-command."""
    parser = commands.add_parser("render", help="render clips", allow_abbrev=False)
    add_request_options(parser, environment)
    many = parser.add_argument_group("on several devices")
    many.add_argument("--gpus", type=int, default=1, metavar="N", help="devices of this machine; each renders clips of its own")
    many.add_argument("--ulysses", type=int, default=1, metavar="U", help="devices that share one clip (a divisor of --gpus)")
    how = "where the denoiser's weights live: auto (the simplest place that leaves room for a clip); whole on a device; "
    how += "parked (AdaLN projections in host memory); and parked as well "
    how += "fsdp (over the devices of a clip) or offload (host memory, block by block, as H3's video decoder then); "
    how += "offload-idle: one expert of Wan 2.2 at a time"
    many.add_argument("--weights", choices=("auto", "whole", "parked", "fsdp", "offload", "offload-idle"), default="auto", help=how)
    how = "where the text encoder lives: resident on the first device of a clip, or in host memory and for every new prompt "
    how += "visiting as a whole, or (offload) layer by layer"
    many.add_argument("--text-encoder", choices=("auto", "resident", "visiting", "offload"), default="auto", help=how)
    many.add_argument("--engine", choices=("local", "ray"), default="local", help="ray: devices of a cluster (videogen[ray])")
    many.add_argument("--address", default="", metavar="HOST:PORT", help="the Ray cluster (default: one started here)")
    parser.add_argument("--dry-run", action="store_true", help="the same as `videogen plan`: loads nothing")
    parser.set_defaults(run=run)


@contextmanager
def signals(stop: StopFlag) -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM asks for a stop between steps, the second ends at once; yields what came."""
    came: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        if stop.wanted:
            raise KeyboardInterrupt
        stop.set()
        # straight to the descriptor: the signal may have come inside a write of the same stream, which is not reentrant
        with suppress(OSError):  # nobody listens any more
            os.write(2, b"videogen: stopping after this step; once more stops at once\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(args: argparse.Namespace) -> int:
    """Render; exit code 0 all done, 1 some failed, 5 a worker died, 130 or 143 when stopped."""
    if args.dry_run:
        return plan.run(args)
    told = read_environment()
    if told.run or told.world_size > 1:
        from videogen.cli import worker

        return worker.run(args, told)
    for name in ("gpus", "ulysses"):
        if getattr(args, name) < 1:
            raise bad(f"--{name}", getattr(args, name), "a whole number of at least 1", f"change --{name}")
    if args.weights == "fsdp" and args.ulysses == 1:
        raise bad("--weights", "fsdp", "several devices a clip", "add --ulysses, or use --weights offload")
    if args.engine == "ray":
        from videogen.cli import ray_run

        return ray_run.run(args)
    if args.gpus > 1 or args.ulysses > 1:
        from videogen.cli import fleet

        return fleet.run(args)
    wanted = read_wanted(args)
    stop = StopFlag()
    with signals(stop) as came, locked(wanted.folder):
        journal = read_journal(wanted.folder)
        sweep(journal)
        summary = _run(wanted, args, journal, stop)
    report(args, wanted, summary)
    return exit_code(summary, came)


def exit_code(summary: Summary, came: list[int]) -> int:
    """That of a run whose processes all lived."""
    if summary.is_stopped:
        return 143 if signal.SIGTERM in came else 130
    return 1 if summary.count("failed") else 0


def settle(wanted: Wanted, args: argparse.Namespace, journal: Journal) -> list[Clip]:
    """The clips, with seeds that are drawn now written down, and what the user should know of them."""
    if journal.damaged:
        logger.warning("%s: %d damaged lines passed over; sidecars say what was finished", journal.folder / JOURNAL, journal.damaged)
    clips = settle_clips(wanted, args, journal, lambda key, seed: journal.append("seed", draft=key, seed=seed))
    for note in [no_duplicates_note(wanted, clips), *sorted({note for clip in clips for note in clip.draft.resolved.notes})]:
        if note:
            logger.warning("%s", note)
    return clips


def opener(wanted: Wanted, args: argparse.Namespace, ranks: Any = None) -> Callable[[Recipe], Renderer]:
    """Opens a pipeline per number format, over these ranks (a `Ulysses`) where there are any; every other recipe shares its weights."""
    opened: dict[str, Any] = {}

    def open_renderer(recipe: Recipe) -> Renderer:
        from videogen.fit import fitted
        from videogen.load import pick_device
        from videogen.parallel.sharding import ALONE
        from videogen.parallel.weights import Placement
        from videogen.pipeline import Pipeline, open_pipeline

        first: Pipeline | None = opened.get(recipe.dtype)
        if first is not None:
            return first.sharing(recipe)  # another recipe over the same weights
        rows = max((draft.estimate.rows for draft in wanted.drafts), default=0)
        recipes = [recipe, *(draft.recipe for draft in wanted.drafts if draft.recipe.dtype == recipe.dtype)]
        sharding, placement = ranks or ALONE, Placement(args.weights, ranks and ranks.peers, args.text_encoder)
        device = pick_device(args.device)
        placement = fitted(placement, wanted.source, wanted.family, recipes, device, is_alone=ranks is None, rows=rows)
        opened[recipe.dtype] = open_pipeline(wanted.source, recipe, device=args.device, sharding=sharding, placement=placement)
        return opened[recipe.dtype]  # type: ignore[no-any-return]

    return open_renderer


def _run(wanted: Wanted, args: argparse.Namespace, journal: Journal, stop: StopFlag) -> Summary:
    clips = settle(wanted, args, journal)
    screen = make_screen("none" if args.quiet else args.progress, use_color=not read_environment().no_color)
    with screen:
        return run_clips(clips, journal, opener(wanted, args), encoding=wanted.encoding, screen=screen, stop=stop)


def report(args: argparse.Namespace, wanted: Wanted, summary: Summary, *, lost: int | None = None) -> None:
    """Where the clips are and what became of them; `lost` of several workers died."""
    counts = {state: summary.count(state) for state in ("done", "skipped", "failed")}
    more = {} if lost is None else {"left": summary.count("left"), "lost_workers": lost}
    if args.json:
        totals = counts | {"stopped": summary.is_stopped} | more
        record = {"schema": "videogen.run/1", "folder": str(wanted.folder), "model": wanted.source.record(), "totals": totals}
        print(json.dumps(record | {"clips": summary.rows}, ensure_ascii=False))
        return
    for row in summary.rows:
        if "file" in row:
            print(row["file"] + (" (finished before; --seed or --no-resume makes another)" if row["state"] == "skipped" else ""))
        elif row["state"] == "failed":
            print(f"videogen: {row['place']}: {row['name']} failed: {row['error']}", file=sys.stderr)
    if len(summary.rows) > 1 or summary.is_stopped or lost or counts["failed"]:
        left = more.get("left", 0)
        told = ", ".join(f"{number} {state}" for state, number in [*counts.items(), ("left", left)] if number)
        died = f"; {lost} worker{'s' if lost > 1 else ''} died" if lost else ""
        again = f"{'; stopped' if summary.is_stopped else ''}, run the same command to go on" if summary.is_stopped or left else ""
        again = again or (", run the same command to try what failed again" if counts["failed"] else "")
        print(f"{told or 'nothing done'}{died}{again}", file=sys.stderr)
