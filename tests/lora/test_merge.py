"""Merges against their definitions, written out; ranks against the best that any can do."""

from dataclasses import replace

import pytest
import torch

from lora.adapter import Adapter, Factors, Patch
from lora.merge import Method, merge, reduce_rank
from tests.lora.toys import make_truth

MODULES = ("proj_in", "transformer_blocks.0.ff.net.2")


def adapter_of(seed: int, rank: int = 4, scale: float = 0.5, name: str = "") -> Adapter:
    factors = {module: Factors(down, up, scale) for module, (down, up) in make_truth(MODULES, rank=rank, seed=seed).items()}
    return Adapter(name or f"a{seed}", f"digest {seed}", "toy", factors, {})


def deltas(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {name: factors.delta() for name, factors in adapter.factors.items()}


def by_hand(one: torch.Tensor, two: torch.Tensor, weights: tuple[float, float], density: float) -> torch.Tensor:
    """TIES: keep the largest entries of each, elect a sign by the sum, average those of that sign."""
    kept = []
    for delta in (one, two):
        count = int(density * delta.numel())
        limit = delta.abs().flatten().sort(descending=True).values[count - 1]
        kept.append(torch.where(delta.abs() >= limit, delta, torch.zeros_like(delta)))
    sign = torch.where(kept[0] + kept[1] >= 0, 1.0, -1.0)
    agree = [delta.sign() == sign for delta in kept]
    total = sum(weight * delta * mask for weight, delta, mask in zip(weights, kept, agree))
    return total / (agree[0].float() + agree[1].float()).clamp(min=1)  # type: ignore[operator, no-any-return]


def test_linear_is_the_weighted_sum() -> None:
    one, two = adapter_of(1), adapter_of(2, rank=7, scale=1.0)
    merged = merge([(one, 1.0), (two, -0.3)], "linear")
    assert merged.energy == 1.0 and merged.adapter.ranks() == {11: 2}
    for name, delta in deltas(merged.adapter).items():
        assert torch.allclose(delta, deltas(one)[name] - 0.3 * deltas(two)[name], rtol=1e-5, atol=1e-7)
    alone = replace(two, factors={"proj_in": two.factors["proj_in"]})
    part = merge([(one, 1.0), (alone, 1.0)], "linear").adapter
    assert torch.allclose(part.factors[MODULES[1]].delta(), one.factors[MODULES[1]].delta(), rtol=1e-6)


@pytest.mark.parametrize("density", [0.3, 1.0])
def test_ties_is_what_the_paper_says(density: float) -> None:
    one, two = adapter_of(1), adapter_of(2)
    merged = merge([(one, 1.0), (two, 0.6)], "ties", rank=64, density=density)
    assert merged.energy == pytest.approx(1.0)
    for name, delta in deltas(merged.adapter).items():
        wanted = by_hand(deltas(one)[name], deltas(two)[name], (1.0, 0.6), density)
        assert float((delta - wanted).norm() / wanted.norm()) < 1e-5


def test_dare_ties_is_drawn_from_its_seed_and_leaves_the_global_one_alone() -> None:
    pairs = [(adapter_of(1), 1.0), (adapter_of(2), 1.0)]
    before = torch.get_rng_state()
    first, again, other = (merge(pairs, "dare-ties", rank=64, seed=seed).adapter for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.factors["proj_in"].up, again.factors["proj_in"].up) and first.digest == again.digest
    assert not torch.allclose(first.factors["proj_in"].delta(), other.factors["proj_in"].delta()) and first.digest != other.digest
    all_kept = merge(pairs, "dare-ties", rank=64, density=1.0).adapter
    assert torch.allclose(
        all_kept.factors["proj_in"].delta(), merge(pairs, "ties", rank=64, density=1.0).adapter.factors["proj_in"].delta(), atol=1e-6
    )
    dropped = (first.factors["proj_in"].delta().abs() < 1e-6).float().mean()
    assert 0.15 < float(dropped) < 0.35  # a quarter of the entries lost both


@pytest.mark.parametrize("rank", [1, 3, 4, 9])
def test_a_rank_keeps_what_the_singular_values_say(rank: int) -> None:
    adapter = adapter_of(1)
    reduced = reduce_rank(adapter, rank)
    whole = kept = 0.0
    for name, delta in deltas(adapter).items():
        left, values, right = torch.linalg.svd(delta.double(), full_matrices=False)
        best = left[:, :rank] * values[:rank] @ right[:rank]
        assert torch.allclose(reduced.adapter.factors[name].delta().double(), best, atol=1e-6)
        whole, kept = whole + float(values.square().sum()), kept + float(values[:rank].square().sum())
    assert reduced.energy == pytest.approx(kept / whole) and (reduced.energy < 0.99) == (rank < 4)
    assert max(reduced.adapter.ranks()) == min(rank, 4) and reduced.adapter.digest != adapter.digest
    merged = merge([(adapter, 1.0), (adapter_of(2), 1.0)], "linear", rank=rank)
    assert merged.adapter.ranks() == {min(rank, 8): 2} and (merged.energy < 0.99) == (rank < 8)


def test_payloads() -> None:
    bias = Patch(torch.ones(64), False)
    one, two = replace(adapter_of(1), patches={"proj_in.bias": bias}), replace(adapter_of(2), patches={"proj_in.bias": bias})
    merged = merge([(one, 1.0), (two, 0.5)], "linear").adapter.patches
    assert torch.equal(merged["proj_in.bias"].value, torch.full((64,), 1.5)) and not merged["proj_in.bias"].is_replacement
    with pytest.raises(ValueError, match="full-rank payloads"):
        merge([(one, 1.0), (two, 1.0)], "ties", rank=4)
    with pytest.raises(ValueError, match="full-rank payloads"):
        merge([(one, 1.0), (replace(two, patches={"proj_in.bias": Patch(torch.ones(64), True)}), 1.0)], "linear")


@pytest.mark.parametrize(
    ("method", "options", "match"),
    [
        ("ties", {}, "ties without a rank"),
        ("mean", {"rank": 4}, "2 adapters by mean"),
        ("ties", {"rank": 4, "density": 0.0}, "density 0.0"),
        ("linear", {"rank": 0}, "rank: got 0"),
        ("ties", {"rank": 0}, "rank: got 0"),
    ],
)
def test_options_that_do_not_fit(method: Method, options: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        merge([(adapter_of(1), 1.0), (adapter_of(2), 1.0)], method, **options)  # type: ignore[arg-type]


def test_what_cannot_be_merged() -> None:
    one = adapter_of(1)
    with pytest.raises(ValueError, match="1 adapters by linear"):
        merge([(one, 1.0)], "linear")
    with pytest.raises(ValueError, match="weights"):
        merge([(one, 1.0), (one, float("nan"))], "linear")
    with pytest.raises(ValueError, match="one base"):
        merge([(replace(one, partition="transformer"), 1.0), (replace(one, partition="transformer_ref"), 1.0)], "linear")
    with pytest.raises(ValueError, match="rank: got 0"):
        reduce_rank(one, 0)
