"""Whether a cached clip is as much faster as its computed steps foretell: `python -m eval.cache_wall`.

One request is rendered in full and cached, A B B A, in one process, begin to end: encoding the file is in, loading weights is not.
Two forecasts are held against what the cached clip took, both from the full clip of the same pair: its fixed stages and the share
of its steps that the cache computes, reused steps counting nothing; and the same with what a reused step was measured to cost.
"""

import argparse
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from eval.arms import in_full
from eval.cache_cases import cases_of
from eval.fingerprint import fingerprint
from eval.quality_cases import Case, Shape
from eval.report_folder import check_free, make_folder
from eval.stats import Interval, paired_ratio
from eval.throughput import arm_order
from eval.timing import Clock, CpuClock, WallClock, synchronizer
from videogen.certificates import open_certificate
from videogen.config import DEVICES, Recipe, StepCache
from videogen.errors import bad
from videogen.jobs.plan import parse_size
from videogen.jobs.run import write_json, write_result
from videogen.media import Encoding
from videogen.pipeline import Pipeline, open_pipeline
from videogen.progress import Event
from videogen.recipes import find_recipe

logger = logging.getLogger(__name__)

SCHEMA, RESULT = "videogen.cache-wall/1", "cache-wall.json"
TARGET = 0.05
ARMS = ("in full", "cached")
FORECASTS = ("computed steps alone", "computed and reused steps")
CLOCKS: Mapping[str, Clock] = {"wall": WallClock(), "cpu": CpuClock()}


@dataclass(frozen=True, slots=True)
class Timed:
    """One clip on one clock, in seconds: begin to end, its denoising loop, and the loop's steps in order."""

    total_s: float
    denoise_s: float
    steps_s: tuple[float, ...]

    @property
    def fixed_s(self) -> float:
        """All that no step cache changes."""
        return self.total_s - self.denoise_s

    def foretold_s(self, computed: float, reused_step_s: float = 0.0) -> float:
        """What this clip, rendered in full, would take with this share of its steps computed."""
        return self.fixed_s + computed * self.denoise_s + (1 - computed) * len(self.steps_s) * reused_step_s


def time_clip(pipeline: Pipeline, case: Case, folder: Path) -> tuple[dict[str, Timed], list[bool]]:
    """Render and write one clip; its times by clock, and which steps were reused."""
    wait, marks = synchronizer(pipeline.device), list[tuple[Event, dict[str, float]]]()

    def read() -> dict[str, float]:
        wait()
        return {name: clock.now() for name, clock in CLOCKS.items()}

    began = read()
    result = pipeline.render(replace(case.request, seed=case.seed), on_event=lambda event: marks.append((event, read())))
    path = folder / "clip.mp4"
    write_result(path, result, Encoding(), "")
    ended = read()
    path.unlink()
    actions = [step["action"] == "reuse" for step in result.record["cache"]["steps"]] or [False] * int(result.record["forwards"])
    return {name: _timed(name, began, marks, ended) for name in CLOCKS}, actions


def _timed(clock: str, began: Mapping[str, float], marks: Sequence[tuple[Event, Mapping[str, float]]], ended: Mapping[str, float]) -> Timed:
    first = next(k for k, (event, _) in enumerate(marks) if event.phase == "denoise")
    after = next(k for k, (event, _) in enumerate(marks) if k > first and event.phase != "denoise")
    steps = [at[clock] for event, at in marks[first:after] if event.total]  # the loop's begin, and each step's end
    times = tuple(later - earlier for earlier, later in pairwise(steps))
    return Timed(ended[clock] - began[clock], marks[after][1][clock] - marks[first][1][clock], times)


def verdict(gap: Interval) -> str:
    """Whether the measured time is within the target of what was foretold, as far as the interval can tell."""
    if gap.low is None or gap.high is None:
        return "undecided: no interval"
    if gap.low >= 1 - TARGET and gap.high <= 1 + TARGET:
        return "yes"
    return "no" if gap.low > 1 + TARGET or gap.high < 1 - TARGET else "undecided: measure more pairs"


def figures(full: Sequence[Timed], cached: Sequence[Timed], reused: Sequence[bool]) -> dict[str, Any]:
    """What the pairs come to on one clock. A forecast's `gap` is measured over foretold seconds of the cached clip: 1 is as foretold."""
    computed = 1 - sum(reused) / len(reused)

    def step_s(clips: Sequence[Timed], which: bool) -> float:
        return median(seconds for clip in clips for seconds, is_reused in zip(clip.steps_s, reused) if is_reused is which)

    whole, took = [clip.total_s for clip in full], [clip.total_s for clip in cached]
    forecasts = {}
    for name, cost_s in zip(FORECASTS, (0.0, step_s(cached, True))):
        expected = [clip.foretold_s(computed, cost_s) for clip in full]
        gap = paired_ratio(took, expected)
        forecasts[name] = {"speed_up": paired_ratio(whole, expected).value, "gap": asdict(gap), "is_within_target": verdict(gap)}
    return {
        "speed_up": asdict(paired_ratio(whole, took)),
        "forecasts": forecasts,
        "fixed_s": {"in full": median(clip.fixed_s for clip in full), "cached": median(clip.fixed_s for clip in cached)},
        "step_ms": {
            "in full": 1e3 * step_s(full, False),  # those that the cached clip computes too
            "computed": 1e3 * step_s(cached, False),
            "reused": 1e3 * step_s(cached, True),
        },
    }


def run_pairs(arms: Mapping[str, Pipeline], case: Case, pairs: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Warm both arms up with one clip each, measure the pairs, and report.

    Raises RequestError when the cached clip is not the same at every turn, or reused nothing.
    """
    clips: dict[str, list[dict[str, Timed]]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory(prefix="videogen-wall-") as scratch:
        _, reused = time_clip(arms["cached"], case, Path(scratch))
        if not any(reused):
            raise bad("step cache", "no step reused", "some", "raise --cache-lambda, or choose more --steps")
        time_clip(arms["in full"], case, Path(scratch))
        for number, (pair, name) in enumerate(arm_order(ARMS)):
            if number == 2 * pairs:
                break
            timed, actions = time_clip(arms[name], case, Path(scratch))
            if name == "cached" and actions != reused:
                raise bad("step cache", "other decisions for the same request", "the same at every turn", "report this")
            clips[name].append(timed)
            tell(f"pair {pair + 1} of {pairs}, {name}: {timed['wall'].total_s:.2f} s")
    computed = 1 - sum(reused) / len(reused)
    full, cached = (clips[name] for name in ARMS)
    by_clock = {clock: figures([each[clock] for each in full], [each[clock] for each in cached], reused) for clock in CLOCKS}
    raw = {name: [{clock: asdict(timed) for clock, timed in each.items()} for each in own] for name, own in clips.items()}
    return {"pairs": pairs, "steps": len(reused), "computed": computed, "target": TARGET, "clocks": by_clock, "clips": raw}


def lines(report: Mapping[str, Any]) -> list[str]:
    """The report for the screen; a gap is of time, above 0 % for slower than foretold."""
    found = [f"{report['computed']:.1%} of {report['steps']} steps computed; {report['pairs']} pairs, A B B A"]
    for clock, own in report["clocks"].items():
        found.append(f"{clock}: measured {Interval(**own['speed_up']).text()} times as fast as in full")
        for name, forecast in own["forecasts"].items():
            gap = Interval(**forecast["gap"])
            bounds = "" if gap.low is None or gap.high is None else f" [{100 * (gap.low - 1):+.1f}, {100 * (gap.high - 1):+.1f}]"
            told = f"gap {100 * (gap.value - 1):+.1f} %{bounds}; within {TARGET:.0%}: {forecast['is_within_target']}"
            found.append(f"  by {name}: {forecast['speed_up']:.3f}, {told}")
        found.append("  ms a step: " + ", ".join(f"{name} {value:.1f}" for name, value in own["step_ms"].items()))
        found.append("  s of all else: " + ", ".join(f"{name} {value:.2f}" for name, value in own["fixed_s"].items()))
    return found


def _arms(args: argparse.Namespace) -> dict[str, Pipeline]:
    """Both arms over one set of weights, in the same arithmetic."""
    if (args.cache_lambda is None) == (args.certificate is None):
        raise bad("--cache-lambda and --certificate", (args.cache_lambda, args.certificate), "one of the two", "give one")
    given = StepCache(lam=args.cache_lambda) if args.certificate is None else StepCache(certificates=(open_certificate(args.certificate),))
    recipe: Recipe = find_recipe(args.recipe)
    cached = open_pipeline(args.model, replace(recipe, name=f"{recipe.name} cached", cache=given), device=args.device)
    return {"in full": in_full(cached), "cached": cached}


def main() -> None:
    """`python -m eval.cache_wall`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--recipe", default="exact")
    parser.add_argument("--workflow", default="t2va", choices=("t2va", "fl2va", "ref2va"))
    parser.add_argument("--size", default="160x96", metavar="WxH")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--cache-lambda", type=float, metavar="F")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="in place of a lambda")
    parser.add_argument("--pairs", type=int, default=6, help="clips of each arm; three at least give an interval (default: %(default)s)")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/cache-wall"))
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args()
    if args.pairs < 1:
        raise bad("--pairs", args.pairs, "at least 1", "change it")
    check_free(args.out, RESULT, overwrite=args.overwrite, option="--out")
    arms = _arms(args)
    shape = Shape(size=parse_size("--size", args.size), frames=args.frames, steps=args.steps)
    case = cases_of("report", 1, args.workflow, shape, arms["cached"])[0]
    report = run_pairs(arms, case, args.pairs, lambda text: logger.info("%s", text))
    for line in lines(report):
        logger.info("%s", line)
    asked = {"model": args.model, "recipe": args.recipe, "case": case.name, "size": args.size, "frames": args.frames}
    made = {"schema": SCHEMA, "asked": asked | {"lambda": args.cache_lambda, "certificate": args.certificate and args.certificate.name}}
    make_folder(args.out)
    write_json(args.out / RESULT, made | {"machine": fingerprint()} | report)


if __name__ == "__main__":
    main()
