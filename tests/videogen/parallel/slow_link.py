"""A link of a stated bandwidth between gloo ranks, on a clock of its own or the wall's: how long did computing wait for it?

`python -m tests.videogen.parallel.slow_link` sleeps for real, over two processes, and reports exposed milliseconds by head groups.
"""

import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from tests.videogen.parallel.worlds import forked, in_world
from videogen.parallel.comm import Peers, Work
from videogen.parallel.sequence import UlyssesProcessor


class Ticks:
    """A clock that goes only where somebody says so."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        """Seconds."""
        return self.at

    def sleep(self, seconds: float) -> None:
        """Go on by so much."""
        self.at += seconds


class Wall:
    """The real clock."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


@dataclass
class SlowLink:
    """`Peers.send` over a link of so many bytes a second, one message after the other, besides the real exchange."""

    peers: Peers
    clock: Ticks | Wall
    bytes_per_s: float
    free_at: float = 0.0
    exposed_s: float = 0.0
    messages: int = 0
    log: list[str] = field(default_factory=list)

    def __call__(self, received: torch.Tensor, sent: torch.Tensor, takes: list[int], gives: list[int]) -> Work:
        """Begin a message; it has arrived when the link has carried what leaves this rank, and gloo has."""
        real = dist.all_to_all_single(received, sent, takes, gives, group=self.peers.group, async_op=True)
        leaving = (sum(gives) - gives[self.peers.rank]) * sent.element_size()
        self.free_at = max(self.free_at, self.clock.now()) + leaving / self.bytes_per_s
        self.messages += 1
        return _Message(self, real, self.free_at)


@dataclass
class _Message:
    link: SlowLink
    real: Work
    due: float

    def wait(self) -> None:
        self.real.wait()
        late = max(0.0, self.due - self.link.clock.now())
        self.link.clock.sleep(late)
        self.link.exposed_s += late


class _Inner:
    _attention_backend = None


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D) three times to the same once."""
    return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def uneven(peers: Peers, groups: int) -> float:
    """How far attention over the ranks is from attention on one, at most: two in a batch, rows and heads that do not divide."""
    whole = torch.randn(3, 2, 7, 5, 4, generator=torch.Generator().manual_seed(0))
    part = peers.part(7)
    own = slice(part.begin, part.begin + part.size)
    found = UlyssesProcessor(_Inner(), peers, part, groups).across(*(x[:, own] for x in whole), attention, groups)
    return float((found - attention(*whole)[:, own]).abs().max())


def exposed(peers: Peers, clock: Ticks | Wall, groups: int, *, attend_s: float, bytes_per_s: float) -> tuple[float, int, torch.Tensor]:
    """Seconds of one layer's attention spent waiting for the link, messages, and the output; computing is a sleep by heads."""
    rows, heads, width = 32, 8, 16
    part = peers.part(rows)
    whole = torch.randn(3, 1, rows, heads, width, generator=torch.Generator().manual_seed(0))
    link = SlowLink(peers, clock, bytes_per_s)
    peers.send = link
    processor = UlyssesProcessor(_Inner(), peers, part, groups)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        clock.sleep(attend_s * query.shape[2] * peers.count / heads)
        return attention(query, key, value)

    out = processor.across(*(x[:, part.begin : part.begin + part.size] for x in whole), attend, groups)
    peers.send = None
    return link.exposed_s, link.messages, out


def main() -> None:
    """Three times as much computing as carrying, and as much; the median of seven layers."""
    with tempfile.TemporaryDirectory() as folder:
        for times in (1.0, 3.0):
            carried = 4 * 16 * 4 * 16 * 4  # bytes that leave a rank: q, k, v, out of half the heads of its rows

            def job(peers: Peers, times: float = times, carried: int = carried) -> dict[int, float]:
                found = {}
                for groups in (1, 2, 4):
                    rounds = [exposed(peers, Wall(), groups, attend_s=0.02 * times, bytes_per_s=carried / 0.02)[0] for _ in range(7)]
                    found[groups] = sorted(rounds)[3] * 1e3
                return found

            place = Path(folder) / str(times)
            place.mkdir()
            told = forked(place, 2, lambda rank, job=job, place=place: in_world(place, rank, 2, job))
            sys.stdout.write(f"computing {times:g} x carrying (20 ms): exposed ms by head groups {told[0]}\n")


if __name__ == "__main__":
    main()
