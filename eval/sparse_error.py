"""What sparse attention gets wrong at equal density, against dropping blocks in raster order. `python -m eval.sparse_error --help`.

Attention output before its projection, video rows of whole query blocks, relative L2 against dense attention of the same rows.
Samples: heads made up in H3's shape, or a model's own at work, captured from dense renders.
"""

import argparse
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval.fingerprint import fingerprint
from eval.quality_cases import Shape, fixed_cases
from eval.report_folder import check_free, make_folder
from eval.sparse_data import Heads, listening, made_up
from videogen.attention.blocks import Blocks
from videogen.attention.order import snake_order
from videogen.attention.reference import attend
from videogen.attention.route import Route, band_mask, head_budgets, list_width, mean_budget, pool, priorities, select
from videogen.families.h3 import latent_frames
from videogen.families.h3_pipeline import transformer_of
from videogen.jobs.run import write_json, write_text
from videogen.pipeline import open_pipeline

logger = logging.getLogger(__name__)

SCHEMA = "videogen.sparse_error/1"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to be sparse."""

    name: str
    is_ordered: bool
    tail: str
    per_head: bool = False


BASE = Arm("raster order, dropped", False, "none")
ARMS = (
    BASE,
    Arm("raster order, mean", False, "mean"),
    Arm("raster order, mean and variance", False, "variance"),
    Arm("tile order, dropped", True, "none"),
    Arm("tile order, mean", True, "mean"),
    Arm("tile order, mean and variance", True, "variance"),
    Arm("the same, budgets per head", True, "variance", True),
)


@dataclass(frozen=True, slots=True)
class Cut:
    """How rows are ordered and cut, and how many query blocks are looked at (evenly spaced)."""

    tile: tuple[int, int, int]
    block: tuple[int, int]
    num_looked: int


class Sample:
    """One layer's heads in one order, pooled, with the dense output of the query blocks looked at."""

    def __init__(self, heads: Heads, cut: Cut, *, is_ordered: bool) -> None:
        order = snake_order(heads.grid, cut.tile if is_ordered else (1, 1, heads.grid[2]))
        rows = torch.cat([torch.arange(heads.first), heads.first + order]).to(heads.query.device)
        self.query, self.key, self.value = (x[:, rows] for x in (heads.query, heads.key, heads.value))
        self.blocks = Blocks(heads.first, len(rows), *cut.block)
        self.pooled = pool(self.query, self.key, self.value, self.blocks)
        count = min(cut.num_looked, self.blocks.num_q)
        self.looked = [index * self.blocks.num_q // count for index in range(count)]
        everything = torch.ones(*self.pooled.query.shape[:3], self.blocks.num_k, dtype=torch.bool, device=rows.device)
        nothing = torch.empty(0, device=rows.device)
        self.dense = self.output(Route(nothing, nothing, everything), "none")

    def output(self, route: Route, tail: str) -> torch.Tensor:
        """The rows looked at, one query block at a time: (B, rows, H, D)."""
        layer = (self.query, self.key, self.value, self.blocks, route, self.pooled, tail)
        return torch.cat([attend(*layer, [index])[0] for index in self.looked], 1)

    def errors(self, budget: float, tail: str, budgets: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared error and squared size of each head's output, (H,), at equal budgets or at these."""
        if budgets is None:
            budgets = torch.full((self.dense.shape[2],), mean_budget(budget, self.blocks), dtype=torch.int32, device=self.dense.device)
        route = select(priorities(self.pooled, tail), band_mask(self.blocks, self.dense.device), budgets, self.width(budget))
        apart = self.output(route, tail) - self.dense
        return apart.square().sum((0, 1, 3)), self.dense.square().sum((0, 1, 3))

    def width(self, budget: float) -> int:
        """The longest list."""
        return list_width(budget, self.blocks)

    def split(self, budget: float, squared: torch.Tensor) -> torch.Tensor:
        """Budgets per head from errors measured before, as a request sets them after its first sparse forward."""
        group = len(squared) // 8 if len(squared) >= 32 else len(squared) // 2
        mean, least = mean_budget(budget, self.blocks), self.blocks.widest_band
        return head_budgets(squared.sqrt().sqrt(), mean, least, self.width(budget), group)


def compare(earlier: Heads, heads: Heads, cut: Cut, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """Every arm at every budget on one sample; `earlier` is what budgets per head are measured on."""
    samples = {ordered: Sample(heads, cut, is_ordered=ordered) for ordered in (False, True)}
    before = samples[True] if earlier is heads else Sample(earlier, cut, is_ordered=True)
    rows = []
    for budget in budgets:
        for arm in ARMS:
            sample = samples[arm.is_ordered]
            split = sample.split(budget, before.errors(budget, arm.tail)[0]) if arm.per_head else None
            apart, size = sample.errors(budget, arm.tail, split)
            kept = (mean_budget(budget, sample.blocks) if split is None else float(split.float().mean())) / sample.blocks.num_k
            per_head = (apart / size).sqrt()
            rows.append(
                {
                    "sample": heads.name,
                    "arm": arm.name,
                    "budget": budget,
                    "kept": kept,
                    "error": float((apart.sum() / size.sum()).sqrt()),
                    "worst_head": float(per_head.max()),
                }
            )
    return rows


def captured(model: str, num_prompts: int, steps: int, layers: Sequence[int], forwards: Sequence[int]) -> list[tuple[Heads, Heads]]:
    """Pairs of an earlier and a later sample of one layer and clip, from dense renders of the first fixed requests."""
    pipeline = open_pipeline(model, "plain")
    multiple, pairs = pipeline.family.geometry.canvas_multiple, []
    for case in fixed_cases(num_prompts, "t2va", Shape(steps=steps), pipeline.family, pipeline.recipe):
        with listening(transformer_of(pipeline.load("t2va")), layers, forwards) as kept:
            frames, height, width, _ = pipeline.render(case.request, seed=case.seed).frames.shape
        grid = (latent_frames(frames, pipeline.family.geometry), height // multiple, width // multiple)
        for layer, tensors in kept.items():
            found = [Heads(f"{case.name} layer {layer} forward {at}", *each, grid) for at, each in zip(forwards, tensors)]
            pairs += [(found[0], later) for later in found[1:]]
        logger.info("captured %s", case.name)
    return pairs


def table(rows: Sequence[dict[str, Any]], budgets: Sequence[float]) -> str:
    """One row per arm: mean error over samples, its part of the baseline's, and the mean of the worst head."""
    lines = ["| arm | " + " | ".join(f"{budget:.0%} kept | of dropped | worst head" for budget in budgets) + " |"]
    lines.append("|---|" + "---|" * (3 * len(budgets)))

    def mean(arm: Arm, budget: float, what: str) -> float:
        return statistics.fmean(row[what] for row in rows if row["arm"] == arm.name and row["budget"] == budget)

    for arm in ARMS:
        cells = [
            f"{mean(arm, budget, 'error'):.4f} | {mean(arm, budget, 'error') / mean(BASE, budget, 'error'):.2f}x"
            f" | {mean(arm, budget, 'worst_head'):.3f}"
            for budget in budgets
        ]
        lines.append(f"| {arm.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m eval.sparse_error --out DIR [--source made-up|MODEL]`; the table is the last thing logged."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--source", default="made-up", help="made-up, or a model that is rendered with (default: %(default)s)")
    parser.add_argument("--budgets", default="0.1,0.25,0.5", help="shares of key blocks kept (default: %(default)s)")
    parser.add_argument("--tile", type=_sizes, help="default: 4x4x4, for a model 8x2x2")
    parser.add_argument("--block", type=_sizes, help="query and key rows; default: 128x64, for a model 32x16")
    parser.add_argument("--query-blocks", type=int, default=12, help="looked at per sample, evenly spaced (default: %(default)s)")
    parser.add_argument("--grid", type=_sizes, default=(37, 24, 42), help="made up: latent frames x rows x columns")
    parser.add_argument("--heads", type=int, default=8, help="made up (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=2, help="model: clips (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=13, help="model: forwards of a clip (default: %(default)s)")
    parser.add_argument("--forwards", default="3,6,9", help="model: captured; the first only splits budgets (default: %(default)s)")
    parser.add_argument("--layers", default="0,3,6,9", help="model: captured (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args(argv)
    check_free(args.out, "sparse_error.json", overwrite=args.overwrite, option="--out")
    make_folder(args.out)
    is_made_up = args.source == "made-up"
    tile, block = ((4, 4, 4), (128, 64)) if is_made_up else ((8, 2, 2), (32, 16))
    cut = Cut(args.tile or tile, args.block or block, args.query_blocks)
    if is_made_up:
        heads = made_up(args.grid, args.heads, torch.device("cpu"), torch.float32)
        pairs = [(heads, heads)]
    else:
        layers, forwards = ([int(part) for part in text.split(",")] for text in (args.layers, args.forwards))
        pairs = captured(args.source, args.prompts, args.steps, layers, forwards)
    budgets = [float(part) for part in args.budgets.split(",")]
    rows = [row for earlier, heads in pairs for row in compare(earlier, heads, cut, budgets)]
    text = f"{args.source}, {len(pairs)} samples, tile {cut.tile}, block {cut.block}\n\n" + table(rows, budgets)
    report = {"schema": SCHEMA, "fingerprint": fingerprint(), "arguments": vars(args) | {"out": args.out.name}, "rows": rows}
    write_json(args.out / "sparse_error.json", report)
    write_text(args.out / "sparse_error.md", text)
    logger.info("\n%s", text)


if __name__ == "__main__":
    main()
