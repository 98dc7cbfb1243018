"""Row orders of fused projections: q/k/v stacked, split or interleaved per head, SwiGLU halves; knows no file and no names."""

import math
from collections.abc import Sequence
from typing import Literal

import torch

from lora.adapter import Factors

QkvOrder = Literal["stacked", "interleaved"]
_MIN_SHARE = 0.1  # of the variance of log norms that one order must explain beyond the other
_SIGMAS = 4.0


def deinterleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`[head 0: q k v, head 1: q k v, ...]` -> `[q; k; v]`, along the first dimension."""
    grid = rows.reshape(-1, 3, head_dim, *rows.shape[1:])  # (heads, 3, head_dim, ...)
    return grid.transpose(0, 1).reshape(rows.shape)


def interleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`[q; k; v]` -> `[head 0: q k v, head 1: q k v, ...]`, along the first dimension."""
    grid = rows.reshape(3, -1, head_dim, *rows.shape[1:])  # (3, heads, head_dim, ...)
    return grid.transpose(0, 1).reshape(rows.shape)


def swap_halves(rows: torch.Tensor) -> torch.Tensor:
    """`[gate; value]` <-> `[value; gate]`, along the first dimension."""
    first, second = rows.chunk(2)
    return torch.cat([second, first])


def block_rank(up: torch.Tensor) -> int | None:
    """The rank r of each projection when `up` (3n, 3r) is block-diagonal and not zero, else None."""
    if up.shape[1] % 3 or up.shape[0] % 3 or not up.any():
        return None
    rows, rank = up.shape[0] // 3, up.shape[1] // 3
    held = up.reshape(3, rows, 3, rank).ne(0).any(dim=3).any(dim=1)  # (3, 3): which blocks hold anything
    return None if bool((held & ~torch.eye(3, dtype=torch.bool)).any()) else rank


def split_qkv(fused: Factors) -> tuple[Factors, Factors, Factors]:
    """Fused factors in stacked order to q, k and v, exactly; a block-diagonal `up` gives each its own third of the rank."""
    ups, rank = fused.up.chunk(3), block_rank(fused.up)
    if rank is None:
        q, k, v = (Factors(fused.down, up.contiguous(), fused.scale, fused.scale_from) for up in ups)
        return q, k, v
    parts = zip(fused.down.chunk(3), (up[:, i * rank : (i + 1) * rank] for i, up in enumerate(ups)))
    q, k, v = (Factors(down.contiguous(), up.contiguous(), fused.scale, fused.scale_from) for down, up in parts)
    return q, k, v


def fuse_qkv(parts: Sequence[Factors]) -> Factors:
    """q, k and v to stacked factors, exactly: a shared `down` keeps its rank, else ranks add up block-diagonally.

    The scale is a factor of its own, so alpha (scale times rank) triples by itself when the rank does. Unequal scales are
    folded into `up` in float32.
    """
    if len({part.scale for part in parts}) > 1:
        parts = [Factors(part.down, part.up.float() * part.scale, 1.0, part.scale_from) for part in parts]
    first = parts[0]
    if all(part.down.shape == first.down.shape and torch.equal(part.down, first.down) for part in parts):
        return Factors(first.down, torch.cat([part.up for part in parts]), first.scale, first.scale_from)
    dtype = first.up.dtype
    for part in parts:
        dtype = torch.promote_types(dtype, part.up.dtype)
    up = torch.zeros(sum(part.up.shape[0] for part in parts), sum(part.rank for part in parts), dtype=dtype)
    row = column = 0
    for part in parts:
        up[row : row + part.up.shape[0], column : column + part.rank] = part.up
        row, column = row + part.up.shape[0], column + part.rank
    return Factors(torch.cat([part.down for part in parts]), up, first.scale, first.scale_from)


def order_evidence(ups: Sequence[torch.Tensor], head_dim: int) -> tuple[QkvOrder, str] | None:
    """Which row order the fused `up` matrices (3 * heads * head_dim, r) have, with the reason; None when they do not tell.

    First the pattern of zeros of a block-diagonal fusion, which is proof. Else the norms of head-sized blocks: q, k and v
    differ more from each other than their heads do, so the true order explains more of the variance of log norms. An
    order is believed when it explains a tenth more and lies 4 standard errors beyond chance (for normal noise the
    explained share of 3 classes over n blocks is Beta(1, (n - 3) / 2)).
    """
    proofs: set[QkvOrder] = {order for up in ups for order in _proofs(up, head_dim)}
    if len(proofs) == 1:
        return proofs.pop(), "the zeros of a block-diagonal fusion"
    gains, errors = [], []
    for up in ups:
        norms = up.float().reshape(-1, head_dim, up.shape[1]).square().sum(dim=(1, 2))  # (3 * heads)
        if not bool((norms > 0).all()) or len(norms) < 6:
            continue
        logs = norms.log()
        gains.append(_explained(logs.reshape(3, -1)) - _explained(logs.reshape(-1, 3).T))
        half = (len(norms) - 3) / 2
        errors.append(2 * half / ((1 + half) ** 2 * (2 + half)))
    if not gains:
        return None
    gain, error = sum(gains) / len(gains), math.sqrt(sum(errors)) / len(gains)
    if abs(gain) < max(_MIN_SHARE, _SIGMAS * error):
        return None
    return ("stacked" if gain > 0 else "interleaved"), f"block norms over {len(gains)} modules ({abs(gain):.2f} more explained)"


def _proofs(up: torch.Tensor, head_dim: int) -> list[QkvOrder]:
    stacked, interleaved = block_rank(up) is not None, block_rank(deinterleave(up, head_dim)) is not None
    if stacked == interleaved:
        return []
    return ["stacked" if stacked else "interleaved"]


def _explained(classes: torch.Tensor) -> float:
    """Share of variance between the rows of (3, heads)."""
    total = float((classes - classes.mean()).square().sum())
    between = float((classes.mean(dim=1) - classes.mean()).square().sum()) * classes.shape[1]
    return between / total if total > 0 else 0.0
