"""What rendering one clip needs to know of other ranks: the interface, and one process that needs to know nothing."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from caches.drift import alone
from videogen.parallel.mesh import Part
from videogen.progress import StopFlag
from videogen.transforms.decode import Decode
from videogen.transforms.encodings import Values


class Sharding(Protocol):
    """What one request's rendering needs to know of other ranks."""

    @property
    def label(self) -> str:
        """The layout, for records and certificates."""
        ...

    def attention(self, transformer: Any, rows: int, seats: Any = None) -> AbstractContextManager[None]:
        """Around everything that changes how the blocks attend; `seats` says where they do (None: where H3's do)."""
        ...

    def stack(self, transformer: Any, rows: int) -> AbstractContextManager[None]:
        """Around the denoising loop, inside everything that changes the block stack."""
        ...

    def part(self, total: int) -> Part:
        """This rank's stretch of so many rows."""
        ...

    def gather(self, rows: torch.Tensor, total: int) -> torch.Tensor:
        """This rank's rows (B, own rows, D) and everyone else's: (B, total, D)."""
        ...

    def own(self, rows: torch.Tensor, total: int) -> torch.Tensor:
        """Positions in the packed sequence as positions in this rank's stretch, those elsewhere left out."""
        ...

    def agree(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks."""
        ...

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """One rank's values on every rank."""
        ...

    def same(self, value: int) -> int:
        """One rank's number on every rank."""
        ...

    def tiles(self, tiles: list[torch.Tensor], decode: Decode) -> list[torch.Tensor]:
        """What `decode` makes of the tiles, on every rank."""
        ...

    def first(self, compute: Callable[[], Values]) -> Values:
        """What one rank computes, on every rank."""
        ...

    def stop(self, flag: StopFlag) -> StopFlag:
        """A flag that is set for every rank once it is for one."""
        ...


class Alone:
    """One process: everything stays as it is."""

    label = "1"

    def attention(self, transformer: Any, rows: int, seats: Any = None) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def stack(self, transformer: Any, rows: int) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def part(self, total: int) -> Part:
        """All of them."""
        return Part((total,), 0)

    def gather(self, rows: torch.Tensor, total: int) -> torch.Tensor:
        """It has them."""
        return rows

    def own(self, rows: torch.Tensor, total: int) -> torch.Tensor:
        """All of them."""
        return rows

    def agree(self, sums: torch.Tensor) -> torch.Tensor:
        """They are whole."""
        return alone(sums)

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """It has them."""
        return tensor

    def same(self, value: int) -> int:
        """It has it."""
        return value

    def tiles(self, tiles: list[torch.Tensor], decode: Decode) -> list[torch.Tensor]:
        """Decoded here."""
        return decode(tiles)

    def first(self, compute: Callable[[], Values]) -> Values:
        """Computed here."""
        return compute()

    def stop(self, flag: StopFlag) -> StopFlag:
        """The flag."""
        return flag


ALONE = Alone()
