"""Which process does what, as plain values: rank facts, replicas of one or several ranks, and even-as-possible shares; no torch."""

from dataclasses import dataclass

from videogen.errors import bad


def shares(total: int, parts: int) -> tuple[int, ...]:
    """`total` cut into `parts` that differ by at most one, the longer ones first."""
    least, longer = divmod(total, parts)
    return tuple(least + (part < longer) for part in range(parts))


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's stretch of a line of `sum(sizes)`; sizes are those of all ranks."""

    sizes: tuple[int, ...]
    rank: int

    @property
    def begin(self) -> int:
        """Where it begins."""
        return sum(self.sizes[: self.rank])

    @property
    def size(self) -> int:
        """How long it is."""
        return self.sizes[self.rank]


@dataclass(frozen=True, slots=True)
class Place:
    """One process: `rank` of `world_size`, `local_rank` on its machine, in replicas of `ulysses` ranks that share a clip.

    Raises RequestError where the ranks do not fill whole replicas.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    ulysses: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise bad("rank", self.rank, f"from 0 to {self.world_size - 1}", "start through torchrun or accelerate launch")
        if self.ulysses < 1 or self.world_size % self.ulysses:
            raise bad("--ulysses", self.ulysses, f"a divisor of the {self.world_size} processes", "change --ulysses or the process count")

    @property
    def replica(self) -> int:
        """The replica this process belongs to."""
        return self.rank // self.ulysses

    @property
    def replicas(self) -> int:
        """How many there are."""
        return self.world_size // self.ulysses

    @property
    def seat(self) -> int:
        """The rank within the replica; 0 leads it."""
        return self.rank % self.ulysses

    @property
    def seats(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every replica."""
        return tuple(tuple(range(r * self.ulysses, (r + 1) * self.ulysses)) for r in range(self.replicas))
