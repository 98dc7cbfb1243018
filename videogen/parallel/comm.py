"""What ranks that share a sequence say to each other: rows for heads and back, sums, rank 0's values; knows no model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from videogen.errors import VideogenError, say
from videogen.parallel.mesh import Part, shares


class PeersLost(VideogenError):
    """A rank of this replica failed alone or is gone: the others cannot go on without it."""


class Work(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """Until it has arrived."""
        ...


MEET = timedelta(seconds=30)  # after a failure: all fail within the same step or not at all
Send = Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], Work]


@dataclass(slots=True)
class Pending:
    """A tensor that is still arriving."""

    work: Work
    finish: Callable[[], torch.Tensor]
    sent: torch.Tensor  # alive until it has left

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there."""
        self.work.wait()
        return self.finish()


@dataclass(slots=True)
class Peers:
    """The ranks of one process group that share a sequence; `control` is a gloo group for what the host asks.

    `send` begins an all-to-all of (received, sent, elements from each, elements to each); the test of overlap puts a slow link there.
    """

    rank: int
    count: int
    group: Any
    control: Any
    send: Send | None = None

    def part(self, total: int) -> Part:
        """This rank's share of a line."""
        return Part(shares(total, self.count), self.rank)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, takes: list[int], gives: list[int]) -> Work:
        """Begin an all-to-all of flat tensors."""
        if self.send is not None:
            return self.send(received, sent, takes, gives)
        return cast(Work, dist.all_to_all_single(received, sent, takes, gives, group=self.group, async_op=True))

    def to_heads(self, rows: torch.Tensor, part: Part, heads: Sequence[tuple[int, int]]) -> Pending:
        """Rows of this rank for heads of this rank: (B, own rows, H, D) to (B, S, own heads, D).

        `heads` are the (begin, end) that every rank takes of H. Rows are copied once on their way; what arrives lies in row order.
        """
        batch, own, _, width = rows.shape
        mine = heads[self.rank][1] - heads[self.rank][0]
        gives = [batch * own * (end - begin) * width for begin, end in heads]
        takes = [batch * size * mine * width for size in part.sizes]
        sent, received = rows.new_empty(sum(gives)), rows.new_empty(sum(takes))
        for place, (begin, end) in zip(torch.split(sent, gives), heads):
            place.view(batch, own, end - begin, width).copy_(rows[:, :, begin:end])

        def finish() -> torch.Tensor:
            if batch == 1:
                return received.view(1, -1, mine, width)
            pieces = zip(torch.split(received, takes), part.sizes)
            return torch.cat([each.view(batch, size, mine, width) for each, size in pieces], 1)

        return Pending(self.exchange(received, sent, takes, gives), finish, sent)

    def to_rows(self, out: torch.Tensor, part: Part, heads: Sequence[tuple[int, int]], into: torch.Tensor) -> Pending:
        """The way back: (B, S, own heads, D) to the heads of all ranks in their places of `into`, (B, own rows, H, D)."""
        batch, _, mine, width = out.shape
        pieces = torch.split(out, list(part.sizes), 1)
        sent = out.reshape(-1) if batch == 1 else torch.cat([piece.reshape(-1) for piece in pieces])
        gives = [batch * size * mine * width for size in part.sizes]
        takes = [batch * part.size * (end - begin) * width for begin, end in heads]
        received = sent.new_empty(sum(takes))

        def finish() -> torch.Tensor:
            for piece, (begin, end) in zip(torch.split(received, takes), heads):
                into[:, :, begin:end] = piece.view(batch, part.size, end - begin, width)
            return into

        return Pending(self.exchange(received, sent, takes, gives), finish, sent)

    def gather(self, tensor: torch.Tensor, part: Part) -> torch.Tensor:
        """(B, own rows, D) of every rank as (B, S, D) on all of them."""
        padded = tensor.new_zeros(tensor.shape[0], max(part.sizes), tensor.shape[2])
        padded[:, : part.size] = tensor
        return torch.cat([piece[:, :size] for piece, size in zip(self._everyone(padded), part.sizes)], 1)

    def agree(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, added in rank order, so that every rank has the same bits whatever the back end does."""
        total, *others = self._everyone(sums.contiguous())
        for each in others:
            total += each
        return total

    def _everyone(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        pieces = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(pieces, tensor, group=self.group)
        return pieces

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's values on every rank."""
        whole = tensor.contiguous()
        dist.broadcast(whole, group=self.group, group_src=0)
        return whole

    def same(self, value: int) -> int:
        """Rank 0's whole number on every rank, by way of the hosts. Raises PeersLost where one is gone."""
        told = torch.tensor([value], dtype=torch.int64)
        with _all_there():
            dist.broadcast(told, group=self.control, group_src=0)
        return int(told)

    def from_first(self, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What rank 0 computes, tensors or lists of them by name, on every rank by way of the hosts; its error is everyone's."""
        if self.count == 1:
            return compute()
        if self.rank:
            told = self._told(None)
            if isinstance(told, str):
                raise RuntimeError(f"the first rank: {told}")
            return cast(dict[str, Any], told)
        try:
            values = compute()
        except Exception as error:
            self._told(f"{type(error).__name__}: {error}")
            raise
        self._told({name: [each.cpu() for each in value] if isinstance(value, list) else value.cpu() for name, value in values.items()})
        return values

    def _told(self, value: Any) -> Any:
        objects = [value]
        with _all_there():
            dist.broadcast_object_list(objects, group=self.control, group_src=0)
        return objects[0]

    def meet(self) -> bool:
        """Whether every rank comes here within `MEET`."""
        try:
            dist.monitored_barrier(self.control, timeout=MEET)
        except RuntimeError:
            return False
        return True

    def any(self, wish: bool) -> bool:
        """Whether any rank says so, by way of the hosts. Raises PeersLost where one is gone."""
        told = torch.tensor([int(wish)])
        with _all_there():
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self.control)
        return bool(told)


@contextmanager
def _all_there() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeersLost(say("ranks of one clip", str(error)[:200], "all of them to the end", "run it again")) from error
