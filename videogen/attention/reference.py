"""What sparse attention is: the definition in plain torch, any dtype and length. Every other implementation is compared with it.

A video query attends exactly to the sinks and to the rows of its kept blocks. A block that is not kept stands as one column with
the logit of its mean key plus log n, plus half the variance of its logits (clamped), and its mean value: the second-order
expansion of log-sum-exp over the block, for keys of uncorrelated channels. Rows before `first` attend to everything.
"""

from collections.abc import Sequence

import torch

from videogen.attention.blocks import Blocks
from videogen.attention.route import MAX_VARIANCE_TERM, Pooled, Route, wide


def tail_logits(query: torch.Tensor, pooled: Pooled, blocks: Blocks, tail: str) -> torch.Tensor:
    """Logits (..., rows, key blocks) of the summary columns for query rows (..., rows, D), with pooled (..., key blocks, D)."""
    scale = query.shape[-1] ** -0.5
    logits: torch.Tensor = query @ pooled.key.transpose(-1, -2).to(query) * scale
    if tail == "variance":
        spread = query.square() @ pooled.variance.transpose(-1, -2).to(query) * (0.5 * scale**2)
        logits = logits + spread.clamp_max(MAX_VARIANCE_TERM)
    sizes = torch.full((blocks.num_k,), float(blocks.block_k), dtype=query.dtype, device=query.device)
    sizes[-1] = blocks.last_k
    return logits + sizes.log()


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Blocks,
    route: Route,
    pooled: Pooled,
    tail: str,
    query_blocks: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, rows, H, D) and log-sum-exp (B, H, rows) of the video rows, or of those of `query_blocks`.

    query, key, value are (B, S, H, D). Computed in float32 or wider; memory grows with rows times S.
    """
    chosen = torch.arange(blocks.num_q) if query_blocks is None else torch.tensor(query_blocks)
    rows = (chosen[:, None] * blocks.block_q + torch.arange(blocks.block_q)).flatten()
    rows = rows[rows < blocks.num_video].to(query.device)
    dtype = wide(query.dtype)
    q = query[:, blocks.first + rows].to(dtype).transpose(1, 2)
    k, v = key.to(dtype).transpose(1, 2), value.to(dtype).transpose(1, 2)
    kept = route.kept[:, :, rows // blocks.block_q]  # (B, H, rows, key blocks)
    is_exact = kept.repeat_interleave(blocks.block_k, -1)[..., : blocks.num_video]
    is_exact = torch.cat([is_exact.new_ones(*is_exact.shape[:-1], blocks.first), is_exact], -1)
    logits = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~is_exact, -torch.inf)
    if tail != "none":
        summary = tail_logits(q, pooled, blocks, tail).masked_fill(kept, -torch.inf)
        logits, v = torch.cat([logits, summary], -1), torch.cat([v, pooled.value.to(v)], -2)
    return (logits.softmax(-1) @ v).transpose(1, 2).to(query.dtype), logits.logsumexp(-1)
