"""Sparse attention in Wan: over the rows of self-attention only, which cross-attention to the text never sees.

All rows are video rows. A given first frame (TI2V) is exact both ways, as H3's conditioning is. The two streams of guidance share one
request of each expert: budgets and guard hold for both. Rows are put in tile order once around the block stack, and back behind it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from videogen.attention.install import Sites, SparseProcessor, dense_record, settle, sparse_attention
from videogen.attention.options import SparseAttention
from videogen.attention.order import snake_order
from videogen.attention.state import DENSE
from videogen.families.wan_cache import Schedule
from videogen.families.wan_sequence import own_rows, project
from videogen.parallel.sharding import ALONE, Sharding


class WanSparseProcessor(SparseProcessor):
    """Wan's processor protocol over the same request: self-attention of one block, (B, S, C) to (B, S, C)."""

    own_project = staticmethod(project)

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
        return self.sparse(attn, hidden_states, rotary_emb)


def sites(transformer: Any) -> Sites:
    """The self-attentions of its blocks."""
    return Sites(tuple(block.attn1 for block in transformer.blocks), WanAttnProcessor, WanSparseProcessor)


@contextmanager
def wan_sparse(
    transformers: Sequence[Any], found: Sequence[Sites], options: SparseAttention, schedule: Schedule | None, sharding: Sharding = ALONE
) -> Iterator[dict[str, Any]]:
    """Sparse attention around the denoising loop, outside the step cache, and the rows it runs on; yields its record, filled at the end.

    `found` are the sites of each expert, looked up before anything replaced the blocks.
    """
    told: dict[str, Any] = {}
    if schedule is None or not options.is_on:
        with own_rows(transformers, 0 if schedule is None else schedule.end, sharding=sharding):
            yield told
        told |= {"budget": options.budget, "backend": "dense", "reason": "off"}
        return
    choice = settle(options, transformers[0], first=schedule.begin, rows=schedule.end, grid=schedule.grid, sites=found[0])
    if not choice.is_sparse:
        with own_rows(transformers, schedule.end, sharding=sharding):
            yield told
        told |= dense_record(options, choice)
        return
    order = torch.cat([torch.arange(schedule.begin), schedule.begin + snake_order(schedule.grid, choice.tile)])
    forwards, starts = schedule.steps * len(schedule.streams), (0, schedule.boundary_step * len(schedule.streams))
    with ExitStack() as stack:
        requests = []
        for transformer, each, start in zip(transformers, found, starts):
            request = stack.enter_context(sparse_attention(transformer, options, choice, schedule.end, forwards, each))
            assert request is not None
            request.step = request.executed = start  # what of the schedule lies before this expert
            requests.append(request)
        with own_rows(transformers, schedule.end, order, sharding):
            yield told
        records = [request.record() for request in requests]
    reasons = [record["reason"] for record in records if record["reason"]]
    told |= records[-1] | {"experts": records, "reason": reasons[0] if len(reasons) == len(records) else ""}
