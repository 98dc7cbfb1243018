"""Which rows of Wan's sequence this process has, and in which order: tile order for sparse attention, a stretch of it for each rank.

Cross-attention, norms and feed-forward see rows one by one and need nothing; self-attention exchanges rows for heads, as H3's does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, _get_qkv_projections
from torch import nn

from caches.step_hook import replaced
from videogen.attention.install import Qkv
from videogen.parallel.sequence import Seats, UlyssesProcessor
from videogen.parallel.sharding import ALONE, Sharding
from videogen.transforms.scope import Forward, forward_as


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


class WanUlyssesProcessor(UlyssesProcessor):
    """Wan's processor protocol over the same exchange: self-attention of one block, (B, own rows, C) to (B, own rows, C)."""

    own_project = staticmethod(project)

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        """As the exchange does; there is no encoder in self-attention."""
        return super().__call__(attn, hidden_states, rotary_emb, attention_mask)


def seats(transformer: Any) -> Seats:
    """The self-attentions of its blocks."""
    return Seats(tuple(block.attn1 for block in transformer.blocks), WanAttnProcessor, WanUlyssesProcessor)


class _Rows(nn.Module):
    """A block stack on these rows of the sequence, in this order."""

    def __init__(self, blocks: Sequence[nn.Module], mine: torch.Tensor) -> None:
        super().__init__()
        self.blocks, self.mine = nn.ModuleList(blocks), mine

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, temb: torch.Tensor, rotary_emb: Any
    ) -> torch.Tensor:
        """As diffusers' loop over the blocks, (B, S, D) to (B, own rows, D); row-wise timesteps (TI2V) are those of the rows already."""
        rotary_emb = tuple(each[:, self.mine] for each in rotary_emb)
        out = hidden_states[:, self.mine]
        for block in self.blocks:
            out = block(out, encoder_hidden_states, temb, rotary_emb)
        return out


def _timed(mine: torch.Tensor) -> Callable[[Forward], Forward]:
    """Row-wise timesteps embedded for these rows alone; one timestep for all rows as it was."""

    def make(stock: Forward) -> Forward:
        def forward(timestep: torch.Tensor, *texts: Any, timestep_seq_len: int | None = None) -> Any:
            if timestep_seq_len is not None:
                timestep, timestep_seq_len = timestep.view(-1, timestep_seq_len)[:, mine].flatten(), len(mine)
            return stock(timestep, *texts, timestep_seq_len=timestep_seq_len)

        return forward

    return make


@contextmanager
def own_rows(transformers: Sequence[Any], total: int, order: torch.Tensor | None = None, sharding: Sharding = ALONE) -> Iterator[None]:
    """Inside the scope the block stacks run this rank's stretch of the `total` rows, in `order`; what comes out is whole and in place.

    The outermost of all scopes that replace the stack. One process without an order changes nothing.
    """
    if order is None and sharding is ALONE:
        yield
        return
    device, part = transformers[0].proj_out.weight.device, sharding.part(total)
    order = torch.arange(total) if order is None else order
    mine, back = order[part.begin : part.begin + part.size].to(device), order.argsort().to(device)

    def gathered(_head: nn.Module, _given: Any, out: torch.Tensor) -> torch.Tensor:
        return sharding.gather(out, total)[:, back]

    with ExitStack() as stack:
        for transformer in transformers:
            stack.enter_context(forward_as(transformer.condition_embedder, _timed(mine)))
            stack.enter_context(replaced(transformer, "blocks", [_Rows(list(transformer.blocks), mine)]))
            stack.callback(transformer.proj_out.register_forward_hook(gathered).remove)  # behind the hook of an adapter
        yield
