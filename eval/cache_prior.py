"""Measures the prior of a schedule on a few uncached clips: inner products of every two steps' residuals. `python -m eval.cache_prior`."""

import argparse
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from caches.policy import Action, Budget, Decision, History, Step, decide
from caches.prior import Gram, Prior, foretell
from caches.step_hook import Channel, State, replaced, watched
from eval.batched_loop import Group, denoise, grouped, prepare
from eval.cache_cases import cases_of
from eval.quality_cases import Case, Shape
from videogen.attention.select import MIN_ROWS
from videogen.config import DEVICES, DTYPES, StepCache
from videogen.families.h3_pipeline import LOOP
from videogen.jobs.plan import parse_size
from videogen.jobs.run import write_text
from videogen.pipeline import Pipeline, open_pipeline
from videogen.priors import CAREFUL_START, ORDER, STREAK, prior_text, steps_of
from videogen.recipes import find_recipe

logger = logging.getLogger(__name__)

ROWS = 1024  # of a channel's rows, evenly chosen: inner products of a whole residual are their mean
TOGETHER = 4  # short clips in one batch; of released size one fills a device
FORESEEN_AT = (0.01, 0.02, 0.03, 0.05)


class _Recorder(State):
    """A step cache that computes every step and keeps the residuals, by channel, of the probe and of the rest; each (B, rows, D)."""

    def __init__(self, channels: Mapping[str, Channel]) -> None:
        super().__init__(Budget(), channels)
        self.chosen = {name: channel.rows[:: max(1, len(channel.rows) // ROWS)] for name, channel in channels.items()}
        self.probes: dict[str, list[torch.Tensor]] = {name: [] for name in channels}
        self.rests: dict[str, list[torch.Tensor]] = {name: [] for name in channels}

    def look(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Keep the first block's residual; nothing is decided."""
        self._add(self.probes, before, after)
        self.decision = Decision(Action.COMPUTE, "off")

    def keep(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Keep the rest of the stack's residual."""
        self._add(self.rests, before, after)

    def _add(self, kind: dict[str, list[torch.Tensor]], before: torch.Tensor, after: torch.Tensor) -> None:
        for name, rows in self.chosen.items():
            kind[name].append((after - before).index_select(1, rows).float())


def products(steps: Sequence[torch.Tensor]) -> torch.Tensor:
    """Inner products (N, N) of N residuals, float64 sums of float32 products' rows."""
    table = torch.stack([step.flatten() for step in steps])
    parts = [part.double() @ part.double().T for part in torch.split(table, 1 << 20, dim=1)]
    return torch.stack(parts).sum(0).cpu()


def measure_prior(pipeline: Pipeline, cases: Sequence[Case]) -> Prior:
    """The prior of the cases' schedule, from their uncached runs; all must share a workflow and a schedule."""
    sums: dict[str, dict[str, torch.Tensor]] = {"probe": {}, "rest": {}}
    sigmas: dict[str, tuple[float, ...]] = {}
    rows = pipeline.family.estimate(pipeline.family.resolve(cases[0].request, pipeline.recipe)).rows
    together = TOGETHER if rows < MIN_ROWS else 1
    for group in grouped(pipeline.load(cases[0].request.workflow), [prepare(pipeline, case) for case in cases], together):
        recorder = _run(group, pipeline)
        sigmas = {name: tuple(map(float, channel.sigmas[:-1])) for name, channel in group.channels(StepCache()).items()}
        for kind, found in (("probe", recorder.probes), ("rest", recorder.rests)):
            for name, steps in found.items():
                sums[kind][name] = sums[kind].get(name, 0) + products(steps)
    return Prior(sigmas, _grams(sums["probe"]), _grams(sums["rest"]), len(cases))


def _run(group: Group, pipeline: Pipeline) -> _Recorder:
    """The batch in the recipe's own arithmetic, whose rounding is a part of every residual."""
    recorder, transformer = _Recorder(group.channels(StepCache())), group.transformer
    transforms = pipeline.transforms_for(pipeline.family.resolve(group.cases[0].request, pipeline.recipe))
    around = transforms.around_loop(group.pipe, group.pipe._blocks.sub_blocks[LOOP], transformer, group.state)
    with around, replaced(transformer, "transformer_blocks", watched(list(transformer.transformer_blocks), recorder)):
        denoise(group)
    return recorder


def _grams(tables: Mapping[str, torch.Tensor]) -> dict[str, Gram]:
    """Tables on the scale of their mean square, which changes no prediction."""
    return {name: tuple(map(tuple, (table / table.diagonal().mean()).tolist())) for name, table in tables.items()}


def foreseen(prior: Prior, lam: float, warm_up: float = CAREFUL_START) -> float:
    """The share of the steps that would be computed at this lambda if every probe looked as usual."""
    total = steps_of(prior)
    budget, history, known = Budget(lam=lam, max_streak=STREAK, warm_up=warm_up), History(), list[int]()
    for index in range(total):
        errors = {name: foretell(gram, known[-ORDER - 1 :], index)[1] for name, gram in prior.rest.items()} if known else {}
        action = decide(budget, history, Step(index, total), errors).action
        history = history.after(action)
        known += [index] if action is Action.COMPUTE else []
    return history.computed / total


def write_prior(path: Path, prior: Prior, pipeline: Pipeline, case: Case) -> Iterator[str]:
    """The file, and what it foretells, in lines."""
    write_text(path, prior_text(prior, pipeline.stratum(pipeline.family.resolve(case.request, pipeline.recipe))))
    yield f"{path}: {prior.clips} clips, {steps_of(prior)} steps, digest {prior.digest[:12]}"
    for lam in FORESEEN_AT:
        yield f"  --cache-lambda {lam:g}: about {foreseen(prior, lam):.0%} of the steps computed, where probes look as usual"


def main() -> None:
    """`python -m eval.cache_prior`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--workflow", default="t2va")
    parser.add_argument("--clips", type=int, default=16)
    parser.add_argument("--size")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--recipe", default="exact", metavar="NAME", help="whose arithmetic (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--out", type=Path, default=Path("prior.json"))
    args = parser.parse_args()
    pipeline = open_pipeline(args.model, replace(find_recipe(args.recipe), dtype=args.dtype), device=args.device)
    shape = Shape(size=parse_size("--size", args.size) if args.size else None, frames=args.frames, steps=args.steps)
    cases = cases_of("fit", args.clips, args.workflow, shape, pipeline)
    prior = measure_prior(pipeline, cases)
    for line in write_prior(args.out, prior, pipeline, cases[0]):
        logger.info("%s", line)


if __name__ == "__main__":
    main()
