"""Muon for the matrices of a small transformer: momentum made orthogonal before it is applied.

After Jordan et al. 2024 (Newton-Schulz orthogonalisation) and Liu et al. 2025 (arXiv:2502.16982: updates scaled to AdamW's usual root mean
square). `torch.optim.Muon` walks matrix by matrix with Python numbers for rates; here matrices of one shape are stacked and the rate is a
tensor, so that a step is a few launches and can be captured in a CUDA graph.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
TYPICAL_RMS = 0.2  # of an AdamW update, in units of its rate


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """(n, a, b) matrices with all singular values moved near 1."""
    x: torch.Tensor = matrices.bfloat16() if matrices.is_cuda else matrices.clone()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: torch.Tensor = x.mT if tall else x
    return out.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; decoupled weight decay. Every parameter must be a matrix with a gradient."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], rate: float, *, momentum: float = 0.95, decay: float = 0.01) -> None:
        held = list(parameters)
        lr = torch.tensor(rate, device=held[0].device)
        super().__init__(held, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter from its gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                by_shape[p.shape].append(p)
            for shape, same in by_shape.items():
                first = self.state[same[0]]
                grads = torch.stack([p.grad for p in same if p.grad is not None])
                if "momentum" not in first:
                    first["momentum"] = torch.zeros_like(grads)
                mean = first["momentum"]
                mean.lerp_(grads, 1 - group["momentum"])
                update = orthogonal(grads.lerp(mean, group["momentum"])) * (group["lr"] * TYPICAL_RMS * max(shape) ** 0.5)
                live = [p.data for p in same]
                torch._foreach_mul_(live, 1 - group["lr"] * group["decay"])
                torch._foreach_sub_(live, list(update.unbind(0)))
