"""Data-parallel training over the processes of `torchrun`: one clock, one start, averaged gradients; with one process nothing happens."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from videogen.config import read_environment


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its peers."""

    rank: int
    count: int
    device: torch.device

    @classmethod
    def join(cls) -> "Ranks":
        """The process group that the launcher's environment describes (NCCL on CUDA, else gloo), or a group of one."""
        told = read_environment()
        count, rank = told.world_size, told.rank
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", told.local_rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        if count > 1:
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=20))
        return cls(rank, count, device)

    def leave(self) -> None:
        """End the group."""
        if self.count > 1:
            dist.destroy_process_group()

    def agree(self, value: float) -> float:
        """Rank 0's value on every rank; waits for the device."""
        if self.count == 1:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return value
        told = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(told, 0)
        return float(told)

    def mean(self, flat: torch.Tensor) -> None:
        """Average a tensor over the ranks, in place."""
        if self.count > 1:
            dist.all_reduce(flat)
            flat.div_(self.count)

    def share(self, tensors: list[torch.Tensor]) -> None:
        """Give every rank rank 0's values, in place."""
        if self.count > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)


def flat_gradients(parameters: list[Any]) -> torch.Tensor:
    """One zeroed tensor whose parts are the parameters' gradients, so that averaging them is one call."""
    flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    begin = 0
    for p in parameters:
        p.grad = flat[begin : begin + p.numel()].view(p.shape)
        begin += p.numel()
    return flat
