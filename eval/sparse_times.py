"""How long sparse attention takes at real sizes, part by part, beside dense attention and compiled flex in the same process."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from eval.sparse_data import HEAD_DIM, KINDS, audio_latents, made_up
from eval.sparse_exact import relative
from eval.timing import synchronizer, time_call
from videogen.attention import flex, gather, reference, triton_pool, triton_sparse
from videogen.attention.blocks import Blocks
from videogen.attention.dense import dense
from videogen.attention.order import snake_order
from videogen.attention.route import Pooled, Route, band_mask, list_width, mean_budget, pool, priorities, select
from videogen.attention.state import row_errors

logger = logging.getLogger(__name__)

FAILS = (RuntimeError, ValueError, NotImplementedError, ImportError)
DENSE = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "torch's choice": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}
_PROBED, _LOOKED = 64, 3  # rows of the guard's probe; query blocks compared with the definition


@dataclass(frozen=True, slots=True)
class Place:
    """Where and in what; `is_triton` says whether the kernels run here, else the gather implementation stands in."""

    device: torch.device
    dtype: torch.dtype
    runs: int
    is_triton: bool

    def milliseconds(self, call: Callable[[], object]) -> float:
        """The median of the runs, after two warm ones."""
        timing = time_call(call, runs=self.runs, min_runs=1, warmup=2, synchronize=synchronizer(self.device))
        return 1e3 * timing.median_s


def attempt(row: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row with what was measured, or with why it could not be."""
    try:
        row |= measure()
    except FAILS as error:
        row["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    logger.info("%s", row)
    return row


class Layer:
    """One layer of made-up heads in tile order; every kind of head comes several times."""

    def __init__(self, grid: tuple[int, int, int], rows: int, num_heads: int, tile: tuple[int, int, int], place: Place) -> None:
        text = rows - math.prod(grid) - 2 * audio_latents(grid[0])
        heads = made_up(grid, min(num_heads, len(KINDS)), place.device, place.dtype, num_text=max(text, 1))
        order = torch.cat([torch.arange(heads.first), heads.first + snake_order(grid, tile)]).to(place.device)
        times = -(-num_heads // len(KINDS))
        found = (x[:, order].repeat(1, 1, times, 1)[:, :, :num_heads].contiguous() for x in (heads.query, heads.key, heads.value))
        self.query, self.key, self.value = found
        self.first, self.rows, self.num_heads, self.place = heads.first, self.query.shape[1], num_heads, place

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value (1, S, H, D)."""
        return self.query, self.key, self.value

    def teraflop(self, pairs: float) -> float:
        """Of this many query-key pairs in every head."""
        return 4 * HEAD_DIM * self.num_heads * pairs / 1e12

    def dense_rows(self) -> Iterator[dict[str, Any]]:
        """Dense attention under each back end."""
        for name, backends in DENSE.items():

            def measure(backends: list[SDPBackend] = backends) -> dict[str, Any]:
                with sdpa_kernel(backends):
                    ms = self.place.milliseconds(lambda: dense(*self.qkv))
                return {"ms": ms, "tflops": self.teraflop(self.rows**2) / ms * 1e3}

            yield attempt({"arm": f"dense, {name}", "rows": self.rows, "density": 1.0}, measure)


class Cut:
    """A layer cut into blocks at one density, with its route; made once, measured in parts."""

    def __init__(self, layer: Layer, block: tuple[int, int], density: float, *, aligned: bool) -> None:
        self.layer, self.place, self.density = layer, layer.place, density
        first = -(-layer.first // block[0]) * block[0] if aligned else layer.first
        self.blocks = Blocks(first, layer.rows, *block)
        self.band = band_mask(self.blocks, self.place.device)
        self.budgets = torch.full((layer.num_heads,), mean_budget(density, self.blocks), dtype=torch.int32, device=self.place.device)
        self.width = list_width(density, self.blocks)
        self.pool = triton_pool.pool if self.place.is_triton else pool
        self.pooled = self.pool(*layer.qkv, self.blocks)
        self.route = self.select()

    def select(self) -> Route:
        """Priorities and lists from the pooled blocks."""
        return select(priorities(self.pooled, "variance"), self.band, self.budgets, self.width)

    @property
    def args(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Blocks, Route, Pooled]:
        """What every implementation takes."""
        return *self.layer.qkv, self.blocks, self.route, self.pooled

    def attend(self, tail: str) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows, sinks among them."""
        return (triton_sparse.attend if self.place.is_triton else gather.attend)(*self.args, tail)

    def whole(self) -> torch.Tensor:
        """All that a layer does at every forward."""
        self.pooled = self.pool(*self.layer.qkv, self.blocks)
        self.route = self.select()
        return self.attend("variance")[0]

    @property
    def exact_pairs(self) -> float:
        """Query-key pairs computed exactly, in a head on average."""
        kept = float(self.budgets.float().mean()) / self.blocks.num_k
        return self.blocks.first * self.blocks.rows + self.blocks.num_video * (self.blocks.first + kept * self.blocks.num_video)

    def error(self, tail: str) -> float:
        """Relative L2 from the definition, over some query blocks."""
        chosen = [index * (self.blocks.num_q - 1) // max(1, _LOOKED - 1) for index in range(_LOOKED)]
        out, block = self.attend(tail)[0][:, self.blocks.first :], self.blocks.block_q
        found = torch.cat([out[:, index * block : (index + 1) * block] for index in chosen], 1)
        return relative(found, torch.cat([reference.attend(*self.args, tail, [index])[0] for index in chosen], 1))

    def row(self) -> dict[str, Any]:
        """Every part of our own path; `ms` is all of it. Rates count the pairs computed exactly."""
        name = "triton" if self.place.is_triton else "gather"
        row = {"arm": f"{name} {self.blocks.block_q}x{self.blocks.block_k}", "rows": self.layer.rows, "density": self.density}

        def measure() -> dict[str, Any]:
            time, work = self.place.milliseconds, self.layer.teraflop(self.exact_pairs)
            exact_ms, kernel_ms = time(lambda: self.attend("none")), time(lambda: self.attend("variance"))
            return {
                "ms": time(self.whole),
                "pool_ms": time(lambda: self.pool(*self.layer.qkv, self.blocks)),
                "select_ms": time(self.select),
                "kernel_ms": kernel_ms,
                "kernel_without_tail_ms": exact_ms,
                "sinks_ms": time(lambda: dense(self.layer.query[:, : self.blocks.first], self.layer.key, self.layer.value)),
                "probe_ms": time(self.probe),
                "tflops": work / kernel_ms * 1e3,
                "tflops_without_tail": work / exact_ms * 1e3,
                "from_definition": self.error("variance"),
            }

        return attempt(row, measure)

    def probe(self) -> object:
        """The guard's look at some rows."""
        rows = torch.linspace(self.blocks.first, self.blocks.rows - 1, _PROBED, device=self.place.device).long()
        return row_errors(*self.layer.qkv, self.layer.query, rows)

    def flex_row(self) -> dict[str, Any]:
        """Compiled flex on the same lists, exact part only: no tail, no routing, its mask made beforehand."""

        def measure() -> dict[str, Any]:
            mask = flex.block_mask(self.blocks, self.route)
            ms = self.place.milliseconds(lambda: flex.exact_part(*self.layer.qkv, mask))
            return {"ms": ms, "kernel_without_tail_ms": ms, "tflops_without_tail": self.layer.teraflop(self.exact_pairs) / ms * 1e3}

        return attempt({"arm": "flex 128x128, no tail", "rows": self.layer.rows, "density": self.density}, measure)

    def sweep(self) -> Iterator[dict[str, Any]]:
        """The kernel with the tail under every candidate launch."""
        columns = [x.to(self.place.dtype) for x in (self.pooled.key, self.pooled.variance, self.pooled.value)]
        out = torch.empty_like(self.layer.query)
        for launch in triton_sparse.CANDIDATES:

            def run(launch: triton_sparse.Launch = launch) -> object:
                return triton_sparse.run_kernel(*self.layer.qkv, columns, self.route, self.blocks, "variance", launch, out)

            def measure(run: Callable[[], object] = run) -> dict[str, Any]:
                ms = self.place.milliseconds(run)
                return {"ms": ms, "tflops": self.layer.teraflop(self.exact_pairs) / ms * 1e3}

            name = f"{self.blocks.block_q}x{self.blocks.block_k} {launch!r}"
            yield attempt({"launch": name, "rows": self.layer.rows, "density": self.density}, measure)
