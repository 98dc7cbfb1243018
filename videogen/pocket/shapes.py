"""Typed fronts of the few torch calls that carry no annotations."""

import torch


def unflatten(x: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """`x.unflatten(dim, sizes)`."""
    out: torch.Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return out


def parts(x: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """`x.split(size)`."""
    out: tuple[torch.Tensor, ...] = x.split(size)  # type: ignore[no-untyped-call]
    return out


def distinct(x: torch.Tensor) -> list[int]:
    """The distinct values of an integer tensor, in order."""
    return sorted(set(x.flatten().tolist()))
