"""What each lambda and order of extrapolation loses on the fit part, before anything is promised: `python -m eval.cache_fit`.

Its table decides the ladder of lambdas, the orders and the tolerances that a calibration on other clips then tests.
"""

import argparse
import logging
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from caches.prior import Prior
from eval.batched_engine import Batch, measure
from eval.cache_cases import cases_of
from eval.cache_loss import Tolerances, loss
from eval.losses import Losses, questions, settings_of
from eval.quality_cases import Case, Shape, shard_of
from videogen.config import DEVICES, DTYPES, Recipe, StepCache
from videogen.jobs.plan import parse_size
from videogen.jobs.run import write_json
from videogen.pipeline import open_pipeline
from videogen.priors import open_prior

logger = logging.getLogger(__name__)

SCHEMA = "videogen.cache-fit/1"
LAMBDAS = "0.005,0.01,0.015,0.02,0.03,0.04,0.06,0.08,0.12"
QUANTILES = (0.5, 0.9, 0.95, 0.99)


def settings(lambdas: str, orders: str, streaks: str, warm_ups: str, prior: Prior | None = None) -> list[StepCache]:
    """Every combination; orders are three digits: of video, of audio, of drift. A prior is for all of them."""
    every = product(warm_ups.split(","), streaks.split(","), orders.split(","), lambdas.split(","))
    found = []
    for warm_up, streak, digits, lam in every:
        video, audio, drift = (int(digit) for digit in digits)
        found.append(StepCache(float(lam), int(streak), video, audio, drift, float(warm_up), prior=prior))
    return found


def name_of(options: StepCache) -> str:
    """A setting without its lambda, as a file's name."""
    orders = f"{options.video_order}{options.audio_order}{options.drift_order}"
    return f"warm-up-{options.warm_up:g}-streak-{options.max_streak}-orders-{orders}{'-prior' if options.prior else ''}"


def journal(folder: Path, options: StepCache) -> Path:
    """Where losses of these orders and this streak are kept."""
    return folder / f"{name_of(options)}.losses.jsonl"


def row_of(options: StepCache, losses: Losses, cases: Sequence[Case]) -> dict[str, Any]:
    """One setting: the share of steps computed, and each part's mean and quantiles over the cases."""
    rows = [losses.rows[options.lam, case.name] for case in cases]
    parts = {name: np.asarray([row["parts"][name] for row in rows]) for name in rows[0]["parts"]}
    return {
        "lambda": options.lam,
        "warm_up": options.warm_up,
        "max_streak": options.max_streak,
        "video_order": options.video_order,
        "audio_order": options.audio_order,
        "drift_order": options.drift_order,
        "clips": len(rows),
        "loss": float(np.mean([loss(row["parts"], Tolerances()) for row in rows])),
        "computed": 1 - float(np.mean([row["reused"] for row in rows])),
        "parts": {
            name: {"mean": float(values.mean())} | {f"q{100 * q:g}": float(np.quantile(values, q)) for q in QUANTILES}
            for name, values in parts.items()
        },
    }


def main() -> None:
    """`python -m eval.cache_fit`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--workflow", default="t2va")
    parser.add_argument("--clips", type=int, default=48)
    parser.add_argument("--size")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lambdas", default=LAMBDAS)
    parser.add_argument("--orders", default="221,111,110,000", help="of video, audio and drift")
    parser.add_argument("--streaks", default="3", help="most reused in a row")
    parser.add_argument("--prior", type=Path, help="a file of eval.cache_prior: reused steps as it foretells them")
    parser.add_argument("--warm-ups", default="0.08", help="share of the steps computed first")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--shard", metavar="I/N", help="measure this share into the journals and stop")
    parser.add_argument("--out", type=Path, default=Path("runs/cache-fit"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pipeline = open_pipeline(args.model, Recipe(dtype=args.dtype), device=args.device)
    shape = Shape(size=parse_size("--size", args.size) if args.size else None, frames=args.frames, steps=args.steps)
    cases = cases_of("fit", args.clips, args.workflow, shape, pipeline)
    prior = open_prior(args.prior).prior if args.prior else None
    wanted = settings(args.lambdas, args.orders, args.streaks, args.warm_ups, prior)
    settled = {journal(args.out, options): settings_of(options) for options in wanted}
    kept = {path: Losses(path, questions(pipeline, cases, asked, Batch().parallel)) for path, asked in settled.items()}
    plans = [(options, kept[journal(args.out, options)]) for options in wanted]
    measure(pipeline, shard_of(cases, args.shard) if args.shard else cases, plans, Batch(), lambda text: logger.info("%s", text))
    if args.shard:
        return
    rows = [row_of(options, losses, cases) for options, losses in plans]
    write_json(
        args.out / "cache-fit.json", {"schema": SCHEMA, "model": pipeline.source.record(), "parallel": Batch().parallel, "rows": rows}
    )
    for (options, _), row in zip(plans, rows):
        worst = ", ".join(f"{name} {found['mean']:.3g} (95 %: {found['q95']:.3g})" for name, found in row["parts"].items())
        logger.info("%s lambda %g: %.3f computed, loss %.3f; %s", name_of(options), options.lam, row["computed"], row["loss"], worst)


if __name__ == "__main__":
    main()
