"""An adapter in canonical form: the model's own module names, low-rank factors with their true scale, full-rank patches."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """One module's low-rank update `scale * up @ down`: down (r, in), up (out, r), scale = alpha / rank."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    scale_from: str = ""

    @property
    def rank(self) -> int:
        """Rows of `down`."""
        return self.down.shape[0]

    def delta(self) -> torch.Tensor:
        """The update in full: (out, in), float32 (float64 where a factor is)."""
        wide = torch.promote_types(torch.promote_types(self.down.dtype, self.up.dtype), torch.float32)
        return self.scale * (self.up.to(wide) @ self.down.to(wide))

    def bound(self) -> float:
        """No entry of the update is larger, whatever its sign."""
        return abs(self.scale) * self.rank * float(self.up.abs().max().double()) * float(self.down.abs().max().double())

    def norm(self) -> float:
        """Frobenius norm of the update, from (r, r) Gram matrices in float64, so that it never exists in full."""
        down, up = self.down.double(), self.up.double()
        squared = float(((up.T @ up) * (down @ down.T)).sum())
        return abs(self.scale) * math.sqrt(max(squared, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """A full-rank payload of one parameter: added to it, or put in its place."""

    value: torch.Tensor
    is_replacement: bool


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """What a file means for one model.

    `factors` are keyed by module, `patches` by parameter; `partition` is what the keys say (`transformer_ref` when prefixed
    so, `transformer` likewise, else None). `digest` changes with the file and with every choice made when reading it.
    """

    name: str
    digest: str
    layout: str
    factors: Mapping[str, Factors]
    patches: Mapping[str, Patch]
    partition: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def ranks(self) -> dict[int, int]:
        """Rank -> how many modules have it."""
        return dict(sorted(Counter(each.rank for each in self.factors.values()).items()))

    def scales(self) -> dict[tuple[float, str], int]:
        """(effective scale, where it came from) -> how many modules have it."""
        return dict(sorted(Counter((each.scale, each.scale_from) for each in self.factors.values()).items()))
