"""Rows of one request shared by two ranks, of which one moves far more; run as a program it is the second rank."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from caches.policy import Budget
from caches.step_hook import Channel, step_cache


class _Rates(torch.nn.Module):
    """A first block whose residual changes at another rate in every row."""

    def __init__(self, rates: torch.Tensor) -> None:
        super().__init__()
        self.rates = rates[None, :, None]

    def forward(self, hidden: torch.Tensor, sigma: float) -> torch.Tensor:
        return hidden + 1 + self.rates * (1 - sigma)


class _Stack(torch.nn.Module):
    def __init__(self, rates: torch.Tensor) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([_Rates(rates), torch.nn.Identity()])
        self.blocks[1].forward = lambda hidden, sigma: hidden * 1.5  # type: ignore[method-assign]

    def forward(self, hidden: torch.Tensor, sigma: float) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden, sigma)
        return hidden


SIGMAS = [1 - k / 14 for k in range(15)]
RATES = torch.tensor([0.05, 0.05, 0.1, 0.4, 0.8, 0.9])  # three rows a rank: the second moves far more
LAMBDA = 0.05


def decisions(rates: torch.Tensor, agree: bool) -> list[str]:
    """What is decided over rows of these rates, alone or with the other rank."""

    def summed(sums: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(sums)
        return sums

    rows = {"video": torch.arange(1, len(rates)), "audio": torch.arange(1)}
    channels = {name: Channel(index, SIGMAS, drift_order=0) for name, index in rows.items()}
    more = {"agree": summed} if agree else {}
    stack = _Stack(rates)
    with step_cache(stack, "blocks", channels, Budget(lam=LAMBDA), **more) as trace:
        for sigma in SIGMAS[:-1]:
            stack(torch.ones(1, len(rates), 2), sigma)
    return [decision.reason for decision in trace.decisions]


def rank(index: int, store: Path) -> list[str]:
    """What this rank decides."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2, timeout=timedelta(seconds=60))
    try:
        return decisions(RATES[3 * index : 3 * index + 3], agree=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(rank(1, Path(sys.argv[1]))))
