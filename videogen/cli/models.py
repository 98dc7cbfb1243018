"""`videogen models [NAME]`: which models there are, and what one accepts."""

import argparse
import json
from typing import Any

from videogen.config import SHIPPED, Environment, read_environment
from videogen.families.h3 import FPS, canvas_for_aspect, snap_frames
from videogen.source import ModelSource, find_model, open_family

KNOWN = {
    "pocket": "MiniMax-H3's classes at toy size, shipped with videogen",
    "random": "the same with seeded random weights; random:FOLDER takes a folder's configs",
    "FOLDER": "a MiniMax-H3 modular pipeline folder of diffusers 0.42, or a Wan 2.1 or 2.2 pipeline folder",
    "OWNER/NAME": "the same on the hub, such as MiniMaxAI/MiniMax-H3 (not tried: no hub is reachable where this is built)",
}


def add_command(commands: Any, environment: Environment) -> None:
    """Register the sub-command."""
    del environment
    parser = commands.add_parser("models", help="models, and what one accepts")
    parser.add_argument("name", nargs="?", help="a model's name")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run, verbose=False, quiet=False)


def run(args: argparse.Namespace) -> int:
    """Print the list, or one model's limits; exit code 0."""
    if args.name is None:
        print(json.dumps(KNOWN) if args.json else "\n".join(f"{name:<11} {text}" for name, text in KNOWN.items()))
        return 0
    source = find_model(args.name, offline=read_environment().offline)
    if source.is_wan:
        return _tell(args, _wan_facts(source))
    g = open_family(source).geometry
    shortest = snap_frames(g.min_frames, g)
    facts = {
        "model": source.name,
        "label": source.label,
        "identity": source.identity,
        "workflows": ["t2va", "fl2va", "ref2va"],
        "canvas": "x".join(map(str, canvas_for_aspect(16, 9, g))),
        "sides": f"multiples of {g.canvas_multiple}",
        "frames": f"{shortest} to {g.max_frames}, 17n+5",
        "seconds": f"{shortest / FPS:.3f} to {g.max_frames / FPS:.3f}",
        "fps": FPS,
        "steps": g.default_steps,
        "adapters": [f"{SHIPPED}{path.stem}" for path in sorted(source.adapters_folder.glob("*.safetensors"))],
    }
    return _tell(args, facts)


def _wan_facts(source: ModelSource) -> dict[str, Any]:
    family = open_family(source)
    g = family.geometry
    return {
        "model": source.name,
        "label": source.label,
        "identity": source.identity,
        "workflows": list(family.workflows),
        "size": "x".join(map(str, g.default_size)),
        "sides": f"multiples of {g.multiple}",
        "frames": f"{g.default_frames}, {g.frames_per_latent}n+1",
        "fps": g.fps,
        "steps": g.default_steps,
        "shift": g.shift,
        "guidance": list(map(str, g.default_guidance)),
        "boundary": "" if g.boundary is None else g.boundary,
    }


def _tell(args: argparse.Namespace, facts: dict[str, Any]) -> int:
    told = {name: ", ".join(value) if isinstance(value, list) else value for name, value in facts.items() if value not in ("", [])}
    print(json.dumps(facts) if args.json else "\n".join(f"{name:<10} {value}" for name, value in told.items()))
    return 0
