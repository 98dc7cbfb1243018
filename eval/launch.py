"""A measuring program under torchrun: its ranks, the device of this one, and the folder that the first one writes to."""

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eval.report_folder import check_free, make_folder
from videogen.config import Environment, read_environment
from videogen.errors import bad
from videogen.load import pick_device
from videogen.parallel.comm import Peers
from videogen.parallel.join import joined
from videogen.parallel.mesh import Place


@dataclass(frozen=True, slots=True)
class Launch:
    """One rank of a launch whose ranks all share a clip."""

    environment: Environment
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this rank reports."""
        return self.environment.rank == 0

    def joined(self) -> AbstractContextManager[Peers]:
        """All ranks, while the scope lasts."""
        rank, local, world = self.environment.rank, self.environment.local_rank, self.environment.world_size
        return joined(Place(rank, local, world, world), self.device)


def launched(program: str, device: str, out: Path, result: str) -> Launch:
    """This rank, its log, and on the first one a folder for `result`. Raises RequestError outside a launch, or where a result is."""
    environment = read_environment()
    if environment.world_size < 2:
        raise bad("ranks", environment.world_size, "at least 2", f"start it through torchrun --nproc_per_node N -m {program}")
    is_first = environment.rank == 0
    logging.basicConfig(level=logging.INFO if is_first else logging.WARNING, format="%(message)s")
    if is_first:
        check_free(out, result, overwrite=False, option="--out")
        make_folder(out)
    kind = pick_device(device).type
    return Launch(environment, torch.device(kind, environment.local_rank) if kind == "cuda" else torch.device(kind))


def gathered(peers: Peers, value: Any) -> list[Any]:
    """Every rank's value, on all of them."""
    found = [None] * peers.count
    dist.all_gather_object(found, value, group=peers.control)
    return found


def link_gbs(told: dict[str, float], workload: str) -> float:
    """What `measure` found for a workload; for one whose message it did not send, the slowest that it found; 0 where nothing."""
    return told.get(workload, min(told.values(), default=0.0))
