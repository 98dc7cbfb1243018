"""Sparse attention in Wan: over the rows of self-attention only, which cross-attention to the text never sees.

All rows are video rows. A given first frame (TI2V) is exact both ways, as H3's conditioning is. The two streams of guidance share one
request of each expert: budgets and guard hold for both. Rows are put in tile order once around the block stack, and back behind it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, _get_qkv_projections
from torch import nn

from caches.step_hook import replaced
from videogen.attention.install import Qkv, Sites, SparseProcessor, dense_record, settle, sparse_attention
from videogen.attention.options import SparseAttention
from videogen.attention.order import snake_order
from videogen.attention.state import DENSE
from videogen.families.wan_cache import Schedule


def project(attn: Any, hidden_states: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor]) -> Qkv:
    """Wan's queries, keys and values (B, S, H, D), normed over all heads and rotated, as diffusers' processor makes them."""
    query, key, value = _get_qkv_projections(attn, hidden_states, None)
    query, key, value = (x.view(*x.shape[:2], attn.heads, -1) for x in (attn.norm_q(query), attn.norm_k(key), value))
    return _rotated(query, rotary_emb), _rotated(key, rotary_emb), value


def _rotated(x: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Pairs (even, odd) of channels turned; cosines and sines are given for every channel."""
    cos, sin = rotary_emb[0][..., 0::2], rotary_emb[1][..., 1::2]
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


class WanSparseProcessor(SparseProcessor):
    """Wan's processor protocol over the same request: self-attention of one block, (B, S, C) to (B, S, C)."""

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        """Through the processor that was there, or sparsely."""
        self.layer.has_run = True
        if attention_mask is not None and self.layer.mode != DENSE:
            self.request.refuse(self.layer, "an attention mask")
        if self.layer.mode == DENSE:
            dense: torch.Tensor = self.inner(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
            return dense
        out = self.request.attend(self.layer, *project(attn, hidden_states, rotary_emb))
        mixed: torch.Tensor = attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(hidden_states)))
        return mixed


class _InOrder(nn.Module):
    """A block stack whose rows come in another order and leave in their own."""

    def __init__(self, blocks: Sequence[nn.Module], order: torch.Tensor) -> None:
        super().__init__()
        self.blocks, self.order, self.back = nn.ModuleList(blocks), order, order.argsort()

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, temb: torch.Tensor, rotary_emb: Any
    ) -> torch.Tensor:
        """As diffusers' loop over the blocks; row-wise timesteps (TI2V) and rotations follow the rows."""
        rotary_emb = tuple(each[:, self.order] for each in rotary_emb)
        temb = temb[:, self.order] if temb.ndim == 4 else temb
        out = hidden_states[:, self.order]
        for block in self.blocks:
            out = block(out, encoder_hidden_states, temb, rotary_emb)
        return out[:, self.back]


def sites(transformer: Any) -> Sites:
    """The self-attentions of its blocks."""
    return Sites(tuple(block.attn1 for block in transformer.blocks), WanAttnProcessor, WanSparseProcessor)


@contextmanager
def wan_sparse(
    transformers: Sequence[Any], found: Sequence[Sites], options: SparseAttention, schedule: Schedule | None
) -> Iterator[dict[str, Any]]:
    """Sparse attention around the denoising loop, outside the step cache; yields its record, filled at the end.

    `found` are the sites of each expert, looked up before anything replaced the blocks.
    """
    told: dict[str, Any] = {}
    if schedule is None or not options.is_on:
        yield told
        told |= {"budget": options.budget, "backend": "dense", "reason": "off"}
        return
    choice = settle(options, transformers[0], first=schedule.begin, rows=schedule.end, grid=schedule.grid, sites=found[0])
    if not choice.is_sparse:
        yield told
        told |= dense_record(options, choice)
        return
    device = transformers[0].proj_out.weight.device
    order = torch.cat([torch.arange(schedule.begin), schedule.begin + snake_order(schedule.grid, choice.tile)]).to(device)
    forwards, starts = schedule.steps * len(schedule.streams), (0, schedule.boundary_step * len(schedule.streams))
    with ExitStack() as stack:
        requests = []
        for transformer, each, start in zip(transformers, found, starts):
            request = stack.enter_context(sparse_attention(transformer, options, choice, schedule.end, forwards, each))
            assert request is not None
            request.step = request.executed = start  # what of the schedule lies before this expert
            requests.append(request)
            stack.enter_context(replaced(transformer, "blocks", [_InOrder(list(transformer.blocks), order)]))
        yield told
        records = [request.record() for request in requests]
    reasons = [record["reason"] for record in records if record["reason"]]
    told |= records[-1] | {"experts": records, "reason": reasons[0] if len(reasons) == len(records) else ""}
