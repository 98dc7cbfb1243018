"""`videogen eval`: what a recipe costs in quality, rendered here or read from two run folders."""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from videogen.config import DEVICES, DTYPES, Environment
from videogen.errors import bad

logger = logging.getLogger(__name__)
GATE_FAILED = 4
_RENDERING = (
    "recipe",
    "vs",
    "cache_lambda",
    "cache_prior",
    "sparse_budget",
    "sparse_small",
    "prompts",
    "workflow",
    "model",
    "dtype",
    "device",
    "anchors",
)  # unset ones take Rendering's own values


def add_eval(commands: Any, environment: Environment) -> None:
    """Register the sub-command; it speaks through `args.say`, its progress goes to the log."""
    del environment
    parser = commands.add_parser("eval", help="what a recipe costs in quality", allow_abbrev=False)
    parser.add_argument("what", nargs="*", metavar="WHAT", help="nothing: render; `list`: the metrics; NEW REFERENCE: two run folders")
    parser.add_argument("--recipe", metavar="A", help="the recipe under test (default: exact)")
    parser.add_argument("--vs", metavar="B", help="the reference (default: plain, diffusers untouched)")
    parser.add_argument("--cache-lambda", type=float, metavar="F", help="uncertified step cache in the arm under test (0 is off)")
    parser.add_argument("--cache-prior", metavar="FILE", help="by this prior of `videogen calibrate --prior-only`")
    parser.add_argument("--sparse-budget", type=float, metavar="F", help="sparse attention in the arm under test")
    parser.add_argument("--sparse-small", action="store_true", default=None, help="with tiles and blocks of pocket's size, on a GPU too")
    parser.add_argument("--prompts", metavar="N|FILE", help="first N of the workflow's fixed set, or a job file (default: 8)")
    parser.add_argument("--workflow", metavar="NAME", help="t2va (default), fl2va or ref2va; with --prompts N")
    parser.add_argument("--model", "-m", metavar="NAME", help="pocket (default), random, a folder or a hub id")
    parser.add_argument("--steps", type=int, metavar="N", help="forwards, in both arms")
    parser.add_argument("--size", metavar="WxH")
    parser.add_argument("--frames", type=int, metavar="N")
    parser.add_argument("--seconds", type=float, metavar="S")
    parser.add_argument("--dtype", choices=DTYPES, help="in both arms")
    parser.add_argument("--device", choices=DEVICES)
    parser.add_argument("--anchors", type=int, metavar="N", help="prompts that also get floor and ceiling, two renders each (default: all)")
    parser.add_argument("--lossless", action="store_true", help="keep the exact frames beside each clip")
    parser.add_argument("--output-dir", "-o", metavar="DIR", help="default: evals/A-vs-B")
    parser.add_argument("--overwrite", action="store_true", help="replace a report that is there")
    parser.add_argument(
        "--require", action="append", default=[], metavar="METRIC", help="fail before rendering when this one cannot run (repeatable)"
    )
    parser.add_argument(
        "--shard", metavar="I/N", help="measure this share of the prompts (I from 0) and stop; the same command without it makes the report"
    )
    parser.add_argument("--gate", action="store_true", help="exit 4 on an alarm, or when the oracle cannot show non-inferiority")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate, or list the metrics; exit code 0, 4 when `--gate` is asked for and fails."""
    if args.what == ["list"]:
        return _list(args)
    if args.gate and args.shard is not None:
        raise bad("--gate with --shard", args.shard, "one of the two", "drop --gate: it judges the report, which no shard makes")
    report, paths = _evaluate(args)
    if args.shard is not None:
        told = f"shard {args.shard}: {report['prompts']} prompts are in {paths[0]}; the same command without --shard makes the report"
        args.say(json.dumps(report) if args.json else told)
        return 0
    if args.json:
        args.say(json.dumps(report, ensure_ascii=False, allow_nan=False))
    else:
        args.say(paths[1].read_text(encoding="utf-8") + "\n" + "\n".join(map(str, paths)))
    return GATE_FAILED if args.gate and not report["gate"]["passed"] else 0


def _list(args: argparse.Namespace) -> int:
    from eval.metrics.registry import availability

    rows = availability()
    if args.json:
        args.say(json.dumps({"schema": "videogen.metrics/1", "metrics": rows}, allow_nan=False))
        return 0
    for row in rows:
        told = f"better: {row['better']}; {row['about']}" if row["is_available"] else f"skipped: {row['reason']}"
        args.say(f"{row['name']:<22} {row['unit']:<7} {told}")
    return 0


def _evaluate(args: argparse.Namespace) -> tuple[dict[str, Any], list[Path]]:
    from eval.quality_cases import Shape
    from eval.quality_run import Output, Rendering, evaluate_folders, evaluate_rendering
    from videogen.jobs.plan import parse_size

    shape = Shape(parse_size("--size", args.size) if args.size else None, args.frames, args.seconds, args.steps)
    given = {name: getattr(args, name) for name in _RENDERING if getattr(args, name) is not None}
    given |= ({"shape": shape} if shape != Shape() else {}) | ({"lossless": True} if args.lossless else {})
    required = tuple(args.require)
    if not args.what:
        rendering = Rendering(**given)
        folder = Path(args.output_dir or f"evals/{rendering.arms[0].name}-vs-{rendering.vs}").expanduser()
        return evaluate_rendering(
            rendering, Output(folder, args.overwrite, required), logger.debug if args.quiet else logger.info, args.shard
        )
    if len(args.what) != 2:
        raise bad("what to evaluate", args.what, "nothing, `list`, or two run folders: NEW REFERENCE", "see `videogen eval --help`")
    if args.shard is not None:
        raise bad("--shard beside two run folders", args.shard, "none: nothing is rendered", "drop it")
    if given:
        raise bad("options beside two run folders", sorted(given), "none that render", "drop them: the clips are taken as they are")
    new, reference = (Path(name).expanduser() for name in args.what)
    folder = Path(args.output_dir or f"evals/{new.name}-vs-{reference.name}").expanduser()
    return evaluate_folders(new, reference, Output(folder, args.overwrite, required), logger.debug if args.quiet else logger.info)
