"""Sparse attention as one Triton kernel: sinks, listed blocks and the summary tail in the same online softmax.

Nothing is padded: lengths are masked where they end, in the sinks, the last key block and the last query block. Budgets are read
on the device; the host waits for nothing. `reference.py` says what is computed, `python -m eval.sparse_check` compares and times it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from videogen.attention import triton_kernels
from videogen.attention.blocks import Blocks
from videogen.attention.dense import dense
from videogen.attention.route import MAX_VARIANCE_TERM, Pooled, Route

TAIL_CODES = {"none": 0, "mean": 1, "variance": 2}
HEAD_DIMS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Launch:
    """How the kernel is compiled.

    rows: query rows of a program, a divisor of the query block. paired: two listed blocks of up to 64 rows in one product.
    has_tma: keys and values by descriptor, then never paired. tail: summary columns of a step, and the stages of that loop.
    """

    rows: int = 128
    num_warps: int = 8
    num_stages: int = 3
    paired: bool = True
    has_tma: bool = False
    tail: tuple[int, int] = (64, 2)


# By (compute capability, head dimension, key rows of a block): the fastest of `python -m eval.sparse_check --sweep`, where that ran.
LAUNCHES: dict[tuple[int, int, int], Launch] = {
    (90, 128, 64): Launch(64, 4, 2, paired=False, has_tma=True, tail=(32, 1)),
    (90, 128, 128): Launch(128, 8, 2, paired=False, has_tma=True),
}
CANDIDATES = (
    Launch(128, 8, 3),
    Launch(128, 8, 2),
    Launch(128, 8, 3, paired=False),
    Launch(128, 8, 4, paired=False),
    Launch(128, 8, 3, paired=False, has_tma=True),
    Launch(128, 8, 4, paired=False, has_tma=True),
    Launch(64, 4, 2, tail=(32, 1)),
    Launch(64, 4, 2, paired=False, tail=(32, 1)),
    Launch(64, 4, 3, paired=False, tail=(32, 1)),
    Launch(64, 4, 3, paired=False, has_tma=True, tail=(32, 1)),
    Launch(64, 4, 2, paired=False, has_tma=True, tail=(32, 1)),
    Launch(64, 4, 4, paired=False, has_tma=True, tail=(32, 1)),
    Launch(64, 4, 3, paired=False, has_tma=True),
    Launch(128, 8, 2, paired=False, has_tma=True),
    Launch(128, 8, 3, tail=(32, 2)),
)
SMALL_MEMORY = Launch(64, 4, 2, paired=False, tail=(32, 1))  # 100 KiB a multiprocessor: consumer Blackwell (12.x), Ada (8.9)


def launch_on(query: torch.Tensor, block_k: int) -> Launch:
    """The launch for these heads on their device."""
    return launch_for(torch.cuda.get_device_capability(query.device) if query.is_cuda else (0, 0), query.shape[-1], block_k)


def launch_for(capability: tuple[int, int], head_dim: int, block_k: int) -> Launch:
    """The launch of a device's compute capability."""
    major, minor = capability
    swept = LAUNCHES.get((10 * major + minor, head_dim, block_k))
    return swept or (SMALL_MEMORY if major == 12 or capability in ((8, 6), (8, 9)) else CANDIDATES[0])


def run_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pooled: Sequence[torch.Tensor],
    route: Route,
    blocks: Blocks,
    tail: str,
    launch: Launch,
    out: torch.Tensor,
    *,
    is_exact: bool = True,
) -> torch.Tensor:
    """Write the video rows of `out` (B, S, H, D) and return their log-sum-exp (B, H, rows).

    pooled is mean key, key variance and mean value, (B, H, key blocks, D) in the dtype of query (B, S, H, D). Without `is_exact`
    only the summaries of what the route does not keep are attended to, for merging with another kernel by log-sum-exp.
    """
    batch, rows, heads, width = query.shape
    lse = torch.empty(batch, heads, blocks.num_video, dtype=torch.float32, device=query.device)
    paired = 2 if launch.paired and blocks.block_k <= 64 and not launch.has_tma else 1
    program = min(launch.rows, blocks.block_q)
    tiles = -(-blocks.num_video // program)
    if launch.has_tma:
        key, value = (x if _is_table(x) else x.contiguous() for x in (key, value))
    descriptors = [triton_kernels.descriptor(x, blocks.block_k) if launch.has_tma else x for x in (key, value)]
    triton_kernels.sparse_kernel[(batch * heads * tiles,)](
        *(query, key, value, *descriptors, *pooled, route.lists, route.budgets, route.kept.view(torch.uint8), out, lse),
        *(stride for x in (query, key, value, out) for stride in x.stride()[:3]),
        *(
            heads,
            blocks.first,
            rows,
            tiles,
            blocks.num_q,
            blocks.num_k,
            route.lists.shape[-1],
            blocks.last_k,
            width**-0.5,
            MAX_VARIANCE_TERM,
        ),
        D=width,
        BM=program,
        BN=blocks.block_k,
        BT=launch.tail[0],
        P=paired,
        SHARED=blocks.block_q // program,
        TAIL=TAIL_CODES[tail],
        TAIL_STAGES=launch.tail[1],
        EXACT=is_exact,
        RAGGED=blocks.last_k < blocks.block_k,
        TMA=launch.has_tma,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return lse


def _is_table(x: torch.Tensor) -> bool:
    """Whether x (B, S, H, D) is rows of H*D in one table, as projections and their fused views are."""
    return x.stride(3) == 1 and x.stride(2) == x.shape[3] and x.stride(0) == x.shape[1] * x.stride(1)


@torch.library.custom_op("videogen::sparse_attention", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pooled: list[torch.Tensor],
    budgets: torch.Tensor,
    lists: torch.Tensor,
    kept: torch.Tensor,
    first: int,
    block_q: int,
    block_k: int,
    tail: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = Blocks(first, query.shape[1], block_q, block_k)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if first:
        out[:, :first] = dense(query[:, :first], key, value)
    lse = run_kernel(query, key, value, pooled, Route(budgets, lists, kept), blocks, tail, launch_on(query, blocks.block_k), out)
    return out, lse


@_attend.register_fake
def _shapes(query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    first = rest[6]
    lse = query.new_empty(query.shape[0], query.shape[2], query.shape[1] - first, dtype=torch.float32)
    return query.new_empty(query.shape), lse


def _columns(pooled: Pooled, dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.to(dtype) for x in (pooled.key, pooled.variance, pooled.value)]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks, route: Route, pooled: Pooled, tail: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, S, H, D) of all rows, and log-sum-exp (B, H, rows) of the video rows; one operator, opaque to torch.compile."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    rest = (route.budgets, route.lists, route.kept, blocks.first, blocks.block_q, blocks.block_k, tail)
    found: tuple[torch.Tensor, torch.Tensor] = _attend(query, key, value, _columns(pooled, query.dtype), *rest)
    return found


def summaries(query: torch.Tensor, blocks: Blocks, route: Route, pooled: Pooled, tail: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the video rows over the blocks that are not kept, (B, rows, H, D) and (B, H, rows): to merge by log-sum-exp."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    columns = _columns(pooled, query.dtype)
    lse = run_kernel(query, query, query, columns, route, blocks, tail, launch_on(query, blocks.block_k), out, is_exact=False)
    return out[:, blocks.first :], lse
