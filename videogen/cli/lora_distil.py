"""`videogen lora distil`: a few-step adapter of a pocket-h3 folder, trained here."""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from videogen.config import read_environment
from videogen.errors import bad
from videogen.pocket.distil_options import DEFAULTS, DistilOptions
from videogen.source import find_model

_HELP = {
    "forwards": "forwards of the adapter (%(default)s)",
    "teacher": "forwards of the model it learns from (%(default)s)",
    "warp": "multiplies both shifts of the folder: where on the path the steps lie; 0 tries some on the undistilled model (%(default)s)",
    "rank": "of attention, feed-forward and heads (%(default)s)",
    "adaln_rank": "of the modulation; 0 leaves it alone (%(default)s)",
    "seconds": "for trajectories, training and looks, after loading (%(default)s)",
    "deadline": "end by this moment (seconds since 1970)",
    "steps": "this many steps a stage in place of the clock",
    "bank": "share of the time for the teacher's trajectories (%(default)s)",
    "rollout": "share of the training time on the student's own states (%(default)s)",
    "short": "share of the trajectories' time for 39-frame clips (%(default)s)",
    "large": "share of the other trajectories at 256x144 (%(default)s)",
    "anchor": "weight of the states on the way in roll-outs (%(default)s)",
    "rate": "learning rate of the regression (%(default)s)",
    "rollout_rate": "learning rate of the roll-outs (%(default)s)",
    "row_budget": "packed rows a step (%(default)s)",
    "dmd": "seconds of distribution matching at the end (%(default)s)",
    "clips": "rendered clips that give requests and pictures (%(default)s)",
    "seed": "(%(default)s)",
}


def add_distil(inner: Any) -> None:
    """Register the sub-command."""
    parser = inner.add_parser("distil", help="train a few-step adapter of a pocket-h3 folder (made for one GPU; --smoke for a CPU)")
    parser.add_argument("--folder", "--model", default="pocket", help="the model to distil: pocket or a folder (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter, the log and the checkpoint")
    for name, text in _HELP.items():
        default = DEFAULTS[name]
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=text)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--smoke", action="store_true", help="toy sizes")
    parser.add_argument("--compile", action="store_true", help="compile the blocks (takes half a minute, then steps are faster)")
    parser.set_defaults(run=run_distil, verbose=False, quiet=False)


def run_distil(args: argparse.Namespace) -> int:
    """Distil and say what came out; exit code 0."""
    source = find_model(args.folder, offline=read_environment().offline)
    if source.weights != "pretrained":
        raise bad("lora distil --folder", args.folder, "a folder with weights", "name pocket or a trained folder")
    given = {name: getattr(args, name) for name in (*DEFAULTS, "out")}
    options = DistilOptions(folder=source.folder, **given)

    from videogen.pocket.distil import distil

    logging.getLogger("videogen").setLevel(logging.INFO)
    report = distil(options)
    print(f"contract  {json.dumps(report['contract'])}")
    size, gap = report["bytes"] / 1e6, report["rounding"]
    print(f"wrote     {report['file']}: {size:.2f} MB, read back, updates within {gap:.2g} of the trained ones")
    return 0
