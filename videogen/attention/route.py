"""Which key blocks a query block computes exactly: pooled priorities in float32, per-head budgets, the local band always.

Knows nothing of how attention is computed. Tensors of a layer are (B, S, H, D); pooled ones (B, H, blocks, D).
"""

from dataclasses import dataclass

import torch

from videogen.attention.blocks import Blocks

LEAST_FACTOR, MOST_FACTOR = 0.2, 2.0  # of a head's budget, relative to the mean
MAX_VARIANCE_TERM = 2.0  # nats: beyond this the second-order expansion says nothing


@dataclass(frozen=True, slots=True)
class Pooled:
    """Means of query, key and value blocks and the variance of key blocks, in float32 or wider."""

    query: torch.Tensor
    key: torch.Tensor
    variance: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Route:
    """The selection of one layer.

    `budgets` (H,) int32 key blocks per query block; a head whose budget is all blocks is dense. `lists` (B, H, query blocks,
    width) int32 ascending block numbers, of which the first `budgets[h]` count. `kept` (B, H, query blocks, key blocks) bool.
    """

    budgets: torch.Tensor
    lists: torch.Tensor
    kept: torch.Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Float32, or the dtype itself where it is wider."""
    return torch.promote_types(dtype, torch.float32)


def _per_block(rows: torch.Tensor, block: int) -> list[torch.Tensor]:
    """(B, rows, H, D) as (B, n, block, H, D), and the short last block as (B, 1, rest, H, D) where there is one."""
    whole = rows.shape[1] // block
    batch, _, heads, width = rows.shape
    parts = [rows[:, : whole * block].view(batch, whole, block, heads, width)] if whole else []
    return parts + ([rows[:, whole * block :].unsqueeze(1)] if whole * block < rows.shape[1] else [])


def _means(x: torch.Tensor, first: int, block: int) -> torch.Tensor:
    means = [part.mean(2, dtype=wide(x.dtype)) for part in _per_block(x[:, first:], block)]
    return torch.cat(means, 1).transpose(1, 2).contiguous()


def _mean_squares(x: torch.Tensor, first: int, block: int) -> torch.Tensor:
    parts = _per_block(x[:, first:], block)
    squares = [torch.linalg.vector_norm(part, dim=2, dtype=wide(x.dtype)).square() / part.shape[2] for part in parts]
    return torch.cat(squares, 1).transpose(1, 2).contiguous()


def pool(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks) -> Pooled:
    """The means and variances of every block of video rows."""
    means = _means(key, blocks.first, blocks.block_k)
    variance = (_mean_squares(key, blocks.first, blocks.block_k) - means.square()).clamp_min(0)
    return Pooled(_means(query, blocks.first, blocks.block_q), means, variance, _means(value, blocks.first, blocks.block_k))


def priorities(pooled: Pooled, tail: str) -> torch.Tensor:
    """How much each key block deserves to be exact, (B, H, query blocks, key blocks): the log of what its summary would get wrong.

    A block weighs exp(mean logit + half the variance of its logits); its summary's error grows with their spread. Without a
    tail the whole block would be missing, so the spread does not matter.
    """
    scale = pooled.query.shape[-1] ** -0.5
    variance = (pooled.query.square() @ pooled.variance.transpose(-1, -2)) * scale**2
    weight: torch.Tensor = pooled.query @ pooled.key.transpose(-1, -2) * scale + (variance / 2).clamp_max(MAX_VARIANCE_TERM)
    return weight if tail == "none" else weight + variance.clamp_min(1e-12).log() / 2


def band_mask(blocks: Blocks, device: torch.device) -> torch.Tensor:
    """The local band as (query blocks, key blocks) bool."""
    mask = torch.zeros(blocks.num_q, blocks.num_k, dtype=torch.bool)
    for index in range(blocks.num_q):
        begin, end = blocks.band(index)
        mask[index, begin:end] = True
    return mask.to(device)


def mean_budget(budget: float, blocks: Blocks) -> int:
    """Key blocks per query block for a budget in (0, 1]: at least the local band."""
    return min(blocks.num_k, max(blocks.widest_band, round(budget * blocks.num_k)))


def list_width(budget: float, blocks: Blocks) -> int:
    """The longest list a head may get short of being dense."""
    return min(blocks.num_k, max(blocks.widest_band, round(MOST_FACTOR * budget * blocks.num_k)))


def head_budgets(weights: torch.Tensor, mean: int, least: int, most: int, group: int) -> torch.Tensor:
    """Budgets (H,) int32 in proportion to `weights` (H,), with mean `mean` within every `group` neighbouring heads.

    Groups never straddle ranks, so that a head's budget does not depend on how heads are split, and ranks carry equal loads.
    """
    if mean >= most:
        return torch.full_like(weights, mean, dtype=torch.int32)
    factor = weights.clamp_min(1e-12).view(-1, group)
    for _ in range(2):  # again after clipping
        factor = (factor / factor.mean(1, keepdim=True)).clamp(LEAST_FACTOR, MOST_FACTOR)
    budgets: torch.Tensor = (factor.flatten() * mean).round().clamp(least, most).to(torch.int32)
    return budgets


def select(scores: torch.Tensor, band: torch.Tensor, budgets: torch.Tensor, width: int) -> Route:
    """The best `budgets[h]` key blocks of every query block, its band among them, in lists of `width`; nothing waits for the device."""
    num_k = scores.shape[-1]
    best = scores.masked_fill(band, torch.inf).topk(width, -1).indices
    is_listed = torch.arange(width, device=scores.device) < budgets[:, None]
    lists = torch.where(is_listed[:, None], best, num_k).sort(-1).values
    kept = torch.zeros(*scores.shape[:-1], num_k + 1, dtype=torch.bool, device=scores.device)
    kept = kept.scatter_(-1, lists, True)[..., :num_k] | (budgets >= num_k)[:, None, None]
    return Route(budgets.clone(), lists.to(torch.int32), kept)  # budgets may change while the route is kept
