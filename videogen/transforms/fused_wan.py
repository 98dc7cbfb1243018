"""Wan's block stack with its elementwise work through `kernels.wan`; linears, attention and their hooks are the model's own."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, _get_qkv_projections
from torch import nn

from videogen.kernels.wan import WanOps
from videogen.transforms.scope import Forward, forward_as

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class WanFusedProcessor:
    """Diffusers' processor of self-attention with norm and rotation of queries and keys in one operation."""

    _parallel_config = None

    def __init__(self, inner: WanAttnProcessor, ops: WanOps) -> None:
        self.inner, self.ops = inner, ops

    @property
    def _attention_backend(self) -> Any:
        return self.inner._attention_backend

    def project(self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any) -> Qkv:
        """Queries, keys and values (B, S, H, D), normed over all heads and rotated."""
        query, key, value = _get_qkv_projections(attn, hidden_states, None)
        query, key = (
            self.ops.norm_rotate(part, norm.weight, norm.eps, *rotary_emb) for part, norm in ((query, attn.norm_q), (key, attn.norm_k))
        )
        return query, key, value.unflatten(-1, (attn.heads, -1))

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        """Diffusers' processor protocol: (B, S, C) to (B, S, C)."""
        query, key, value = self.project(attn, hidden_states, rotary_emb)
        out = dispatch_attention_fn(query, key, value, attn_mask=attention_mask, backend=self._attention_backend)
        mixed: torch.Tensor = attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(query)))
        return mixed


def stock_of(attn: Any) -> Any:
    """The stock processor of an attention, which knows the back end, whether or not another stands in its place."""
    return getattr(attn.processor, "inner", attn.processor)


def _block_forward(block: Any, ops: WanOps) -> Any:
    def make(_stock: Forward) -> Forward:
        def forward(hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, temb: torch.Tensor, rotary_emb: Any) -> torch.Tensor:
            shift, scale, gate, shift_ff, scale_ff, gate_ff = _tables(block.scale_shift_table, temb)
            normed = ops.layer_modulate(hidden_states, block.norm1.eps, scale, shift)
            hidden_states = ops.gate_add(hidden_states, block.attn1(normed, None, None, rotary_emb), gate)
            normed = hidden_states
            if not isinstance(block.norm2, nn.Identity):
                normed = ops.layer_norm(hidden_states, block.norm2.eps, block.norm2.weight, block.norm2.bias)
            hidden_states = hidden_states + block.attn2(normed, encoder_hidden_states, None, None)
            normed = ops.layer_modulate(hidden_states, block.norm3.eps, scale_ff, shift_ff)
            return ops.gate_add(hidden_states, block.ffn(normed), gate_ff)

        return forward

    return make


def _tables(own: torch.Tensor, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The six of a block, for all rows (B, 1, D) or by row (B, S, D), float32."""
    if temb.ndim == 4:
        return tuple(each.squeeze(2) for each in (own.unsqueeze(0) + temb.float()).chunk(6, dim=2))
    return (own + temb.float()).chunk(6, dim=1)


@contextmanager
def fused_wan(transformer: Any, ops: WanOps) -> Iterator[None]:
    """Inside the scope every block computes through `ops`; a processor that is not the stock one stays."""
    with ExitStack() as stack:
        for block in transformer.blocks:
            stack.enter_context(forward_as(block, _block_forward(block, ops)))
            if type(block.attn1.processor) is WanAttnProcessor:
                stack.callback(setattr, block.attn1, "processor", block.attn1.processor)
                block.attn1.processor = WanFusedProcessor(block.attn1.processor, ops)
        yield
