"""Sparse attention that gathers the kept blocks, in plain torch: it really skips work and runs anywhere.

Made for the CPU and the embedded model; one head at a time, and it reads the budgets on the host.
"""

import torch
from torch.nn.functional import pad

from videogen.attention.blocks import Blocks
from videogen.attention.dense import dense
from videogen.attention.reference import tail_logits
from videogen.attention.route import Pooled, Route, wide

_MOST_LOGITS = 400_000  # of one chunk of query blocks: they stay in the cache


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks, route: Route, pooled: Pooled, tail: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, S, H, D) of all rows, and log-sum-exp (B, H, rows) of the video rows."""
    batch, rows, heads, width = query.shape
    out = query.new_empty(batch, rows, heads, width)
    out[:, : blocks.first] = dense(query[:, : blocks.first], key, value)
    video = out[:, blocks.first :]
    lse = torch.empty(batch, heads, blocks.num_video, dtype=wide(query.dtype), device=query.device)
    for head, budget in enumerate(route.budgets.tolist()):
        for item in range(batch):
            q, k, v = (x[item, :, head].to(lse.dtype) for x in (query, key, value))
            summary = Pooled(*(getattr(pooled, name)[item, head] for name in ("query", "key", "variance", "value")))
            if budget >= blocks.num_k:
                video[item, :, head], lse[item, head] = _dense(q[blocks.first :], k, v)
                continue
            lists, kept = route.lists[item, head, :, :budget].long(), route.kept[item, head]
            video[item, :, head], lse[item, head] = _sparse(q, k, v, blocks, lists, kept, summary, tail)
    return out, lse


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = q @ k.T * q.shape[-1] ** -0.5
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def _cut(rows: torch.Tensor, block: int, count: int) -> torch.Tensor:
    """(rows, D) as (count, block, D), zeros behind the last row."""
    return pad(rows, (0, 0, 0, count * block - rows.shape[0])).view(count, block, -1)


def _sparse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: Blocks,
    lists: torch.Tensor,
    kept: torch.Tensor,
    summary: Pooled,
    tail: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One head: q, k, v (S, D); lists (query blocks, n); kept (query blocks, key blocks). Output (rows, D), log-sum-exp (rows,)."""
    first, count = blocks.first, lists.shape[1]
    queries = _cut(q[first:], blocks.block_q, blocks.num_q)
    keys, values = (_cut(x[first:], blocks.block_k, blocks.num_k) for x in (k, v))
    is_row = _cut(torch.ones_like(q[first:, :1]), blocks.block_k, blocks.num_k)[..., 0].bool()
    step = max(1, _MOST_LOGITS // (blocks.block_q * (first + count * blocks.block_k + blocks.num_k)))
    outs, lses = [], []
    for begin in range(0, blocks.num_q, step):
        part, chosen = queries[begin : begin + step], lists[begin : begin + step]
        near = part @ keys[chosen].flatten(1, 2).transpose(1, 2)  # (query blocks, block_q, n * block_k)
        near = near.masked_fill_(~is_row[chosen].flatten(1)[:, None], -torch.inf)
        logits = [part @ k[:first].T, near]
        logits = [each * q.shape[-1] ** -0.5 for each in logits]
        if tail != "none":
            logits.append(tail_logits(part, summary, blocks, tail).masked_fill_(kept[begin : begin + step, None], -torch.inf))
        joined = torch.cat(logits, -1)
        lses.append(joined.logsumexp(-1))
        weights = joined.softmax(-1)
        out = weights[..., :first] @ v[:first]
        out += weights[..., first : first + near.shape[-1]] @ values[chosen].flatten(1, 2)
        if tail != "none":
            out += weights[..., first + near.shape[-1] :] @ summary.value.to(out)
        outs.append(out)
    return torch.cat(outs).flatten(0, 1)[: blocks.num_video], torch.cat(lses).flatten()[: blocks.num_video]
