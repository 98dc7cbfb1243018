"""The video decoder's transformer blocks with their elementwise work through `kernels.ops`; linears and attention are the model's own.

The residual stream stays float32 as in diffusers; each operation reads and writes it once instead of once per step.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3 import MiniMaxH3VideoAttnProcessor
from diffusers.models.modeling_utils import get_parameter_dtype

from videogen.kernels.ops import Ops
from videogen.transforms.fused_blocks import gated_forward
from videogen.transforms.scope import Forward, InPlaceOf, forward_as


class FusedVideoProcessor(InPlaceOf):
    """Diffusers' processor with norm and rotation of queries and keys in one operation; the back end is the inner one's."""

    def __init__(self, inner: MiniMaxH3VideoAttnProcessor, ops: Ops) -> None:
        self.inner, self.ops = inner, ops

    def __call__(self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any = None) -> torch.Tensor:
        """Diffusers' processor protocol: (B, S, C) to (B, S, C); every clip of a batch has the same angles."""
        if rotary_emb is None:
            stock: torch.Tensor = self.inner(attn, hidden_states, rotary_emb)
            return stock
        query, key, value = (to(hidden_states).unflatten(2, (attn.heads, -1)) for to in (attn.to_q, attn.to_k, attn.to_v))
        cos, sin = (angles[0, :, 0] for angles in rotary_emb)
        one = torch.ones(attn.dim_head, dtype=query.dtype, device=query.device)
        query, key = (self.ops.qk_rotate(part, one, norm.eps, cos, sin) for part, norm in ((query, attn.norm_q), (key, attn.norm_k)))
        out = dispatch_attention_fn(
            query, key, value, attn_mask=None, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        mixed: torch.Tensor = attn.to_out[0](out.flatten(2, 3))
        return mixed


def _block_forward(block: Any, ops: Ops) -> Any:
    def make(_stock: Forward) -> Forward:
        def forward(hidden_states: torch.Tensor, rotary_emb: Any = None) -> torch.Tensor:
            dtype = get_parameter_dtype(block.attn.to_q)
            hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, block.scale1.dtype))  # the stream, as its sum is
            only = torch.zeros(hidden_states.shape[1], dtype=torch.long, device=hidden_states.device)  # one gate for all rows
            normed = ops.rms_norm(hidden_states.float(), block.norm1.weight, block.norm1.eps, dtype)
            hidden_states = ops.gated_add(hidden_states, block.attn(normed, rotary_emb), block.scale1[None], only)
            normed = ops.rms_norm(hidden_states.float(), block.norm2.weight, block.norm2.eps, dtype)
            return ops.gated_add(hidden_states, block.ff(normed), block.scale2[None], only)

        return forward

    return make


@contextmanager
def fused_decoder(vae: Any, ops: Ops) -> Iterator[None]:
    """Inside the scope every decoder block computes through `ops`; a processor that is not the stock one stays."""
    with ExitStack() as stack:
        for block in vae.decoder.transformer_blocks:
            stack.enter_context(forward_as(block, _block_forward(block, ops)))
            stack.enter_context(forward_as(block.ff.net[0], gated_forward(block.ff.net[0], ops)))
            if type(block.attn.processor) is MiniMaxH3VideoAttnProcessor:
                stack.callback(setattr, block.attn, "processor", block.attn.processor)
                block.attn.processor = FusedVideoProcessor(block.attn.processor, ops)
        yield
