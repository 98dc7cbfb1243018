"""Query and key blocks over the video rows of a packed sequence: plain arithmetic, no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows `first` to `rows - 1` cut every `block_q` (queries) and `block_k` (keys); the last block of each may be short.

    Rows before `first` are sinks: text, sound, keyframes, references. They are exact both ways and belong to no block.
    """

    first: int
    rows: int
    block_q: int
    block_k: int

    @property
    def num_video(self) -> int:
        """Video rows."""
        return self.rows - self.first

    @property
    def num_q(self) -> int:
        """Query blocks."""
        return -(-self.num_video // self.block_q)

    @property
    def num_k(self) -> int:
        """Key blocks."""
        return -(-self.num_video // self.block_k)

    @property
    def last_k(self) -> int:
        """Rows of the last key block."""
        return self.num_video - (self.num_k - 1) * self.block_k

    def band(self, query_block: int) -> tuple[int, int]:
        """The key blocks (from, to) that overlap a query block, and one more at either side: always exact."""
        begin = query_block * self.block_q
        end = min(begin + self.block_q, self.num_video)
        return max(0, begin // self.block_k - 1), min(self.num_k, -(-end // self.block_k) + 1)

    @property
    def widest_band(self) -> int:
        """The most key blocks in any band: the smallest budget that holds it."""
        return max(end - begin for begin, end in map(self.band, range(self.num_q)))
