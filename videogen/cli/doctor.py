"""`videogen doctor`: what really runs on this machine, what it costs, and what would be faster."""

import argparse
import json
from pathlib import Path
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
    link = "how fast so many devices exchange what a layer sends, peer to peer and not; loads no model (--save: `render --gpus N` uses it)"
    parser.add_argument("--link", type=int, metavar="N", help=link)
    parser.add_argument("--strict", action="store_true", help="exit code 4 when something runs on a slower way than need be")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run, verbose=False, quiet=False)


def run(args: argparse.Namespace) -> int:
    """Look, report, save if asked; exit code 0, or 4 with `--strict` when something is slow."""
    if args.link is not None:
        return _link(args)
    from dataclasses import replace

    from videogen.device_profile import DeviceProfile, as_text, device_key, profile_path, read_profile
    from videogen.doctor.examine import Examination
    from videogen.doctor.report import SCHEMA, as_plain_rows, table
    from videogen.jobs.plan import parse_size
    from videogen.pipeline import open_pipeline
    from videogen.recipes import find_recipe
    from videogen.source import open_h3_family

    environment, recipe = read_environment(), find_recipe(args.recipe)
    recipe = replace(recipe, dtype=args.dtype) if args.dtype else recipe
    pipeline = open_pipeline(args.model, recipe, device=args.device)
    open_h3_family(pipeline.source, "videogen doctor")  # whose stages it looks at
    request = Request(_PROMPT, size=parse_size("--size", args.size) if args.size else None, frames=args.frames)
    resolved = pipeline.family.resolve(request, pipeline.recipe)
    path = profile_path(pipeline.device, environment)
    if args.save and path is None:
        raise bad("--save", "device profiles switched off", "a folder for them", "unset VIDEOGEN_DEVICE_PROFILES")
    pipe, transforms = pipeline.load(resolved.workflow), pipeline.transforms_for(resolved)
    found = Examination(pipe, resolved, transforms, pipeline.device, environment.record(), environment.offline)
    found.look()
    best, saved = found.winners(), None
    if args.save and path is not None and best is not None:
        before = read_profile(pipeline.device, environment) or DeviceProfile(device_key(pipeline.device))
        _keep(path, as_text(before.keeping(best)))
        saved = str(path)
    rows, device, tried = found.measured["rows"], device_key(pipeline.device), found.measured["attention"]
    if args.json:
        head = {"schema": SCHEMA, "device": device, "model": pipeline.source.name, "recipe": recipe.name, "rows": rows}
        print(json.dumps(head | {"areas": as_plain_rows(found.rows), "attention": tried, "saved": saved}))
    else:
        print(f"{pipeline.source.name}, recipe {recipe.name}, {rows} rows, on {device}\n")
        print(table(found.rows) + "\n" + _candidates(tried))
        if args.save:
            print(f"\nsaved {saved}" if saved else "\nnothing saved: the denoiser could not run")
    return SLOW if args.strict and any(row.is_slow for row in found.rows) else 0


def _candidates(tried: list[dict[str, Any]]) -> str:
    """A line per way to attend; nothing where none was tried."""
    lines = ["\nattention candidates on the model's own queries, keys and values:"] if tried else []
    for row in tried:
        timed = "" if row["ms"] is None else f"{row['ms']:.2f} ms, {row['error']:.1e} from float32"
        lines.append(f"  {row['name']:<18} {'; '.join(each for each in (timed, row['reason']) if each)}")
    return "\n".join(lines)


def _keep(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(say("device profile", str(path), "a file that can be written", error.strerror or str(error))) from error


def _link(args: argparse.Namespace) -> int:
    """The exchange between ranks alone; exit codes as `run`."""
    import torch

    from videogen.doctor.link import as_text, check
    from videogen.doctor.report import SCHEMA, as_plain_rows, table
    from videogen.parallel.probe import probe

    environment, is_cuda = read_environment(), args.device != "cpu" and torch.cuda.is_available()
    most = torch.cuda.device_count() if is_cuda else 64
    if not 2 <= args.link <= most:
        raise bad("--link", args.link, f"from 2 to {most} {'devices' if is_cuda else 'processes'}", "change --link")
    if args.save and not environment.device_profiles:
        raise bad("--save", "device profiles switched off", "a folder for them", "unset VIDEOGEN_DEVICE_PROFILES")
    measured = probe(args.link, is_cuda=is_cuda, shrink=1 if is_cuda else 64)
    off = dict(environment.values).get("NCCL_P2P_DISABLE", "0") not in ("", "0")
    in_force = "gloo" if not is_cuda else "through host memory" if off else "peer to peer"
    row = check(measured, in_force)
    path = link_path(environment, args.link)
    if args.save and path is not None:
        _keep(path, as_text(measured, in_force))
    if args.json:
        print(json.dumps({"schema": SCHEMA, "areas": as_plain_rows([row]), "saved": str(path) if args.save else None}))
    else:
        print(table([row]) + (f"\nsaved {path}" if args.save else ""))
    return SLOW if args.strict and row.is_slow else 0


def link_path(environment: Environment, ranks: int) -> Path | None:
    """Where `--link N --save` keeps what it found; None when profiles are switched off."""
    return Path(environment.device_profiles).expanduser() / f"link-{ranks}.json" if environment.device_profiles else None
