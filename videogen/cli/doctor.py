"""`videogen doctor`: what really runs on this machine, what it costs, and what would be faster."""

import argparse
import json
from typing import Any

from videogen.config import DEVICES, DTYPES, Environment, Request, read_environment
from videogen.errors import EnvironmentFault, bad, say

SLOW = 4
_PROMPT = "a large red circle moves right on a navy background, a low tone"


def add_command(commands: Any, environment: Environment) -> None:
    """Register the sub-command."""
    del environment
    parser = commands.add_parser("doctor", help="what really runs here, what it costs, what would be faster")
    parser.add_argument("--model", "-m", default="pocket", metavar="NAME")
    parser.add_argument("--recipe", default="exact", metavar="NAME")
    parser.add_argument("--size", metavar="WxH", help="default: the model's")
    parser.add_argument("--frames", type=int, metavar="N", help="default: the model's")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--save", action="store_true", help="keep what was fastest for this device; recipes that say `auto` use it")
    parser.add_argument("--strict", action="store_true", help="exit code 4 when something runs on a slower way than need be")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run, verbose=False, quiet=False)


def run(args: argparse.Namespace) -> int:
    """Look, report, save if asked; exit code 0, or 4 with `--strict` when something is slow."""
    from dataclasses import replace

    from videogen.device_profile import as_text, profile_path
    from videogen.doctor.examine import Examination
    from videogen.doctor.report import SCHEMA, as_plain_rows, table
    from videogen.jobs.plan import parse_size
    from videogen.pipeline import open_pipeline
    from videogen.recipes import find_recipe

    environment, recipe = read_environment(), find_recipe(args.recipe)
    recipe = replace(recipe, dtype=args.dtype) if args.dtype else recipe
    pipeline = open_pipeline(args.model, recipe, device=args.device)
    request = Request(_PROMPT, size=parse_size("--size", args.size) if args.size else None, frames=args.frames)
    resolved = pipeline.family.resolve(request, pipeline.recipe)
    path = profile_path(pipeline.device, environment)
    if args.save and path is None:
        raise bad("--save", "device profiles switched off", "a folder for them", "unset VIDEOGEN_DEVICE_PROFILES")
    pipe, transforms = pipeline.load(resolved.workflow), pipeline.transforms_for(resolved)
    found = Examination(pipe, resolved, transforms, pipeline.device, environment.record(), environment.offline)
    found.look()
    profile = found.profile()
    if args.save and path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(as_text(profile), encoding="utf-8")
        except OSError as error:
            told = say("device profile", str(path), "a file that can be written", error.strerror or str(error))
            raise EnvironmentFault(told) from error
    if args.json:
        head = {
            "schema": SCHEMA,
            "device": profile.device,
            "model": pipeline.source.name,
            "recipe": recipe.name,
            "rows": found.measured["rows"],
        }
        saved = str(path) if args.save else None
        print(
            json.dumps(
                head
                | {
                    "rows": found.measured["rows"],
                    "areas": as_plain_rows(found.rows),
                    "attention": found.measured["attention"],
                    "saved": saved,
                }
            )
        )
    else:
        print(f"{pipeline.source.name}, recipe {recipe.name}, {found.measured['rows']} rows, on {profile.device}\n")
        print(table(found.rows) + "\n\nattention candidates on the model's own queries, keys and values:")
        for row in found.measured["attention"]:
            timed = "" if row["ms"] is None else f"{row['ms']:.2f} ms, {row['error']:.1e} from float32"
            print(f"  {row['name']:<18} {'; '.join(each for each in (timed, row['reason']) if each)}")
        if args.save:
            print(f"\nsaved {path}")
    return SLOW if args.strict and any(row.is_slow for row in found.rows) else 0
