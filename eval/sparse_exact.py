"""Whether the sparse implementations of this machine compute what their definition says, at small odd sizes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from videogen.attention import flex, gather, reference, triton_pool, triton_sparse
from videogen.attention.blocks import Blocks
from videogen.attention.dense import dense
from videogen.attention.route import Pooled, Route, band_mask, pool, priorities, select, wide

BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative L2 of the output
LSE_BOUND = 2e-2  # nats, in half precision; summaries are rounded to the kernel's dtype


@dataclass(frozen=True, slots=True)
class Case:
    """Rows, sinks, blocks, budgets by head (a large one is a dense head), batch, head dimension."""

    rows: int
    first: int
    block: tuple[int, int]
    budgets: tuple[int, ...]
    batch: int = 1
    width: int = 128


CASES = (
    Case(1700, 85, (128, 64), (7, 99, 12, 5)),  # everything short
    Case(1792, 0, (128, 64), (6, 9)),  # nothing short, no sinks
    Case(1300, 20, (128, 64), (8, 6), batch=2),
    Case(2000, 61, (128, 128), (5, 9), width=64),
    Case(700, 33, (32, 16), (9, 20), width=64),
)
SMALL = (Case(133, 21, (32, 16), (6, 99), width=16), Case(128, 0, (32, 16), (5, 6), width=16))
FLEX = Case(1700, 128, (128, 128), (5, 9, 99))

Attended = tuple[torch.Tensor, torch.Tensor]
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Blocks, Route, Pooled]


def layer_of(case: Case, device: torch.device, dtype: torch.dtype) -> Layer:
    """Random projections as views of one fused tensor, with a route over them."""
    draw = torch.Generator().manual_seed(case.rows)
    fused = torch.randn(case.batch, case.rows, 3, len(case.budgets), case.width, generator=draw).to(device, dtype)
    query, key, value = 2 * fused[:, :, 0], fused[:, :, 1], fused[:, :, 2]
    blocks = Blocks(case.first, case.rows, *case.block)
    pooled = pool(query, key, value, blocks)
    budgets = torch.tensor(case.budgets, dtype=torch.int32, device=device).clamp(max=blocks.num_k)
    longest = max([each for each in case.budgets if each < blocks.num_k], default=blocks.num_k)
    return query, key, value, blocks, select(priorities(pooled, "variance"), band_mask(blocks, device), budgets, longest), pooled


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2 distance in float32 or wider."""
    found, wanted = found.to(wide(found.dtype)), wanted.to(wide(wanted.dtype))
    return float((found - wanted).norm() / wanted.norm())


def _row(name: str, found: Attended, wanted: Attended, dtype: torch.dtype) -> dict[str, Any]:
    error, lse = relative(found[0], wanted[0]), float((found[1] - wanted[1]).abs().max())
    bound = 1e-4 if dtype == torch.float32 else LSE_BOUND
    return {"check": name, "error": error, "lse_error": lse, "is_right": error <= BOUNDS[dtype] and lse <= bound}


def kernel_rows(
    device: torch.device, dtype: torch.dtype, launches: Sequence[triton_sparse.Launch], *, small: bool
) -> Iterator[dict[str, Any]]:
    """The Triton kernels: every case and tail at the default launch, the first case at every launch, pooling, one dense budget."""
    for index, case in enumerate(SMALL if small else CASES):
        query, key, value, blocks, route, pooled = layer = layer_of(case, device, dtype)
        columns = [x.to(dtype) for x in (pooled.key, pooled.variance, pooled.value)]
        for tail in ("none", "mean", "variance"):
            wanted = reference.attend(*layer, tail)
            for launch in launches if index == 0 and tail == "variance" else launches[:1]:
                out = torch.full(query.shape, float("nan"), device=device, dtype=dtype)
                lse = triton_sparse.run_kernel(query, key, value, columns, route, blocks, tail, launch, out)
                told = f"{case.rows} rows, blocks {case.block}, {tail}, {launch}"
                yield _row(told, (out[:, blocks.first :], lse), wanted, dtype)
    made = triton_pool.pool(query, key, value, blocks)
    for name in ("query", "key", "variance", "value"):
        error = relative(getattr(made, name), getattr(pooled, name))
        yield {"check": f"pooled {name}", "error": error, "lse_error": 0.0, "is_right": error < 1e-4}


def whole_budget_rows(attend: Callable[..., Attended], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """With every block kept, against dense attention in float32."""
    query, key, value, blocks, route, pooled = layer_of(Case(700, 33, (32, 16), (999, 999), width=64), device, dtype)
    out, _ = attend(query, key, value, blocks, route, pooled, "variance")
    error = relative(out, dense(query.float(), key.float(), value.float()))
    return {"check": "whole budget against dense float32", "error": error, "lse_error": 0.0, "is_right": error <= BOUNDS[dtype]}


def flex_rows(device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Compiled flex_attention with the tail merged in."""
    layer = layer_of(FLEX, device, dtype)
    first = layer[3].first
    for tail in ("none", "variance"):
        out, lse = flex.attend(*layer, tail)
        yield _row(f"flex, {tail}", (out[:, first:], lse), reference.attend(*layer, tail), dtype)


def gather_rows(device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """The gather implementation."""
    for case in SMALL:
        layer = layer_of(case, device, dtype)
        out, lse = gather.attend(*layer, "variance")
        yield _row(f"gather, {case.rows} rows", (out[:, case.first :], lse), reference.attend(*layer, "variance"), dtype)


def compiled_row(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Pooling, selection and attention in one graph, without a break and without waiting for the device."""
    query, key, value, blocks, route, _ = layer_of(CASES[0], device, dtype)
    band = band_mask(blocks, device)

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, budgets: torch.Tensor) -> torch.Tensor:
        pooled = triton_pool.pool(query, key, value, blocks)
        route = select(priorities(pooled, "variance"), band, budgets, 12)
        return triton_sparse.attend(query, key, value, blocks, route, pooled, "variance")[0]

    eager = run(query, key, value, route.budgets)
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(query, key, value, route.budgets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    out = torch.compile(run, fullgraph=True)(query, key, value, route.budgets)
    error = relative(out, eager)
    return {"check": "one graph, no wait for the device", "error": error, "lse_error": 0.0, "is_right": error <= BOUNDS[dtype]}
