"""Several adapters of one base into one, and fewer ranks with the energy kept; uses peft's TIES and DARE, touches no model."""

import hashlib
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from peft.utils.merge_utils import dare_ties, ties

from lora.adapter import Adapter, Factors, Patch
from lora.errors import bad

Method = Literal["linear", "ties", "dare-ties"]
METHODS: tuple[Method, ...] = ("linear", "ties", "dare-ties")


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged or reduced adapter, and the share of its squared Frobenius norm that the rank could hold (0 to 1)."""

    adapter: Adapter
    energy: float


def merge(
    inputs: Sequence[tuple[Adapter, float]], method: Method, *, rank: int | None = None, density: float = 0.5, seed: int = 0
) -> Merged:
    """Merge adapters with weights.

    `linear` adds deltas, exactly, with ranks adding up unless `rank` says less. `ties` (Yadav et al., arXiv 2306.01708) and
    `dare-ties` (Yu et al., arXiv 2311.03099) work on whole deltas, not on factors, whose bases differ between files, and
    need a `rank`; `density` is the share of entries kept, `seed` draws DARE's. Raises ValueError for payloads that
    cannot be merged, and for options that do not fit.
    """
    if len(inputs) < 2 or method not in METHODS:
        raise bad("merge", f"{len(inputs)} adapters by {method}", f"2 or more, by one of {', '.join(METHODS)}", "name them all")
    if not 0 < density <= 1 or not all(math.isfinite(weight) for _, weight in inputs):
        raise bad("merge", f"density {density}, weights {[weight for _, weight in inputs]}", "0 < density <= 1, finite", "correct them")
    if method != "linear" and rank is None:
        raise bad("merge", f"{method} without a rank", "a rank, as its result has full rank", "pass --rank")
    _check_rank(rank)
    partitions = {adapter.partition for adapter, _ in inputs} - {None}
    if len(partitions) > 1:
        raise bad("merge", "adapters of transformer and of transformer_ref", "one base", "merge each partition apart")
    modules = sorted({name for adapter, _ in inputs for name in adapter.factors})
    whole, kept, factors = 0.0, 0.0, {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in modules:
            parts = [(adapter.factors[name], weight) for adapter, weight in inputs if name in adapter.factors]
            factors[name], total, held = _merge_module(parts, method, rank, density)
            whole, kept = whole + total, kept + held
    choices = [[[adapter.digest, weight.hex()] for adapter, weight in ((a, float(w)) for a, w in inputs)], method, rank, density, seed]
    merged = Adapter(
        name="+".join(adapter.name for adapter, _ in inputs),
        digest=hashlib.sha256(json.dumps(choices).encode()).hexdigest(),
        layout=f"merged ({method})",
        factors=factors,
        patches=_merge_patches(inputs, method),
        partition=next(iter(partitions), None),
    )
    return Merged(merged, kept / whole if whole else 1.0)


def reduce_rank(adapter: Adapter, rank: int) -> Merged:
    """The best approximation of each module at a rank (Eckart and Young), with the energy kept over all modules."""
    _check_rank(rank)
    whole, kept, factors = 0.0, 0.0, {}
    for name, each in adapter.factors.items():
        factors[name], total, held = _truncate(each, rank)
        whole, kept = whole + total, kept + held
    digest = hashlib.sha256(json.dumps([adapter.digest, "rank", rank]).encode()).hexdigest()
    return Merged(replace(adapter, factors=factors, digest=digest), kept / whole if whole else 1.0)


def _check_rank(rank: int | None) -> None:
    if rank is not None and rank < 1:
        raise bad("rank", rank, "at least 1", "pass a positive rank")


def _merge_module(parts: Sequence[tuple[Factors, float]], method: Method, rank: int | None, density: float) -> tuple[Factors, float, float]:
    if method == "linear":
        down = torch.cat([part.down.float() for part, _ in parts])
        up = torch.cat([part.up.float() * (part.scale * weight) for part, weight in parts], dim=1)
        stacked = Factors(down, up, 1.0, "merged")
        if rank is not None and rank < stacked.rank:
            return _truncate(stacked, rank)
        energy = stacked.norm() ** 2
        return stacked, energy, energy
    weights = torch.tensor([weight for _, weight in parts])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft warns that density 1 prunes nothing
        delta: torch.Tensor = (ties if method == "ties" else dare_ties)([part.delta() for part, _ in parts], weights, density)
    assert rank is not None
    left, values, right = torch.linalg.svd(delta, full_matrices=False)
    return _from_svd(left, values, right, rank)


def _truncate(factors: Factors, rank: int) -> tuple[Factors, float, float]:
    """Through QR of both factors, so that the decomposition is (r, r) however wide the module is."""
    up_basis, up_core = torch.linalg.qr(factors.up.double())
    down_basis, down_core = torch.linalg.qr(factors.down.double().T)
    left, values, right = torch.linalg.svd(factors.scale * (up_core @ down_core.T), full_matrices=False)
    return _from_svd(up_basis @ left, values, right @ down_basis.T, rank)


def _from_svd(left: torch.Tensor, values: torch.Tensor, right: torch.Tensor, rank: int) -> tuple[Factors, float, float]:
    """Both factors take the square root of each singular value; returns the energy before and after as well."""
    roots = values[:rank].sqrt()
    factors = Factors((roots[:, None] * right[:rank]).float(), (left[:, :rank] * roots).float(), 1.0, "merged")
    return factors, float(values.double().square().sum()), float(values[:rank].double().square().sum())


def _merge_patches(inputs: Sequence[tuple[Adapter, float]], method: Method) -> dict[str, Patch]:
    """Added payloads add up under `linear`; everything else has no meaning that all would agree on."""
    names = sorted({name for adapter, _ in inputs for name in adapter.patches})
    held = [adapter.patches[name] for adapter, _ in inputs for name in adapter.patches]
    if held and (method != "linear" or any(patch.is_replacement for patch in held)):
        raise bad("merge", f"full-rank payloads ({names[0]}, ...)", "low-rank factors, or added payloads by linear", "merge linearly")
    values: dict[str, Patch] = {}
    for name in names:
        parts = [weight * adapter.patches[name].value.float() for adapter, weight in inputs if name in adapter.patches]
        values[name] = Patch(torch.stack(parts).sum(dim=0), False)
    return values
