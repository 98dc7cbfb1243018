"""Sparse attention through compiled flex_attention on the same lists, the tail merged in by log-sum-exp.

Eager flex_attention ignores a block list that comes without a mask function and returns dense attention without a word; so this
is used compiled only, and proves once a process on a small case that blocks are really skipped.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from videogen.attention import triton_sparse
from videogen.attention.blocks import Blocks
from videogen.attention.reference import tail_logits
from videogen.attention.route import Pooled, Route
from videogen.errors import EnvironmentFault, say

BLOCK = 128  # rows; sinks must fill whole blocks too


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@cache
def prove(device: torch.device) -> None:
    """One query block that may see one of two key blocks must not see the other.

    Raises EnvironmentFault when it does: compilation is switched off.
    """
    value = torch.arange(2.0, device=device).repeat_interleave(BLOCK)[None, None, :, None].expand(1, 1, -1, 16).contiguous()
    lists = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32, device=device)[None, None]
    mask = _mask(torch.ones(1, 1, 2, dtype=torch.int32, device=device), lists, 2 * BLOCK)
    out = _compiled()(value * 0, value * 0, value, block_mask=mask)
    if not torch.equal(out[..., 0], value[..., 0]):
        raise EnvironmentFault(say("flex_attention", "dense attention", "skipped blocks", "allow torch.compile, or use another back end"))


def _mask(counts: torch.Tensor, lists: torch.Tensor, rows: int) -> BlockMask:
    """Full blocks only; lists (B, H, query blocks, key blocks) at full width."""
    return BlockMask.from_kv_blocks(
        torch.zeros_like(counts), lists, counts, lists, BLOCK_SIZE=BLOCK, seq_lengths=(rows, rows), compute_q_blocks=False
    )


def block_mask(blocks: Blocks, route: Route) -> BlockMask:
    """The route as flex's lists over the whole sequence: sinks see all and are seen by all.

    Raises ValueError for blocks other than 128x128, or sinks that do not fill blocks.
    """
    if (blocks.block_q, blocks.block_k, blocks.first % BLOCK) != (BLOCK, BLOCK, 0):
        raise ValueError(f"flex blocks: got {blocks}, expected {BLOCK}x{BLOCK} from a multiple of {BLOCK} on; choose blocks by `select`")
    sinks, total = blocks.first // BLOCK, -(-blocks.rows // BLOCK)
    batch, heads = route.kept.shape[:2]
    seen = torch.ones(batch, heads, total, total, dtype=torch.bool, device=route.kept.device)
    seen[..., sinks:, sinks:] = route.kept
    lists = seen.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices.to(torch.int32)
    return _mask(seen.sum(-1, dtype=torch.int32), lists, blocks.rows)


def exact_part(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the listed blocks: (B, S, H, D) and log-sum-exp (B, H, S)."""
    prove(query.device)
    out, lse = _compiled()(*(x.transpose(1, 2) for x in (query, key, value)), block_mask=mask, return_lse=True)
    return out.transpose(1, 2), lse


def summaries(query: torch.Tensor, blocks: Blocks, route: Route, pooled: Pooled, tail: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the video rows over the blocks that are not kept: (B, rows, H, D) and (B, H, rows)."""
    if query.is_cuda:
        return triton_sparse.summaries(query, blocks, route, pooled, tail)
    outs, lses = [], []
    for index in range(blocks.num_q):
        begin = blocks.first + index * blocks.block_q
        q = query[:, begin : begin + blocks.block_q].transpose(1, 2).to(pooled.key.dtype)
        logits = tail_logits(q, pooled, blocks, tail).masked_fill(route.kept[:, :, index, None], -torch.inf)
        lses.append(logits.logsumexp(-1))
        weights = (logits - lses[-1].nan_to_num(neginf=0.0)[..., None]).exp()  # all zero where everything is kept
        outs.append((weights @ pooled.value).transpose(1, 2).to(query.dtype))
    return torch.cat(outs, 1), torch.cat(lses, -1)


def merged(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys as attention over both."""
    both = torch.logaddexp(lse, other_lse)
    share = (other_lse - both).exp().transpose(1, 2)[..., None]
    return (out + (other - out) * share).to(out.dtype), both


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks, route: Route, pooled: Pooled, tail: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, S, H, D) of all rows, and log-sum-exp (B, H, rows) of the video rows."""
    out, lse = exact_part(query, key, value, block_mask(blocks, route))
    lse = lse[..., blocks.first :]
    if tail != "none":
        rest = summaries(query, blocks, route, pooled, tail)
        video, lse = merged(out[:, blocks.first :], lse, *rest)
        out = torch.cat([out[:, : blocks.first], video], 1)
    return out, lse
