"""Block means and variances in one pass over a tensor: what `route.pool` computes, for a GPU."""

import torch

from videogen.attention import triton_kernels
from videogen.attention.blocks import Blocks
from videogen.attention.route import Pooled


@torch.library.custom_op("videogen::pool_blocks", mutates_args=())
def pool_blocks(x: torch.Tensor, first: int, block: int, has_variance: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of the blocks of x (B, S, H, D) from row `first` on: (B, H, blocks, D) float32; without variance, empty."""
    batch, rows, heads, width = x.shape
    count = -(-(rows - first) // block)
    mean = torch.empty(batch, heads, count, width, dtype=torch.float32, device=x.device)
    variance = torch.empty_like(mean) if has_variance else mean.new_empty(0)
    strides = x.stride()[:3]
    triton_kernels.pool_kernel[(batch * heads * count,)](
        x, mean, variance, *strides, heads, first, rows, count, D=width, BLOCK=block, HAS_VARIANCE=has_variance, num_warps=4
    )
    return mean, variance


@pool_blocks.register_fake
def _(x: torch.Tensor, first: int, block: int, has_variance: bool) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows, heads, width = x.shape
    mean = x.new_empty(batch, heads, -(-(rows - first) // block), width, dtype=torch.float32)
    return mean, torch.empty_like(mean) if has_variance else mean.new_empty(0)


def pool(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks) -> Pooled:
    """As `route.pool`."""
    mean_key, variance = pool_blocks(key, blocks.first, blocks.block_k, True)
    mean_query, _ = pool_blocks(query, blocks.first, blocks.block_q, False)
    mean_value, _ = pool_blocks(value, blocks.first, blocks.block_k, False)
    return Pooled(mean_query, mean_key, variance, mean_value)
