"""bfloat16 products on a CPU whose weights are float32: linears and attention of the block stack, about half a model's error.

The residual stream, norms, modulation and rotation stay float32. Attention runs in tiles of queries through bfloat16 products,
because torch's own CPU attention gains nothing from that format: its bfloat16 is as slow as its float32.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from videogen.transforms.scope import Forward, InPlaceOf, forward_as

SCORE_BYTES = 8 << 20  # of a tile: with fewer, threads wait for each other more often; with more, the caches are left behind
LOW = torch.bfloat16
Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32; where torch cannot say, it does not."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in checks)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax attention in tiles: queries scaled already, all (H, S, D) bfloat16; returns (S, H, D)."""
    heads, rows, _ = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    tile = -(-rows // -(-rows * key.shape[1] * query.element_size() // SCORE_BYTES))
    scores = torch.empty(tile, key.shape[1], dtype=query.dtype)
    for head in range(heads):
        for begin in range(0, rows, tile):
            stretch = query[head, begin : begin + tile]
            shares = scores[: len(stretch)]
            torch.mm(stretch, key[head].t(), out=shares)
            torch.softmax(shares, -1, out=shares)
            torch.mm(shares, value[head], out=out[head, begin : begin + tile])
    return out.transpose(0, 1)


class Bfloat16Processor(InPlaceOf):
    """H3's attention with bfloat16 products; masks and parallel layouts go to the processor that was there."""

    def __init__(self, inner: Any, attn: Any) -> None:
        self.inner = inner
        parts = (attn.to_q, attn.to_k, attn.to_v)
        self._plain = not any(part._forward_hooks or part._forward_pre_hooks for part in parts)  # no adapter beside the weights
        self._weight = torch.cat([part.weight for part in parts]).to(LOW) if self._plain else None
        scale = attn.head_dim**-0.5
        self._norm = torch.stack([attn.norm_q.weight * scale, attn.norm_k.weight])[:, None].float()  # (2, 1, D)

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any = None, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Diffusers' processor protocol: (1, S, C) to (1, S, C)."""
        if attention_mask is not None or self._parallel_config is not None or len(hidden_states) != 1 or rotary_emb is None:
            dense: torch.Tensor = self.inner(attn, hidden_states, rotary_emb, attention_mask)
            return dense
        query, key, value = self._heads(attn, hidden_states, rotary_emb)
        mixed: torch.Tensor = attn.to_out[0](attend(query, key, value).flatten(1)[None])
        return mixed

    def project(self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any) -> Qkv:
        """Queries, keys and values (1, S, H, D) for whoever attends in another way."""
        query, key, value = self._heads(attn, hidden_states, rotary_emb)
        return tuple(part.transpose(0, 1)[None].float() for part in (query * attn.head_dim**0.5, key, value))  # type: ignore[return-value]

    def _heads(self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any) -> Qkv:
        """Normed, rotated and (queries) scaled in float32, then rounded once: (H, S, D) each."""
        low = hidden_states[0].to(LOW)
        if self._weight is not None:
            packed = functional.linear(low, self._weight)
        else:
            packed = torch.cat([part(hidden_states)[0].to(LOW) for part in (attn.to_q, attn.to_k, attn.to_v)], -1)
        packed = packed.view(len(low), 3, attn.heads, -1)
        both = packed[:, :2].float()  # (S, 2, H, D)
        mean = torch.linalg.vector_norm(both, dim=-1, keepdim=True).square_().div_(both.shape[-1])
        both.mul_(mean.add_(attn.norm_q.eps).rsqrt_()).mul_(self._norm)
        cos, sin = (part[:, None, None] for part in rotary_emb)
        half = cos.shape[-1] // 2
        first, second = both[..., :half], both[..., half : 2 * half]
        out = torch.empty(2, attn.heads, *both.shape[::3], dtype=LOW)
        turned = out.permute(2, 0, 1, 3)
        torch.sub(first * cos[..., :half], second * sin[..., :half], out=turned[..., :half])
        torch.add(second * cos[..., half:], first * sin[..., half:], out=turned[..., half : 2 * half])
        turned[..., 2 * half :] = both[..., 2 * half :]
        return out[0], out[1], packed[:, 2].transpose(0, 1).contiguous()


def _low_linear(linear: nn.Linear, result: torch.dtype) -> Any:
    weight = linear.weight.to(LOW)
    bias = None if linear.bias is None else linear.bias.to(LOW)

    def make(_stock: Forward) -> Forward:
        def forward(rows: torch.Tensor) -> torch.Tensor:
            return functional.linear(rows.to(LOW), weight, bias).to(result)

        return forward

    return make


def refusal(transformer: Any) -> str:
    """Why the block stack cannot run so; empty when it can."""
    weight = transformer.transformer_blocks[0].ff.net[2].weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return f"weights are {str(weight.dtype).removeprefix('torch.')} on {weight.device.type}, not float32 on the CPU"
    if hasattr(weight, "to_local"):
        return "weights are sharded over ranks"
    if getattr(transformer.transformer_blocks[0].attn, "fused_projections", False):
        return "projections are fused"
    return ""


@contextmanager
def bfloat16_products(transformer: Any) -> Iterator[None]:
    """Inside the scope the block stack multiplies in bfloat16; weights, modules and hooks stay as they are."""
    with ExitStack() as stack:
        for block in transformer.transformer_blocks:
            attn, (gated, _, last) = block.attn, block.ff.net
            for linear, result in ((attn.to_out[0], torch.float32), (gated.proj, LOW), (last, torch.float32)):
                stack.enter_context(forward_as(linear, _low_linear(linear, result)))
            stack.callback(setattr, attn, "processor", attn.processor)
            attn.processor = Bfloat16Processor(attn.processor, attn)
        yield
