"""H3's block stack with its elementwise work through `kernels.ops`; linears, attention and their hooks are the model's own."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor

from videogen.kernels.ops import Ops
from videogen.transforms.scope import Forward, InPlaceOf, forward_as

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class FusedProcessor(InPlaceOf):
    """Diffusers' processor with norm and rotation of queries and keys in one operation; back end and layout are the inner one's."""

    def __init__(self, inner: MiniMaxH3AttnProcessor, ops: Ops) -> None:
        self.inner, self.ops = inner, ops

    def project(self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any) -> Qkv:
        """Queries, keys and values (B, S, H, D), normed and rotated."""
        if attn.fused_projections:
            parts = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            parts = (attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
        query, key, value = (part.unflatten(-1, (attn.heads, -1)) for part in parts)
        query, key = (
            self.ops.qk_rotate(part, norm.weight, norm.eps, *rotary_emb) for part, norm in ((query, attn.norm_q), (key, attn.norm_k))
        )
        return query, key, value

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any = None, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Diffusers' processor protocol: (B, S, C) to (B, S, C)."""
        if rotary_emb is None:
            stock: torch.Tensor = self.inner(attn, hidden_states, rotary_emb, attention_mask)
            return stock
        query, key, value = self.project(attn, hidden_states, rotary_emb)
        out = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        mixed: torch.Tensor = attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(query)))
        return mixed


def _block_forward(block: Any, ops: Ops) -> Any:
    def make(_stock: Forward) -> Forward:
        def forward(
            hidden_states: torch.Tensor,
            temb: torch.Tensor,
            adaln_indices: torch.Tensor,
            rotary_emb: Any,
            attention_mask: torch.Tensor | None = None,
        ) -> torch.Tensor:
            shift, scale, gate, shift_ff, scale_ff, gate_ff = block.adaln_proj(temb)
            normed = ops.rms_modulate(hidden_states, block.norm1.weight, block.norm1.eps, scale, shift, adaln_indices)
            hidden_states = ops.gated_add(hidden_states, block.attn(normed, rotary_emb, attention_mask), gate, adaln_indices)
            normed = ops.rms_modulate(hidden_states, block.norm2.weight, block.norm2.eps, scale_ff, shift_ff, adaln_indices)
            return ops.gated_add(hidden_states, block.ff(normed), gate_ff, adaln_indices)

        return forward

    return make


def gated_forward(gated: Any, ops: Ops) -> Any:
    """The gated half of a feed-forward network, for `forward_as`."""
    return lambda _stock: lambda rows: ops.swiglu(gated.proj(rows))


@contextmanager
def fused_blocks(transformer: Any, ops: Ops) -> Iterator[None]:
    """Inside the scope every block computes through `ops`; a processor that is not the stock one stays."""
    with ExitStack() as stack:
        for block in transformer.transformer_blocks:
            stack.enter_context(forward_as(block, _block_forward(block, ops)))
            stack.enter_context(forward_as(block.ff.net[0], gated_forward(block.ff.net[0], ops)))
            if type(block.attn.processor) is MiniMaxH3AttnProcessor:
                stack.callback(setattr, block.attn, "processor", block.attn.processor)
                block.attn.processor = FusedProcessor(block.attn.processor, ops)
        yield
