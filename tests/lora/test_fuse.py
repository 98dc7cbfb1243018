"""Row orders there and back, exactly, for any sizes; and evidence that never claims what is not there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora.adapter import Factors
from lora.fuse import block_rank, deinterleave, fuse_qkv, interleave, order_evidence, split_qkv, swap_halves

SIZES = st.integers(1, 5)
SCALES = st.sampled_from([1.0, 0.0625, 2.0])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parts_of(rows: int, columns: int, ranks: tuple[int, int, int], scale: float, seed: int = 0) -> list[Factors]:
    return [Factors(random(r, columns, seed=seed + i), random(rows, r, seed=seed + 9 + i), scale) for i, r in enumerate(ranks)]


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES)
def test_interleaving_is_undone(heads: int, head_dim: int, columns: int) -> None:
    rows = random(3 * heads * head_dim, columns)
    woven = interleave(rows, head_dim)
    assert torch.equal(deinterleave(woven, head_dim), rows)
    for part in range(3):
        for head in range(heads):
            start = (part * heads + head) * head_dim
            there = (head * 3 + part) * head_dim
            assert torch.equal(woven[there : there + head_dim], rows[start : start + head_dim])


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES, SCALES, st.integers(0, 99))
def test_apart_fused_and_split_is_the_same(rows: int, columns: int, rank: int, scale: float, seed: int) -> None:
    parts = parts_of(rows, columns, (rank, rank, rank), scale, seed)
    fused = fuse_qkv(parts)
    assert fused.rank == 3 * rank and fused.scale * fused.rank == 3 * scale * rank  # alpha triples with the rank
    for part, back in zip(parts, split_qkv(fused)):
        assert torch.equal(back.down, part.down) and torch.equal(back.up, part.up) and back.scale == part.scale
    wanted = torch.cat([part.delta() for part in parts])
    assert float((fused.delta() - wanted).norm()) <= 1e-6 * float(wanted.norm())


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES, SCALES)
def test_one_down_keeps_its_rank(rows: int, columns: int, rank: int, scale: float) -> None:
    down = random(rank, columns, seed=3)
    parts = [Factors(down, random(rows, rank, seed=i), scale) for i in range(3)]
    fused = fuse_qkv(parts)
    assert fused.rank == rank
    for part, back in zip(parts, split_qkv(fused)):
        assert torch.equal(back.down, part.down) and torch.equal(back.up, part.up) and back.scale == part.scale


@settings(max_examples=30, deadline=None)
@given(st.tuples(SIZES, SIZES, SIZES), SIZES)
def test_unequal_ranks_and_scales_still_give_the_deltas(ranks: tuple[int, int, int], columns: int) -> None:
    parts = [Factors(part.down, part.up, 0.3 * (i + 1)) for i, part in enumerate(parts_of(4, columns, ranks, 1.0))]
    for part, back in zip(parts, split_qkv(fuse_qkv(parts))):
        assert float((back.delta() - part.delta()).norm()) <= 1e-6 * float(part.delta().norm())


def test_halves_swap_and_swap_back() -> None:
    rows = torch.arange(6)
    assert swap_halves(rows).tolist() == [3, 4, 5, 0, 1, 2] and torch.equal(swap_halves(swap_halves(rows)), rows)


def test_what_counts_as_block_diagonal() -> None:
    up = torch.block_diag(*[random(4, 2, seed=i) for i in range(3)])
    assert block_rank(up) == 2 and block_rank(up.roll(1, 0)) is None and block_rank(random(12, 6)) is None
    assert block_rank(torch.zeros(12, 6)) is None and block_rank(up[:, :5]) is None


@pytest.mark.parametrize("seed", range(40))
def test_noise_is_no_evidence(seed: int) -> None:
    ups = [random(3 * 4 * 16, 4, seed=100 * seed + i) for i in range(4)]
    assert order_evidence(ups, 16) is None


def test_the_share_explained_is_exact_where_it_is_all() -> None:
    """Six heads whose norms depend on q, k or v alone: one order explains everything, the other nothing."""
    up = torch.tensor([1.0, 2.0, 5.0]).repeat_interleave(6 * 4)[:, None]
    assert order_evidence([up] * 9, 4) == ("stacked", "block norms over 9 modules (1.00 more explained)")
    assert order_evidence([interleave(up, 4)] * 9, 4) == ("interleaved", "block norms over 9 modules (1.00 more explained)")


def test_evidence_follows_the_larger_and_survives_varied_heads() -> None:
    ups = []
    for i in range(10):
        size = torch.tensor([0.5, 1.0, 2.0])[:, None] * random(3, 8, seed=i).mul(0.3).exp()  # (3, heads)
        ups.append(random(3 * 8 * 16, 4, seed=50 + i) * size.reshape(-1).repeat_interleave(16)[:, None])
    for order, rows in (("stacked", ups), ("interleaved", [interleave(up, 16) for up in ups])):
        found = order_evidence(rows, 16)
        assert found is not None and found[0] == order
    assert order_evidence(ups + [interleave(up, 16) for up in ups], 16) is None
    assert order_evidence([torch.zeros(12, 2)], 2) is None
