"""Whether certificates keep their promise on requests neither fit nor calibration saw: `python -m eval.cache_heldout`."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from caches.calibrate import clopper_pearson, is_violation
from caches.certificate import Certificate
from eval.batched_engine import Batch, measure
from eval.cache_cases import cases_of
from eval.cache_loss import Tolerances, loss
from eval.calibration import Goal, walk
from eval.losses import Losses, questions, settings_of
from eval.quality_cases import Case, Shape, shard_of
from videogen.certificates import covered_by, open_certificate
from videogen.config import DEVICES, Recipe, StepCache
from videogen.errors import bad
from videogen.jobs.run import write_json
from videogen.pipeline import Pipeline, open_pipeline
from videogen.recipes import find_recipe

logger = logging.getLogger(__name__)

SCHEMA = "videogen.cache-heldout/1"


def check_stratum(certificate: Certificate, name: str, pipeline: Pipeline, case: Case) -> None:
    """Raises RequestError when the clips to render would belong to another stratum than the certificate's."""
    here = pipeline.stratum(pipeline.family.resolve(case.request, pipeline.recipe))
    if differences := certificate.fingerprint.differences(replace(here, parallel=certificate.fingerprint.parallel)):
        raise bad(f"certificate {name}", "; ".join(differences), "the stratum of the clips rendered here", "calibrate it again")


def recipe_of(certificate: Certificate) -> Recipe:
    """What was calibrated, without its cache: the exact recipe in the certificate's arithmetic, or for batches the plain one."""
    dtype, _, products = certificate.fingerprint.dtype.partition(", ")
    if certificate.fingerprint.parallel != "1":
        return Recipe(dtype=dtype)
    exact = find_recipe("exact")
    return replace(exact, dtype=dtype, savings=replace(exact.savings, matmul="bfloat16" if products else "model"))


def shape_of(certificate: Certificate) -> Shape:
    """Canvas, length and steps of the certificate's stratum."""
    width, height, frames = (int(part) for part in certificate.fingerprint.canvas.split("x"))
    return Shape(size=(width, height), frames=frames, steps=certificate.fingerprint.steps)


def fill(pipeline: Pipeline, cases: Sequence[Case], certificate: Certificate, losses: Losses) -> None:
    """Measure what is lacking, as the certificate's clips were computed."""

    def tell(text: str) -> None:
        logger.info("%s", text)

    parallel, options = certificate.fingerprint.parallel, replace(covered_by(certificate, StepCache()), certificates=())
    if parallel == Batch().parallel:
        measure(pipeline, cases, [(options, losses)], Batch(), tell)
    elif parallel == "1":
        goal = Goal((certificate.lam,), certificate.alpha, certificate.delta, Tolerances(**certificate.tolerances), options)
        walk(pipeline, cases, goal, losses, tell)
    else:
        raise bad("certificate's parallel", parallel, f"1 or {Batch().parallel}", "calibrate it again with this version")


def judged(certificate: Certificate, cases: Sequence[Case], losses: Losses) -> dict[str, Any]:
    """The share of clips that lose too much, with its exact interval, against what was promised."""
    rows = [losses.rows[certificate.lam, case.name] for case in cases]
    values = [loss(row["parts"], Tolerances(**certificate.tolerances)) for row in rows]
    violations = sum(map(is_violation, values))
    low, high = clopper_pearson(violations, len(values))
    return {
        "promise": certificate.promise,
        "stratum": certificate.to_plain()["fingerprint"],
        "lambda": certificate.lam,
        "alpha": certificate.alpha,
        "tolerances": dict(certificate.tolerances),
        "clips": len(values),
        "violations": violations,
        "share": violations / len(values),
        "clopper_pearson_95": [low, high],
        "is_within_alpha": violations / len(values) <= certificate.alpha,
        "mean_reused": float(np.mean([row["reused"] for row in rows])),
        "loss_quantiles": {f"q{100 * q:g}": float(np.quantile(values, q)) for q in (0.5, 0.9, 0.95, 0.99)},
    }


def main() -> None:
    """`python -m eval.cache_heldout`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--certificate", type=Path, nargs="+", required=True)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--clips", type=int, default=512)
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--shard", metavar="I/N", help="measure this share into the journals and stop")
    parser.add_argument("--out", type=Path, default=Path("runs/cache-heldout"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"schema": SCHEMA, "certificates": {}}
    pipelines: dict[str, Pipeline] = {}
    for path in args.certificate:
        certificate = open_certificate(path)
        kind = f"{certificate.fingerprint.dtype} {certificate.fingerprint.parallel}"
        pipeline = pipelines.setdefault(kind, open_pipeline(args.model, recipe_of(certificate), device=args.device))
        cases = cases_of("held-out", args.clips, certificate.fingerprint.workflow, shape_of(certificate), pipeline)
        check_stratum(certificate, path.name, pipeline, cases[0])
        asked = settings_of(covered_by(certificate, StepCache()))
        wanted = questions(pipeline, cases, asked, certificate.fingerprint.parallel)
        losses = Losses(args.out / f"{path.stem}.losses.jsonl", wanted)
        fill(pipeline, shard_of(cases, args.shard) if args.shard else cases, certificate, losses)
        if not args.shard:
            report["certificates"][path.name] = found = judged(certificate, cases, losses)
            told = f"{found['violations']} of {found['clips']}, {found['clopper_pearson_95']}, alpha {found['alpha']}"
            logger.info("%s: %s lose more than promised", path.name, told)
    if not args.shard:
        write_json(args.out / "cache-heldout.json", report)


if __name__ == "__main__":
    main()
