"""Drift on the device: how far a probe is from what was expected of it, per channel of rows; decides nothing."""

from collections.abc import Callable, Mapping

import torch

# Sums over ranks, in place of nothing on one device. Every rank calls it at every step, whatever it will decide.
Agree = Callable[[torch.Tensor], torch.Tensor]


def alone(sums: torch.Tensor) -> torch.Tensor:
    """One rank: the sums are already whole."""
    return sums


def relative_change(probe: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], agree: Agree = alone) -> dict[str, float]:
    """`||probe - reference|| / ||reference||` per channel, in float32, over the rows given (the generated ones).

    Tensors are (B, rows, D). Numerators and denominators of all channels travel together, so that ranks agree and the
    host waits once. A channel without rows anywhere, or with a zero reference, is NaN: unknown.
    """
    names = sorted(probe)
    sums = []
    for name in names:
        now, before = probe[name].float(), reference[name].float()
        sums += [(now - before).square().sum(), before.square().sum()]
    values = agree(torch.stack(sums)).sqrt().tolist()
    return {name: _ratio(values[2 * k], values[2 * k + 1]) for k, name in enumerate(names)}


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else float("nan")
