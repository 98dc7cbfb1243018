"""Measures the prior of a schedule on a few uncached clips: inner products of every two steps' residuals. `python -m eval.cache_prior`."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from caches.prior import Gram, Prior
from caches.step_hook import Channel, replaced
from eval.batched_loop import Group, denoise, grouped, prepare
from eval.cache_cases import cases_of
from eval.quality_cases import Case, Shape
from videogen.config import DEVICES, DTYPES, StepCache
from videogen.families.h3_pipeline import LOOP
from videogen.jobs.plan import parse_size
from videogen.jobs.run import write_text
from videogen.pipeline import Pipeline, open_pipeline
from videogen.recipes import find_recipe

logger = logging.getLogger(__name__)

ROWS = 1024  # of a channel's rows, evenly chosen: inner products of a whole residual are their mean
TOGETHER = 4  # clips in one batch


class _Kept:
    """Residuals of every step, by channel, of one batch: of the probe and of the rest; each (B, rows, D)."""

    def __init__(self, channels: Mapping[str, Channel]) -> None:
        self.rows = {name: channel.rows[:: max(1, len(channel.rows) // ROWS)] for name, channel in channels.items()}
        self.probe: dict[str, list[torch.Tensor]] = {name: [] for name in channels}
        self.rest: dict[str, list[torch.Tensor]] = {name: [] for name in channels}

    def keep(self, kind: dict[str, list[torch.Tensor]], before: torch.Tensor, after: torch.Tensor) -> None:
        """Add a step's residual."""
        for name, rows in self.rows.items():
            kind[name].append((after - before).index_select(1, rows).float())


class _First(nn.Module):
    def __init__(self, block: nn.Module, kept: _Kept) -> None:
        super().__init__()
        self.block, self.kept = block, kept

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Run the first block and keep its residual."""
        out: torch.Tensor = self.block(hidden_states, *args, **kwargs)
        self.kept.keep(self.kept.probe, hidden_states, out)
        return out


class _Rest(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module], kept: _Kept) -> None:
        super().__init__()
        self.blocks, self.kept = nn.ModuleList(blocks), kept

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Run the other blocks and keep their residual."""
        out = hidden_states
        for block in self.blocks:
            out = block(out, *args, **kwargs)
        self.kept.keep(self.kept.rest, hidden_states, out)
        return out


def products(steps: Sequence[torch.Tensor]) -> torch.Tensor:
    """Inner products (N, N) of N residuals, float64 sums of float32 products' rows."""
    table = torch.stack([step.flatten() for step in steps])
    parts = [part.double() @ part.double().T for part in torch.split(table, 1 << 20, dim=1)]
    return torch.stack(parts).sum(0).cpu()


def measure_prior(pipeline: Pipeline, cases: Sequence[Case]) -> Prior:
    """The prior of the cases' schedule, from their uncached runs; all must share a workflow and a schedule."""
    sums: dict[str, dict[str, torch.Tensor]] = {"probe": {}, "rest": {}}
    sigmas: dict[str, tuple[float, ...]] = {}
    for group in grouped(pipeline.load(cases[0].request.workflow), [prepare(pipeline, case) for case in cases], TOGETHER):
        kept = _run(group, pipeline)
        sigmas = {name: tuple(map(float, channel.sigmas[:-1])) for name, channel in group.channels(StepCache()).items()}
        for kind, found in (("probe", kept.probe), ("rest", kept.rest)):
            for name, steps in found.items():
                sums[kind][name] = sums[kind].get(name, 0) + products(steps)
    return Prior(sigmas, _grams(sums["probe"]), _grams(sums["rest"]), len(cases))


def _run(group: Group, pipeline: Pipeline) -> _Kept:
    """The batch in the recipe's own arithmetic, whose rounding is a part of every residual."""
    kept, transformer = _Kept(group.channels(StepCache())), group.transformer
    transforms = pipeline.transforms_for(pipeline.family.resolve(group.cases[0].request, pipeline.recipe))
    with transforms.around_loop(group.pipe, group.pipe._blocks.sub_blocks[LOOP], transformer, group.state):
        blocks = list(transformer.transformer_blocks)
        with replaced(transformer, "transformer_blocks", [_First(blocks[0], kept), _Rest(blocks[1:], kept)]):
            denoise(group)
    return kept


def _grams(tables: Mapping[str, torch.Tensor]) -> dict[str, Gram]:
    """Tables on the scale of their mean square, which changes no prediction."""
    return {name: tuple(map(tuple, (table / table.diagonal().mean()).tolist())) for name, table in tables.items()}


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
    prior = measure_prior(pipeline, cases_of("fit", args.clips, args.workflow, shape, pipeline))
    write_text(args.out, prior.to_json())
    logger.info("%s: %d clips, %d steps, digest %s", args.out, prior.clips, len(next(iter(prior.sigmas.values()))), prior.digest[:12])


if __name__ == "__main__":
    main()
