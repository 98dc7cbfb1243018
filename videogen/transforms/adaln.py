"""AdaLN tables: what 13 of H3's 33 billion parameters say depends on a step's timesteps alone, so it is computed per schedule.

Each table is the stock projection of the same timesteps, so it is bit-identical. With the tables made, the projections may
be parked in host memory; they stay parameters of the model there, so that adapters fit on them as before.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lora.apply import attached_to
from videogen.parallel.visits import comes_alone
from videogen.transforms.scope import Forward, forward_as, version_of

MAX_BYTES = 1_500_000_000  # of tables kept beside those in use: one schedule of the released model takes 1.0-1.4 GB
MAX_TABLES = 32  # schedules kept: those of a small model never fill the bytes

Row = tuple[torch.Tensor, ...]  # shift, scale, gate of attention and of the feed-forward: (timesteps * 3, D) each


@dataclass(frozen=True, slots=True)
class Tables:
    """The rows of every step and block."""

    rows: list[list[Row]]

    @property
    def num_bytes(self) -> int:
        """What the tables take on the device; the six parts of a row share one storage."""
        return sum(row[0].untyped_storage().nbytes() for step in self.rows for row in step)


@dataclass(slots=True)
class TableShelf:
    """Tables by schedule and weights, kept across requests; the least recently used go first."""

    kept: dict[Any, Tables] = field(default_factory=dict)

    def take(self, transformer: Any, timesteps: Sequence[torch.Tensor]) -> tuple[Tables, bool]:
        """The tables of a schedule, and whether they had to be made; `timesteps` are each step's distinct ones."""
        key = _key(transformer, timesteps)
        found = self.kept.pop(key, None)
        tables = found or Tables(make_rows(transformer, timesteps))
        for other in [each for each in self.kept if each[0] == key[0] and each[1][1] != key[1][1]]:
            del self.kept[other]  # of weights as they were before a write: the count of writes never comes back
        while len(self.kept) >= MAX_TABLES:
            del self.kept[next(iter(self.kept))]
        while self.kept and sum(each.num_bytes for each in self.kept.values()) + tables.num_bytes > MAX_BYTES:
            del self.kept[next(iter(self.kept))]
        self.kept[key] = tables
        return tables, found is None


def _key(transformer: Any, timesteps: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The transformer, its weights (adapters, and writes into parameters) and the values of every timestep: one device read."""
    adapters = attached_to(transformer)
    read = [
        *transformer.time_embedder.parameters(),
        *(p for block in transformer.transformer_blocks for p in block.adaln_proj.parameters()),
    ]
    weights = ("" if adapters is None else adapters.identity, tuple(version_of(parameter) for parameter in read))
    return id(transformer), weights, tuple(len(each) for each in timesteps), tuple(torch.cat([*timesteps]).tolist())


@torch.no_grad()
def make_rows(transformer: Any, timesteps: Sequence[torch.Tensor]) -> list[list[Row]]:
    """For every step and block what the block's own projection gives; parked weights visit the device one block at a time."""
    like = next(transformer.time_embedder.parameters())
    embedded = [transformer.time_embedder(transformer.time_proj(each).to(like.dtype)) for each in timesteps]
    rows: list[list[Row]] = [[] for _ in timesteps]
    for block in transformer.transformer_blocks:
        with visiting(block.adaln_proj, like.device):
            for step, temb in zip(rows, embedded):
                step.append(block.adaln_proj(temb))
    return rows


@contextmanager
def adaln_tables(transformer: Any, timesteps: Sequence[torch.Tensor], shelf: TableShelf) -> Iterator[bool]:
    """Inside the scope the blocks look their modulation up; yields whether the tables had to be made.

    A step is known by the very tensor that carries its timesteps; any other tensor is computed in full.
    """
    tables, is_new = shelf.take(transformer, timesteps)
    numbers = {id(each): number for number, each in enumerate(timesteps)}
    current: list[int | None] = [None]

    def watch(_: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        current[0] = numbers.get(id(kwargs.get("timestep")))

    def looked_up(index: int, projection: nn.Module) -> Any:
        def make(stock: Forward) -> Forward:
            def forward(temb: torch.Tensor) -> Row:
                if current[0] is not None:
                    return tables.rows[current[0]][index]
                with visiting(projection, temb.device):
                    row: Row = stock(temb)
                return row

            return forward

        return make

    handle = transformer.register_forward_pre_hook(watch, with_kwargs=True)
    with ExitStack() as stack:
        stack.callback(handle.remove)
        for index, block in enumerate(transformer.transformer_blocks):
            stack.enter_context(forward_as(block.adaln_proj, looked_up(index, block.adaln_proj)))
        yield is_new


@contextmanager
def visiting(module: nn.Module, device: torch.device) -> Iterator[None]:
    """A parked module on `device` inside the scope; nothing happens to one that is there, nor to blocks that come when they run."""
    away = [parameter for parameter in module.parameters() if parameter.device != device and not comes_alone(parameter)]
    homes = [parameter.data for parameter in away]
    try:
        for parameter in away:
            parameter.data = parameter.data.to(device)
        yield
    finally:
        for parameter, home in zip(away, homes):
            parameter.data = home


def place_projections(transformer: Any, device: torch.device) -> int:
    """Move every block's AdaLN projection to a device (host memory to park it); returns the bytes that moved."""
    moved = 0
    for block in transformer.transformer_blocks:
        for parameter in block.adaln_proj.parameters():
            if parameter.device != device:
                moved += parameter.nbytes
                parameter.data = parameter.data.to(device)
    if moved and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return moved
