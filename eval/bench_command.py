"""`videogen bench`: clips per hour of one recipe, or of two against each other."""

import argparse
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.bench import Protocol, run_bench
from eval.bench_report import FILES, markdown, write_report
from eval.cases import WORKLOADS, find_workload
from eval.report_folder import check_free
from videogen.config import DEVICES, DTYPES, Environment, Recipe
from videogen.errors import RequestError, bad, say
from videogen.recipes import find_recipe

logger = logging.getLogger(__name__)


def add_bench(commands: Any, environment: Environment) -> None:
    """Register the sub-command."""
    del environment
    defaults = Protocol()
    parser = commands.add_parser("bench", help="clips per hour", allow_abbrev=False)
    parser.add_argument("--workload", metavar="NAME", help="see --list")
    parser.add_argument("--list", action="store_true", help="the workloads")
    parser.add_argument("--recipe", default="exact", metavar="A")
    parser.add_argument("--vs", metavar="B", help="a second recipe, interleaved A B B A on the same requests")
    parser.add_argument("--model", metavar="NAME", help="other weights of the same family (default: the workload's)")
    parser.add_argument("--steps", type=int, metavar="N", help="other forwards than the workload's; a recipe's own stand above")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--device", choices=DEVICES, default=defaults.device)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="1; several are not built yet")
    parser.add_argument("--in-flight", type=int, default=defaults.in_flight, metavar="N", help="encode one clip while rendering the next")
    parser.add_argument("--min-clips", type=int, default=defaults.min_clips, metavar="N", help="default: %(default)s")
    parser.add_argument("--min-seconds", type=float, default=defaults.min_seconds, metavar="S", help="default: %(default)s")
    parser.add_argument("--repeat", type=int, default=defaults.repeat, metavar="K")
    parser.add_argument("--warmup", type=int, default=defaults.warmup, metavar="N", help="clips per arm, at least --in-flight")
    parser.add_argument("--output-dir", "-o", metavar="DIR", help="default: benches/WORKLOAD")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--json", action="store_true", help="the report on standard output")
    parser.set_defaults(run=run, verbose=False, quiet=False)


def _protocol(args: argparse.Namespace) -> Protocol:
    for name, low in (("in_flight", 1), ("min_clips", 1), ("repeat", 1), ("warmup", 1)):
        if getattr(args, name) < low:
            raise bad("--" + name.replace("_", "-"), getattr(args, name), f"at least {low}", "change it")
    if not 0 <= args.min_seconds < 1e6:
        raise bad("--min-seconds", args.min_seconds, "from 0 to 1,000,000", "change it")
    if args.gpus != 1:
        do = "start one bench per GPU, each with CUDA_VISIBLE_DEVICES and its own -o, at the same time, and add up their clips/h"
        raise bad("--gpus", args.gpus, "1: several in one run are not built yet", do)
    if args.in_flight > 1 and args.vs:
        raise bad("--in-flight with --vs", args.in_flight, "1 when two recipes are compared", "measure them one at a time")
    return Protocol(args.min_clips, args.min_seconds, args.in_flight, args.repeat, args.warmup, args.device, args.model)


def _arms(args: argparse.Namespace) -> dict[str, Recipe]:
    recipes = [find_recipe(name) for name in (args.recipe, args.vs) if name]
    if args.dtype:
        recipes = [replace(recipe, dtype=args.dtype) for recipe in recipes]
    names = [recipe.name for recipe in recipes]
    if len(set(names)) < len(names):
        names = [f"{name} ({letter})" for name, letter in zip(names, "AB")]
    return dict(zip(names, recipes))


def run(args: argparse.Namespace) -> int:
    """Measure and write the report; exit code 0, or 1 when a clip was broken."""
    if args.list or not args.workload:
        if not args.list:
            raise RequestError(say("--workload", "none", f"one of {', '.join(WORKLOADS)}", "see `videogen bench --list`"))
        lines = [f"{w.name:<14} {w.size[0]}x{w.size[1]}, {w.frames} frames, {w.steps} forwards: {w.note}" for w in WORKLOADS.values()]
        args.say("\n".join(lines))
        return 0
    workload, protocol, arms = find_workload(args.workload), _protocol(args), _arms(args)
    if args.steps is not None:
        workload = replace(workload, steps=args.steps)
    folder = Path(args.output_dir or f"benches/{workload.name}").expanduser()
    check_free(folder, FILES[0], overwrite=args.overwrite)
    report = run_bench(workload, arms, protocol, tell=lambda text: logger.info("%s", text))
    paths = write_report(folder, report, overwrite=args.overwrite)
    args.say(json.dumps(report) if args.json else markdown(report) + f"\n{paths[0]}")
    return 1 if any(arm["broken"] for arm in report["arms"]) else 0
