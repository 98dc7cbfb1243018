"""One clip over several ranks: every rank has the whole model and a stretch of the packed rows, and attends to all rows with some heads.

Ulysses (Jacobs et al. 2023, arXiv 2309.14509) with rows and heads in shares that differ by one, so any length and any head count
does: nothing is padded, nothing masked. It is a scope around one request; the model knows nothing of ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor
from torch import nn

from caches.step_hook import replaced
from videogen.attention.install import Qkv, project
from videogen.errors import EnvironmentFault, say
from videogen.parallel.comm import Peers
from videogen.parallel.mesh import Part, shares
from videogen.progress import StopFlag
from videogen.transforms.decode import Decode
from videogen.transforms.encodings import Values
from videogen.transforms.scope import Forward, forward_as

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
GROUPS = 4  # head groups of one exchange: attention of one runs while the next ones are under way


@dataclass(slots=True)
class _SharedStop(StopFlag):
    """A stop that one rank wants is taken by all of them at the same step."""

    flag: StopFlag | None = None
    peers: Peers | None = None

    def check(self) -> None:
        """Ask the peers, then raise as a StopFlag does."""
        assert self.flag is not None and self.peers is not None
        self.wanted = self.peers.any(self.flag.wanted)
        StopFlag.check(self)


@dataclass(frozen=True, slots=True)
class Seats:
    """Where a transformer attends over its packed rows, the processor that is understood there, and the one that exchanges."""

    attentions: tuple[Any, ...]
    stock: type
    processor: "type[UlyssesProcessor]"


def h3_seats(transformer: Any) -> Seats:
    """Those of H3's blocks."""
    return Seats(tuple(block.attn for block in transformer.transformer_blocks), MiniMaxH3AttnProcessor, UlyssesProcessor)


@dataclass(frozen=True, slots=True)
class Ulysses:
    """`Sharding` over these peers; groups is how many head groups an exchange is cut into."""

    peers: Peers
    groups: int = GROUPS

    @property
    def label(self) -> str:
        """`ulysses N`."""
        return f"ulysses {self.peers.count}"

    @contextmanager
    def attention(self, transformer: Any, rows: int, seats: Seats | None = None) -> Iterator[None]:
        """Every block exchanges rows for heads around its attention; processors are back afterwards.

        Raises EnvironmentFault for more ranks than heads or rows.
        """
        seats = seats or h3_seats(transformer)
        attentions = seats.attentions
        if self.peers.count > min(attentions[0].heads, rows):
            expected = f"at most {min(attentions[0].heads, rows)} (heads, rows)"
            raise EnvironmentFault(say("ranks of one clip", self.peers.count, expected, "use more replicas of fewer ranks"))
        before = [attn.processor for attn in attentions]
        if not all(isinstance(each, seats.stock) or hasattr(each, "project") for each in before):
            raise EnvironmentFault(say("attention processor", type(before[0]).__name__, "one that says how it projects", "use one rank"))
        try:
            for attn, inner in zip(attentions, before):
                attn.processor = seats.processor(inner, self.peers, self.peers.part(rows), self.groups)
            yield
        finally:
            for attn, inner in zip(attentions, before):
                attn.processor = inner

    @contextmanager
    def stack(self, transformer: Any, rows: int) -> Iterator[None]:
        """The block stack and the output norm see this rank's rows; the two output heads give everyone's."""
        part = self.peers.part(rows)

        def normed(stock: Forward) -> Forward:
            return lambda hidden, temb, indices: stock(hidden, temb, indices.narrow(0, part.begin, part.size))

        def gathered(_head: nn.Module, _given: Any, out: torch.Tensor) -> torch.Tensor:
            return self.peers.gather(out, part)

        with ExitStack() as stack:
            stack.enter_context(replaced(transformer, "transformer_blocks", [_Rows(list(transformer.transformer_blocks), part)]))
            stack.enter_context(forward_as(transformer.norm_out, normed))
            for head in (transformer.proj_out, transformer.audio_proj_out):  # behind the hook of an adapter, which sees this rank's rows
                stack.callback(head.register_forward_hook(gathered).remove)
            yield

    def part(self, total: int) -> Part:
        """A share that is one longer or shorter than the others' at most."""
        return self.peers.part(total)

    def gather(self, rows: torch.Tensor, total: int) -> torch.Tensor:
        """In rank order."""
        return self.peers.gather(rows, self.peers.part(total))

    def own(self, rows: torch.Tensor, total: int) -> torch.Tensor:
        """Those of this rank, counted from its first row."""
        part = self.peers.part(total)
        return rows[(rows >= part.begin) & (rows < part.begin + part.size)] - part.begin

    def agree(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over the peers, the same bits on each."""
        return self.peers.agree(sums)

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first peer's values."""
        return self.peers.share(tensor)

    def same(self, value: int) -> int:
        """The first peer's number."""
        return self.peers.same(value)

    def tiles(self, tiles: list[torch.Tensor], decode: Decode) -> list[torch.Tensor]:
        """Each rank decodes its share of them; with fewer tiles than ranks every rank decodes all."""
        part = self.peers.part(len(tiles))
        if self.peers.count == 1 or min(part.sizes) == 0:
            return decode(tiles)
        own = torch.cat(decode(tiles[part.begin : part.begin + part.size]))
        everyone = self.peers.gather(own.flatten(1)[None], part)[0]
        return list(torch.split(everyone.view(len(tiles), *own.shape[1:]), 1))

    def first(self, compute: Callable[[], Values]) -> Values:
        """The first peer computes; the others get its values in host memory, or the error that it met."""
        return self.peers.from_first(compute)

    def stop(self, flag: StopFlag) -> StopFlag:
        """Asks all peers at every step."""
        return _SharedStop(flag.wanted, flag, self.peers)


class _Rows(nn.Module):
    """The block stack on this rank's rows: what the transformer passes for the whole sequence is cut once."""

    def __init__(self, blocks: Sequence[nn.Module], part: Part) -> None:
        super().__init__()
        self.blocks, self.part = nn.ModuleList(blocks), part

    def forward(self, hidden_states: torch.Tensor, temb: torch.Tensor, adaln_indices: torch.Tensor, rotary_emb: Any) -> torch.Tensor:
        """(B, S, D) to (B, own rows, D)."""
        begin, size = self.part.begin, self.part.size
        out = hidden_states.narrow(1, begin, size).contiguous()
        adaln_indices = adaln_indices.narrow(0, begin, size)
        rotary_emb = tuple(table.narrow(0, begin, size) for table in rotary_emb)
        for block in self.blocks:
            out = block(out, temb, adaln_indices, rotary_emb)
        return out


class UlyssesProcessor:
    """Projects this rank's rows, attends to all rows with this rank's heads, and mixes this rank's rows again."""

    _parallel_config = None  # diffusers' own context parallelism stays out of it
    own_project = staticmethod(project)

    def __init__(self, inner: Any, peers: Peers, part: Part, groups: int) -> None:
        self.inner, self.peers, self.part, self.groups = inner, peers, part, groups
        self.project: Callable[[Any, torch.Tensor, Any], Qkv] = getattr(inner, "project", self.own_project)

    @property
    def _attention_backend(self) -> Any:
        return self.inner._attention_backend

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any = None, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Diffusers' processor protocol: (B, own rows, C) to (B, own rows, C)."""
        if attention_mask is not None:
            raise ValueError("sequence over ranks: got an attention mask, expected none; render on one rank")
        query, key, value = self.project(attn, hidden_states, rotary_emb)
        out = self.across(query, key, value, self._attend, self.groups)
        mixed: torch.Tensor = attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(query)))
        return mixed

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = dispatch_attention_fn(query, key, value, backend=self._attention_backend)
        return out

    def across(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attend, groups: int = 1) -> torch.Tensor:
        """(B, own rows, H, D) three times to the same once; `attend` sees (B, S, own heads, D), in `groups` calls.

        All groups are sent at once, queries, keys and values apart; a group is attended to, and sent back, while later ones are under way.
        """
        if self.peers.count == 1:
            return attend(query, key, value)
        cuts = head_groups(query.shape[2], self.peers.count, groups)
        arriving = [[self.peers.to_heads(part, self.part, heads) for part in (query, key, value)] for heads in cuts]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        leaving = [
            self.peers.to_rows(attend(*(part.wait() for part in each)), self.part, heads, out) for each, heads in zip(arriving, cuts)
        ]
        for each in leaving:
            each.wait()
        return out


def head_groups(total: int, ranks: int, groups: int) -> list[list[tuple[int, int]]]:
    """For each group the (begin, end) of heads that every rank takes; no rank is left without a head in a group."""
    sizes = shares(total, ranks)
    count = max(1, min(groups, *sizes))
    cuts: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    begin = 0
    for size in sizes:
        for group, part in zip(cuts, shares(size, count)):
            group.append((begin, begin + part))
            begin += part
    return cuts
