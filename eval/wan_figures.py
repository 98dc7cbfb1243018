"""Seconds of Wan clips on random weights of the real size: dense, sparse, cached and all of it, in one process on one set of weights.

`python -m eval.wan_figures --plan dense:6,all:20 --out DIR`: after a clip of 2 steps at the same shape, each arm renders one of so many
steps. Drift and attention errors mean nothing on random weights: the cache replays a fixed list, reusing 10 of 20 steps of each stream,
and only the arm `guarded` keeps the guard of sparse attention. `fused` is `dense` with fused kernels, `float8` with 8-bit products,
`all-fused` and `all-8` are `all` with kernels and with both. A dense clip of fewer steps is scaled by its denoising time.
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.arms import open_arms
from eval.cases import Workload, find_workload, make_request
from eval.clip_check import broken_because
from eval.fingerprint import fingerprint
from eval.report_folder import check_free, make_folder
from eval.timing import WallClock, synchronizer
from videogen.attention.options import SparseAttention
from videogen.config import DEVICES, Recipe, StepCache
from videogen.errors import EnvironmentFault, bad, say
from videogen.jobs.run import write_json
from videogen.pipeline import Pipeline
from videogen.recipes import EXACT

logger = logging.getLogger(__name__)

SCHEMA = "videogen.wan-figures/1"
RESULT = "wan_figures.json"
WORKLOAD = "mlperf-wan22-t2v"
WARM_STEPS = 2
HALF = StepCache(lam=1e9, max_streak=2, warm_up=0.15)  # C C C R R C R, then C C R R C R R C R R C R C at 7 + 13 steps


def arms(backend: str, budget: float, **sparse: Any) -> dict[str, Recipe]:
    """The recipes by arm; `backend` attends wherever nothing sparse does."""
    savings = replace(EXACT, attention=backend, kernels=False)
    fused, eight = replace(savings, kernels=True), replace(savings, matmul="float8")
    free = SparseAttention(budget=budget, guard=None, **sparse)
    return {
        "dense": Recipe("dense", savings=savings),
        "cache": Recipe("cache", savings=savings, cache=HALF),
        "sparse": Recipe("sparse", savings=savings, sparse=free),
        "guarded": Recipe("guarded", savings=savings, sparse=SparseAttention(budget=budget, **sparse)),
        "all": Recipe("all", savings=savings, sparse=free, cache=HALF),
        "fused": Recipe("fused", savings=fused),
        "float8": Recipe("float8", savings=eight),
        "all-fused": Recipe("all-fused", savings=fused, sparse=free, cache=HALF),
        "all-8": Recipe("all-8", savings=replace(fused, matmul="float8"), sparse=free, cache=HALF),
    }


def parse_plan(text: str, known: Sequence[str]) -> list[tuple[str, int]]:
    """`dense:6,all:20` as arms and steps. Raises RequestError."""
    found = []
    for part in text.split(","):
        name, _, steps = part.partition(":")
        if name not in known or not steps.isdecimal() or int(steps) < 1:
            raise bad("--plan", part, f"ARM:STEPS with an arm of {', '.join(known)}", "such as dense:6,all:20")
        found.append((name, int(steps)))
    return found


def clip_row(pipeline: Pipeline, workload: Workload, index: int, wait: Callable[[], None]) -> dict[str, Any]:
    """One clip rendered (not encoded): its seconds, what the parts did, and the seconds at the workload's own steps where that follows."""
    clock = WallClock()
    wait()
    began = clock.now()
    result = pipeline.render(make_request(workload, index))
    wait()
    seconds, record = clock.now() - began, result.record
    forwards, reused, denoise = record["forwards"], record["cache"]["reused"], record["stages_s"]["denoise"]
    whole = find_workload(WORKLOAD).steps / workload.steps
    return {
        "steps": workload.steps,
        "seconds": seconds,
        "stages_s": record["stages_s"],
        "calls": {"all": forwards, "reused": reused},
        "denoise_s_per_computed_call": denoise / (forwards - reused),
        "seconds_at_workload_steps": seconds - denoise + denoise * whole if not reused or whole == 1 else None,
        "peak_memory_mb": record["peak_memory_mb"],
        "savings": record["savings"],
        "attention": record["attention"],
        "broken": broken_because(result, frames=workload.frames, size=workload.size, has_sound=False),
    }


def measure(pipelines: dict[str, Pipeline], plan: Sequence[tuple[str, int]], workload: Workload) -> Iterator[dict[str, Any]]:
    """A row for every entry of the plan, each after a short clip of its arm at the same shape."""
    for index, (name, steps) in enumerate(plan):
        pipeline = pipelines[name]
        wait = synchronizer(pipeline.device)
        clip_row(pipeline, replace(workload, steps=WARM_STEPS), 2 * index, wait)
        row = {"arm": name} | clip_row(pipeline, replace(workload, steps=steps), 2 * index + 1, wait)
        logger.info("%s: %d steps in %.1f s, %s", name, steps, row["seconds"], row["calls"])
        yield row


def main(argv: Sequence[str] | None = None) -> None:
    """The rows go to `DIR/wan_figures.json`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--plan", default="dense:6,all:20", metavar="ARM:STEPS[,...]", help="default: %(default)s")
    parser.add_argument("--backend", default="_native_cudnn", help="of diffusers, for dense attention (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=0.25, help="share of the key blocks that sparse attention keeps (%(default)s)")
    parser.add_argument("--model", default=find_workload(WORKLOAD).model)
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args(argv)
    recipes, workload = arms(args.backend, args.budget), find_workload(WORKLOAD)
    plan = parse_plan(args.plan, [*recipes])
    check_free(args.out, RESULT, overwrite=args.overwrite, option="--out")
    pipelines = open_arms(args.model, {name: recipes[name] for name, _ in plan}, args.device)
    if next(iter(pipelines.values())).device.type != "cuda":
        raise EnvironmentFault(say(f"workload {WORKLOAD}", "no CUDA device", "a GPU", "run it where there is one"))
    clock = WallClock()
    began = clock.now()
    next(iter(pipelines.values())).load(workload.workflow)
    report: dict[str, Any] = {"schema": SCHEMA, "workload": WORKLOAD, "model": args.model, "backend": args.backend, "budget": args.budget}
    report |= {"fingerprint": fingerprint(), "load_s": clock.now() - began, "rows": []}
    make_folder(args.out)
    for row in measure(pipelines, plan, workload):
        report["rows"].append(row)
        write_json(args.out / RESULT, report)  # what is measured stays, whatever ends the next


if __name__ == "__main__":
    main()
