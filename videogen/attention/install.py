"""Puts sparse attention into a model's blocks for one request, through their attention processors, and takes it out again.

What it knows of H3 is the default of `Sites` and of the processor; another family brings its own.

Back end and parallel settings stay where diffusers looks for them. A dense layer runs the processor that was there before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import _templated_context_parallel_attention
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor, _apply_rotary_emb

from videogen.attention import flex, gather, triton_kernels, triton_pool, triton_sparse
from videogen.attention.blocks import Blocks
from videogen.attention.options import SparseAttention
from videogen.attention.route import pool
from videogen.attention.select import Choice, Machine, choose
from videogen.attention.state import DENSE, Agree, Heads, Layer, Request, open_request

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def project(attn: Any, hidden_states: torch.Tensor, rotary_emb: Any) -> Qkv:
    """H3's queries, keys and values (B, S, H, D), normed and rotated, as diffusers' processor makes them.

    A processor of another kind brings its own as `project(attn, hidden_states, rotary_emb)`.
    """
    if attn.fused_projections:
        parts = attn.to_qkv(hidden_states).chunk(3, dim=-1)
    else:
        parts = (attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
    query, key, value = (part.unflatten(-1, (attn.heads, -1)) for part in parts)
    query, key = attn.norm_q(query), attn.norm_k(key)
    if rotary_emb is not None:
        query, key = _apply_rotary_emb(query, *rotary_emb), _apply_rotary_emb(key, *rotary_emb)
    return query, key, value


class SparseProcessor:
    """Attends as its layer's mode says: through the processor that was there, or sparsely."""

    own_project = staticmethod(project)

    def __init__(self, inner: Any, request: Request, layer: Layer) -> None:
        self.inner, self.request, self.layer = inner, request, layer
        self.project = getattr(inner, "project", self.own_project)

    @property
    def _attention_backend(self) -> Any:
        return self.inner._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, value: Any) -> None:
        self.inner._attention_backend = value

    @property
    def _parallel_config(self) -> Any:
        return self.inner._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, value: Any) -> None:
        self.inner._parallel_config = value

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any = None, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Diffusers' processor protocol: (B, S, C) to (B, S, C)."""
        self.layer.has_run = True
        if attention_mask is not None and self.layer.mode != DENSE:
            self.request.refuse(self.layer, "an attention mask")
        if self.layer.mode == DENSE:
            dense: torch.Tensor = self.inner(attn, hidden_states, rotary_emb, attention_mask)
            return dense
        return self.sparse(attn, hidden_states, rotary_emb)

    def sparse(self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any) -> torch.Tensor:
        """Sparsely, over all rows with the heads of this rank where ranks share the sequence."""
        query, key, value = self.project(attn, hidden_states, rotary_emb)
        across = getattr(self.inner, "across", None)
        if across is not None:
            out = across(query, key, value, partial(self.request.attend, self.layer))
        elif self._parallel_config is None:
            out = self.request.attend(self.layer, query, key, value)
        else:
            out = _templated_context_parallel_attention(
                query, key, value, forward_op=self._heads_of_rank, backward_op=None, _parallel_config=self._parallel_config
            )
        out = attn.to_out[0](out.flatten(2, 3).type_as(query))
        mixed: torch.Tensor = attn.to_out[1](out)
        return mixed

    def _heads_of_rank(self, _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
        return self.request.attend(self.layer, query, key, value)


@dataclass(frozen=True, slots=True)
class Sites:
    """Where a transformer attends over its packed rows: the attention modules in order, the processor that is understood there, and
    the one that takes its place."""

    attentions: tuple[Any, ...]
    stock: type
    processor: type[SparseProcessor]


def h3_sites(transformer: Any) -> Sites:
    """Those of H3's blocks."""
    return Sites(tuple(block.attn for block in transformer.transformer_blocks), MiniMaxH3AttnProcessor, SparseProcessor)


def _parallel(attn: Any) -> tuple[int, int, Any]:
    """Ring degree, Ulysses degree, and the context-parallel settings in force (None without)."""
    config = getattr(attn.processor, "_parallel_config", None)
    config = None if config is None else config.context_parallel_config
    return (1, 1, None) if config is None else (config.ring_degree or 1, config.ulysses_degree or 1, config)


def settle(
    options: SparseAttention, transformer: Any, *, first: int, rows: int, grid: tuple[int, int, int], sites: Sites | None = None
) -> Choice:
    """How a request of this layout attends on this transformer: `choose` with the facts of the machine and the model.

    Raises what `choose` raises.
    """
    sites = sites or h3_sites(transformer)
    attn = sites.attentions[0]
    weight, processor = attn.to_out[0].weight, attn.processor
    device = transformer.proj_out.weight.device  # blocks may live elsewhere
    ring, ulysses, _ = _parallel(attn)
    machine = Machine(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        has_triton=triton_kernels.IS_AVAILABLE,
        dtype=str(weight.dtype).removeprefix("torch."),
        head_dim=getattr(attn, "head_dim", None) or attn.inner_dim // attn.heads,
        heads=attn.heads,
        ring=ring,
        ulysses=ulysses,
        processor="" if isinstance(processor, sites.stock) or hasattr(processor, "project") else type(processor).__name__,
    )
    return choose(options, machine, first=first, rows=rows, grid=grid)


def _agreement(attn: Any) -> tuple[Agree, Heads]:
    """Sums over the ranks that share a sequence, and this rank's heads: as its processor says, or by diffusers' own settings."""
    peers = getattr(attn.processor, "peers", None)
    if peers is not None:
        part = peers.part(attn.heads)
        return peers.agree, Heads(attn.heads, part.size, part.begin)
    _, ulysses, config = _parallel(attn)
    if config is None:
        return (lambda sums: sums), Heads(attn.heads, attn.heads)
    group, local = config._ulysses_mesh.get_group(), attn.heads // ulysses

    def agree(sums: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(sums, group=group)
        return sums

    return agree, Heads(attn.heads, local, int(config._ulysses_mesh.get_local_rank()) * local)


_IMPLEMENTATIONS = {
    "gather": (pool, gather.attend),
    "triton": (triton_pool.pool, triton_sparse.attend),
    "flex": (triton_pool.pool, flex.attend),
}


@contextmanager
def sparse_attention(
    transformer: Any, options: SparseAttention, choice: Choice, rows: int, forwards: int, sites: Sites | None = None
) -> Iterator[Request | None]:
    """Inside the scope the block stack attends as `choice` says; the processors are back afterwards in any case.

    `rows` of the packed sequence, in the order that `choice.tile` gives; `forwards` of the whole schedule. Yields what the request
    keeps, None when it stays dense, and then touches nothing.
    """
    if not choice.is_sparse:
        yield None
        return
    sites = sites or h3_sites(transformer)
    attentions = sites.attentions
    before = [attn.processor for attn in attentions]
    agree, heads = _agreement(attentions[0])
    blocks = Blocks(choice.first, rows, *choice.block)
    device, implementation = transformer.proj_out.weight.device, _IMPLEMENTATIONS[choice.backend]
    request = open_request(
        options, choice, blocks, heads, len(attentions), device, implementation=implementation, forwards=forwards, agree=agree
    )
    hooks = [
        transformer.register_forward_pre_hook(lambda *_: request.begin()),
        transformer.register_forward_hook(lambda *_: request.end()),
    ]
    try:
        for attn, inner, layer in zip(attentions, before, request.layers):
            attn.processor = sites.processor(inner, request, layer)
        yield request
    finally:
        for hook in hooks:
            hook.remove()
        for attn, inner in zip(attentions, before):
            attn.processor = inner


def dense_record(options: SparseAttention, choice: Choice) -> dict[str, Any]:
    """The sidecar's `attention` entry of a request that ran dense from end to end."""
    return {"budget": options.budget, "backend": "dense", "reason": choice.reason}
