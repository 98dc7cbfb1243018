"""Our step cache beside diffusers' own, on the same requests: loss against the share of steps computed. `python -m eval.peers --help`.

Every clip runs alone in the loop with the real class around it; text, decoding and losses are done in batches. Resumable.
"""

import argparse
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caches.prior import Prior
from eval.batched_loop import Group, decode, denoise, prepare
from eval.batched_loss import parts_of
from eval.cache_cases import cases_of
from eval.cache_loss import Tolerances, loss
from eval.losses import Losses, questions
from eval.peer_methods import Scope, counting, described, methods
from eval.peers_plot import curve_svg
from eval.quality_cases import Case, Shape, shard_of
from eval.stats import bootstrap_mean
from videogen.config import DEVICES, DTYPES, Recipe
from videogen.jobs.plan import parse_size
from videogen.jobs.run import write_json, write_text
from videogen.pipeline import Pipeline, open_pipeline
from videogen.priors import open_prior

logger = logging.getLogger(__name__)

SCHEMA = "videogen.peers/3"
COMPARED_AT = (0.35, 0.4, 0.45, 0.5)  # shares of steps computed
DRAWS, USABLE = 2000, 0.9  # of prompts; the share of draws that must reach a share of steps, else no interval
OURS = "videogen"


class Requests:
    """The requests of a comparison with their uncached clips, prepared and rendered once."""

    def __init__(self, pipeline: Pipeline, cases: Sequence[Case]) -> None:
        pipe = pipeline.load(cases[0].request.workflow)
        self.groups = {case.name: Group(pipe, [prepare(pipeline, case)]) for case in cases}
        self.frames, self.sound = self._decoded([denoise(group) for group in self.groups.values()])

    def _decoded(self, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        video, audio = (torch.cat(part) for part in zip(*rows))
        return decode(next(iter(self.groups.values())), video, audio)

    def measure(self, scope: Scope, strength: float, losses: Losses) -> None:
        """Every request under one method at one strength; each gets a fresh cache."""
        rows, shares = [], []
        for group in self.groups.values():
            cache = scope(group, strength)
            with counting(group.transformer) as count, cache:
                rows.append(denoise(group))
            shares.append(count[0] / len(group.state.get("timesteps")))
        found = parts_of(*self._decoded(rows), self.frames, self.sound)
        for name, share, parts in zip(self.groups, shares, found):
            losses.add({"lam": strength, "case": name, "parts": parts, "reused": 1 - share})


def point(strength: float, losses: Losses, cases: Sequence[Case]) -> dict[str, Any]:
    """One point of a curve: mean share computed, mean loss in units of the default tolerances, mean of each part.

    `by_clip` has the first two of every case, in the cases' order.
    """
    rows = [losses.rows[strength, case.name] for case in cases]
    values = {"loss": [loss(row["parts"], Tolerances()) for row in rows]}
    values |= {name: [row["parts"][name] for row in rows] for name in rows[0]["parts"]}
    found = {name: bootstrap_mean(column) for name, column in values.items()}
    return {
        "strength": strength,
        "computed": 1 - sum(row["reused"] for row in rows) / len(rows),
        "clips": len(rows),
        "by_clip": {"computed": [1 - row["reused"] for row in rows], "loss": values["loss"]},
        **{name: {"mean": each.value, "low": each.low, "high": each.high} for name, each in found.items()},
    }


def loss_at(curve: Sequence[dict[str, Any]], share: float) -> float | None:
    """The mean loss where a curve computes this share of the steps, by a line between its points; None outside them."""
    return _read_off([(row["computed"], row["loss"]["mean"]) for row in curve], share)


def _read_off(points: Sequence[tuple[float, float]], share: float) -> float | None:
    for (x0, y0), (x1, y1) in pairwise(sorted(points)):
        if x0 <= share <= x1:
            return float(y0 if x1 == x0 else y0 + (y1 - y0) * (share - x0) / (x1 - x0))
    return None


def compared(curves: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """At equal shares computed: every method's loss, and ours over the best peer's with its interval over prompts.

    Ours has the warm-up that `ours(...)` is given in `eval.peer_methods`, 8 % of the steps, and not the shipped recipes' 16 %. The
    best peer is chosen again in every draw.
    """
    drawn = _drawn(curves)
    rows: list[dict[str, Any]] = []
    for share in COMPARED_AT:
        at = {name: loss_at(curve, share) for name, curve in curves.items()}
        known = [_ratio({name: _read_off(points, share) for name, points in draw.items()}) for draw in drawn]
        rows.append({"computed": share, "loss": at, "ours_over_best_peer": _ratio(at), "interval_95": _interval(known)})
    return rows


def _ratio(losses: Mapping[str, float | None]) -> float | None:
    """Ours over the best peer's; None where either is not known."""
    mine, theirs = losses.get(OURS), [value for name, value in losses.items() if value is not None and not name.startswith(OURS)]
    return mine / max(min(theirs), 1e-9) if mine is not None and theirs else None


def _drawn(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, list[tuple[float, float]]]]:
    """Every method's curve (share computed, loss) over prompts drawn with replacement, the same for all methods: they are paired."""
    clips = {len(row["by_clip"]["loss"]) for curve in curves.values() for row in curve}
    if len(clips) != 1:
        raise ValueError(f"clips of the curves: got {sorted(clips)}, expected the same requests for every point; measure again")
    picks = np.random.default_rng(0).integers(0, min(clips), (DRAWS, min(clips)))
    means = {
        name: [[np.asarray(row["by_clip"][what])[picks].mean(axis=1).tolist() for what in ("computed", "loss")] for row in curve]
        for name, curve in curves.items()
    }
    return [{name: [(x[k], y[k]) for x, y in points] for name, points in means.items()} for k in range(DRAWS)]


def _interval(ratios: Sequence[float | None]) -> list[float] | None:
    """The 2.5 and 97.5 percentiles of the draws; None where too many of them could not be compared."""
    known = [ratio for ratio in ratios if ratio is not None]
    return [float(np.quantile(known, q)) for q in (0.025, 0.975)] if len(known) >= USABLE * DRAWS else None


def slug(name: str) -> str:
    """A method's name as a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def compare(
    pipeline: Pipeline, cases: Sequence[Case], calibration: Case, out: Path, prior: Prior | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Every method's curve; losses are journalled, so that a stopped run keeps what it has."""
    table = methods(lambda: Group(pipeline.load(calibration.request.workflow), [prepare(pipeline, calibration)]), prior)
    calibrated = questions(pipeline, [calibration], {})
    requests: Requests | None = None  # nothing is rendered where everything is known
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, (scope, strengths) in table.items():
        asked = described(name, prior) | {"calibration": calibrated if name == "MagCache" else None}
        losses = Losses(out / f"{slug(name)}.losses.jsonl", questions(pipeline, cases, asked))
        for strength in strengths:
            if not all((strength, case.name) in losses.rows for case in cases):
                requests = requests or Requests(pipeline, cases)
                requests.measure(scope, strength, losses)
            row = point(strength, losses, cases)
            curves.setdefault(name, []).append(row)
            logger.info("%s %g: %.3f computed, loss %.3f", name, strength, row["computed"], row["loss"]["mean"])
    return curves


def main() -> None:
    """`python -m eval.peers`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--workflow", default="t2va")
    parser.add_argument("--steps", type=int, default=49)
    parser.add_argument("--size")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--prior", type=Path, help="a file of eval.cache_prior for our own arms")
    parser.add_argument("--shard", metavar="I/N", help="measure this share into the journals and stop")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    args = parser.parse_args()
    pipeline = open_pipeline(args.model, Recipe(dtype=args.dtype), device=args.device)
    shape = Shape(size=parse_size("--size", args.size) if args.size else None, frames=args.frames, steps=args.steps)
    cases = cases_of("report", args.prompts, args.workflow, shape, pipeline)
    calibration = cases_of("fit", 1, args.workflow, shape, pipeline)[0]
    args.out.mkdir(parents=True, exist_ok=True)
    prior = open_prior(args.prior).prior if args.prior else None
    if args.shard:
        compare(pipeline, shard_of(cases, args.shard), calibration, args.out, prior)
        return
    curves = compare(pipeline, cases, calibration, args.out, prior)
    stratum = pipeline.stratum(pipeline.family.resolve(cases[0].request, pipeline.recipe))
    told = {
        "dtype": stratum.dtype,
        "device": stratum.device,
        "steps": stratum.steps,
        "canvas": stratum.canvas,
        "workflow": stratum.workflow,
    }
    report = {"schema": SCHEMA, "model": pipeline.source.record(), "stratum": told, "clips": len(cases)}
    write_json(args.out / "peers.json", report | {"curves": curves, "compared": compared(curves)})
    write_text(args.out / "peers.svg", curve_svg(curves))


if __name__ == "__main__":
    main()
