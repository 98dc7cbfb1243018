"""`videogen calibrate`: the largest lambda of the step cache that a stated promise allows, as a certificate file."""

import argparse
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from caches.calibrate import clips_needed
from caches.certificate import Fingerprint
from caches.prior import Prior
from eval.batched_engine import Batch, measure
from eval.cache_cases import cases_of
from eval.cache_loss import Tolerances
from eval.cache_prior import measure_prior, write_prior
from eval.calibration import Goal, certify, journal, measure_all, stratum_of, walk
from eval.quality_cases import Case, Shape, read_cases, shard_of
from videogen.config import DEVICES, DTYPES, Environment, StepCache
from videogen.errors import RequestError, bad
from videogen.jobs.plan import parse_size
from videogen.jobs.run import write_text
from videogen.pipeline import Pipeline, open_pipeline
from videogen.priors import ORDER, STREAK, open_prior, prior_text, with_prior
from videogen.recipes import find_recipe

logger = logging.getLogger(__name__)

LAMBDAS = "0.005,0.01,0.015,0.02,0.03,0.04,0.06"
CLIPS, PRIOR_CLIPS = 52, 4
_ELSE = "choose another --output, or pass --overwrite"


def add_calibrate(commands: Any, environment: Environment) -> None:
    """Register the sub-command."""
    del environment
    tolerances, cache = Tolerances(), StepCache()
    parser = commands.add_parser("calibrate", help="certify the step cache", allow_abbrev=False)
    parser.add_argument("--model", default="pocket", metavar="NAME")
    parser.add_argument("--workflow", default="t2va", choices=("t2va", "fl2va", "ref2va"))
    told = "a job file whose first --clips lines are rendered, instead of the fixed requests of pocket-h3's world"
    parser.add_argument("--prompts", metavar="FILE", help=told)
    parser.add_argument("--size", metavar="WxH")
    parser.add_argument("--frames", type=int, metavar="N")
    parser.add_argument("--steps", type=int, metavar="N")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    told = f"default: {CLIPS} (2 violations allow alpha 0.1); with --prior-only {PRIOR_CLIPS}"
    parser.add_argument("--clips", type=int, metavar="N", help=told)
    told = "leave out the first N fixed requests: a second test needs clips that the first did not see, and its delta adds to the first's"
    parser.add_argument("--skip", type=int, default=0, metavar="N", help=told)
    parser.add_argument("--alpha", type=float, default=0.1, help="share of new clips that may lose too much (default: %(default)s)")
    parser.add_argument("--delta", type=float, default=0.1, help="chance that the calibration misleads (default: %(default)s)")
    parser.add_argument(
        "--engine", choices=("pipeline", "batched"), default="pipeline", help="batched: many clips at once, a stratum of its own"
    )
    parser.add_argument("--recipe", default="exact", metavar="NAME", help="what the cache is laid over (default: %(default)s)")
    parser.add_argument("--shard", metavar="I/N", help="measure this share of the clips into the journal and stop")
    told = "how residuals of the schedule's steps resemble each other: measure (on clips of the fit part), none, a file, or auto"
    parser.add_argument("--prior", default="auto", metavar="auto|measure|none|FILE", help=f"{told} (measure for fixed requests of H3)")
    told = "measure the prior alone, for `render --cache-lambda F --cache-prior FILE`: a few clips, and no promise"
    parser.add_argument("--prior-only", action="store_true", help=told)
    for name, what in (
        ("video", "predict reused video from"),
        ("audio", "predict reused audio from"),
        ("drift", "foretell the probe from"),
    ):
        told = f"{what} so many computed steps and one more (default: {ORDER} with a prior, else {getattr(cache, f'{name}_order')})"
        parser.add_argument(f"--{name}-order", type=int, metavar="N", help=told)
    told = f"most reused in a row (default: {STREAK} with a prior, else {cache.max_streak})"
    parser.add_argument("--max-streak", type=int, metavar="N", help=told)
    parser.add_argument("--warm-up", type=float, default=cache.warm_up, metavar="F", help="share computed first (default: %(default)s)")
    parser.add_argument("--lambdas", default=LAMBDAS, metavar="F,F,...", help="walked in this order, default: %(default)s")
    for name, unit in (("video", "1 - SSIM of the worst frames"), ("motion", "grey levels"), ("spectrum", "dB"), ("level", "dB")):
        parser.add_argument(f"--{name}", type=float, default=getattr(tolerances, name), help=f"tolerance, {unit} (default: %(default)s)")
    parser.add_argument("--output", "-o", default="certificate.json", metavar="FILE")
    told = "replace the certificate; losses and a prior measured for the very same question are kept and used"
    parser.add_argument("--overwrite", action="store_true", help=told)
    parser.set_defaults(run=run, verbose=False, quiet=False)


def _goal(args: argparse.Namespace) -> Goal:
    try:
        lambdas = tuple(float(part) for part in args.lambdas.split(","))
        fewest = clips_needed(args.alpha, args.delta)
    except ValueError as error:
        raise bad(
            "--lambdas, --alpha or --delta", (args.lambdas, args.alpha, args.delta), "numbers, rates between 0 and 1", str(error)
        ) from None
    if args.clips < fewest:
        raise bad("--clips", args.clips, f"at least {fewest} for alpha {args.alpha:g} at delta {args.delta:g}", "measure more clips")
    parallel = Batch().parallel if args.engine == "batched" else "1"
    tolerances = Tolerances(args.video, args.motion, args.spectrum, args.level)
    return Goal(lambdas, args.alpha, args.delta, tolerances, _options(args, None), parallel)


def _options(args: argparse.Namespace, prior: Prior | None) -> StepCache:
    """The cache to certify: what was asked for, else what suits the prior or its absence."""
    usual = StepCache(warm_up=args.warm_up) if prior is None else with_prior(prior, args.warm_up)
    asked = {name: getattr(args, name) for name in ("max_streak", "video_order", "audio_order", "drift_order")}
    return replace(usual, **{name: value for name, value in asked.items() if value is not None})


def _prior(args: argparse.Namespace, shape: Shape, pipeline: Pipeline, kept: Path) -> Prior | None:
    """The prior asked for; one measured is kept in a file for the other shards.

    Raises RequestError for a file that is none, and where there is nothing to measure one on.
    """
    if args.prior == "none" or (args.prior == "auto" and (args.prompts or pipeline.source.is_wan)):
        return None
    if args.prior in ("auto", "measure"):
        if args.prompts or pipeline.source.is_wan:
            raise bad("--prior", args.prior, "a model of H3 and its fixed requests", "pass a file, or none")
        fit = cases_of("fit", PRIOR_CLIPS, args.workflow, shape, pipeline)
        return _kept_prior(kept, pipeline, fit, args.overwrite)
    return open_prior(Path(args.prior).expanduser(), "auto, measure, none or a file that can be read").prior


def _kept_prior(path: Path, pipeline: Pipeline, cases: Sequence[Case], overwrite: bool) -> Prior:
    """The prior of the cases from its file, else measured and put there: every shard must take the same one.

    Raises RequestError when the file holds something else that may not be overwritten.
    """
    of = stratum_of(pipeline, cases, "1")
    if path.exists():
        if prior := _matching(path, of, len(cases), overwrite):
            return prior
        path.unlink(missing_ok=True)  # now, not after measuring: by then it may be another shard's new one
    text, part = prior_text(measure_prior(pipeline, cases), of), path.with_name(f"{path.name}.{uuid4().hex[:8]}")
    write_text(part, text)
    try:
        os.link(part, path)
    except FileExistsError:
        logger.info("%s: another process was faster; its prior is taken", path)
    except OSError:  # a file system without hard links
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    prior = _matching(path, of, len(cases), False)
    assert prior is not None
    return prior


def _matching(path: Path, of: Fingerprint, clips: int, overwrite: bool) -> Prior | None:
    """The file's prior if it is of this stratum and so many clips; None when it is not and may be overwritten, else RequestError."""
    try:
        known = open_prior(path, what="kept prior")
        if known.of == of and known.prior.clips == clips:
            return known.prior
        differing = known.of.differences(of) if known.of else ["no stratum"]
        raise bad("kept prior", f"{path.name} ({'; '.join(differing) or known.prior.clips})", f"{clips} clips of this stratum", _ELSE)
    except RequestError:
        if overwrite:
            return None
        raise


def _cases(args: argparse.Namespace, shape: Shape, pipeline: Pipeline) -> list[Case]:
    """The requests to calibrate on: the fixed ones, or a file's. Raises RequestError where there are too few."""
    if pipeline.source.is_wan and args.engine == "batched":
        raise bad("--engine", args.engine, "the pipeline: a batch knows MiniMax-H3's loop alone", "drop --engine")
    if not args.prompts:
        if pipeline.source.is_wan and args.workflow != "t2va":
            raise bad("--workflow", args.workflow, "t2va (from text alone) for Wan", "pass a job file with pictures as --prompts")
        try:
            return cases_of("calibrate", args.skip + args.clips, args.workflow, shape, pipeline)[args.skip :]
        except RequestError as error:
            if args.skip and str(error).startswith("--clips:"):
                got = f"{args.skip} + {args.clips}"
                raise bad("--skip plus --clips", got, "at most the calibrate part", f"lower one; {error}") from None
            raise
    cases = read_cases(args.prompts, None, shape, pipeline.family, pipeline.recipe)
    if len(cases) < args.clips:
        raise bad("--prompts", f"{len(cases)} requests", f"at least --clips {args.clips}", "add lines, or ask for fewer clips")
    cases = cases[: args.clips]
    resolved = [pipeline.family.resolve(case.request, pipeline.recipe) for case in cases]
    if len({(each.prompt, tuple((i.role, i.sha256) for i in each.inputs)) for each in resolved}) < len(cases):
        logger.warning(
            "--prompts: some requests differ in their seed alone; seeds of one prompt are not independent, as the promise assumes"
        )
    return cases


def _measure_prior(args: argparse.Namespace, shape: Shape, pipeline: Pipeline, output: Path) -> int:
    """The prior alone, on fixed requests of the fit part or a file's first ones."""
    if pipeline.source.is_wan or args.engine == "batched" or args.shard:
        raise bad("--prior-only", "Wan, --engine batched or --shard", "a model of H3, in one process", "drop them")
    cases = _cases(args, shape, pipeline) if args.prompts else cases_of("fit", args.clips, args.workflow, shape, pipeline)
    stratum_of(pipeline, cases, "1")  # before anything is rendered
    for line in write_prior(output, measure_prior(pipeline, cases), pipeline, cases[0]):
        args.say(line)
    return 0


def run(args: argparse.Namespace) -> int:
    """Measure, and write the certificate; exit code 0, or 4 when no lambda could be certified."""
    args.clips = args.clips or (PRIOR_CLIPS if args.prior_only else CLIPS)
    if args.skip < 0 or (args.skip and (args.prompts or args.prior_only)):
        raise bad("--skip", args.skip, "a number of the fixed requests that are calibrated on", "drop it, or leave lines out of the file")
    goal, output = None if args.prior_only else _goal(args), Path(args.output).expanduser()
    if output.exists() and not args.overwrite:
        raise bad("--output", str(output), "a new file", _ELSE)
    if args.recipe != "plain" and args.engine == "batched":
        raise bad(
            "--engine", args.engine, "the pipeline for a recipe other than plain", "add --recipe plain: a batch knows none of its savings"
        )
    pipeline = open_pipeline(args.model, replace(find_recipe(args.recipe), dtype=args.dtype), device=args.device)
    size = parse_size("--size", args.size) if args.size else None
    shape = Shape(size=size, frames=args.frames, steps=args.steps)
    if goal is None:
        return _measure_prior(args, shape, pipeline, output)
    cases = _cases(args, shape, pipeline)
    stratum_of(pipeline, cases, goal.parallel)  # before anything is rendered
    goal = replace(goal, options=_options(args, _prior(args, shape, pipeline, output.with_suffix(".prior.json"))))
    losses = journal(output.with_suffix(".losses.jsonl"), pipeline, cases, goal)

    def tell(text: str) -> None:
        logger.info("%s", text)

    if args.engine == "batched":
        plans = [(replace(goal.options, lam=lam), losses) for lam in goal.lambdas]
        measure(pipeline, shard_of(cases, args.shard) if args.shard else cases, plans, Batch(), tell)
    elif args.shard:
        measure_all(pipeline, shard_of(cases, args.shard), goal, losses)
    if args.shard:
        return 0
    verdict = walk(pipeline, cases, goal, losses, tell)
    if verdict.lam == 0:
        args.say(f"no lambda certified: {verdict.message}")
        return 4
    certificate = certify(pipeline, cases, goal, verdict, losses)
    write_text(output, certificate.to_json())
    args.say(f"{output}: lambda {certificate.lam:g}, {certificate.mean_reused:.1%} of the steps reused; {certificate.promise}")
    return 0
