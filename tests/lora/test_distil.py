"""The distillation core on flows whose few-step student is known, and the way of trained factors into a file."""

import math
from pathlib import Path

import pytest
import torch

from lora import trainable
from lora.adapter import Adapter
from lora.contract import Contract, resolve_contract, shifted_grid
from lora.convert import load_adapter
from lora.distil import (
    Levels,
    Look,
    State,
    best_look,
    fake_loss,
    frechet,
    generated,
    levels_at,
    matching_loss,
    rollout,
    rollout_loss,
    segment_loss,
    segment_weights,
    stop_reason,
    student_points,
    trajectory,
)
from lora.trainable import LowRank, write_trained
from tests.lora.toys import TARGET, make_model

SHIFTS = (3.0, 6.0)
DIM = 4


def linear(weight: torch.Tensor):
    """v = W x + s on both modalities: straight for no pair of points, so one step differs from many."""

    def velocity(state: State, levels: Levels) -> State:
        return tuple(x @ weight.T + s[:, None, None] for x, s in zip(state, levels))

    return velocity


def noise(size: int, seed: int = 0) -> State:
    rng = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, rows, DIM, generator=rng) for rows in (2, 3))


WEIGHT = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(9)) * 0.8


def test_a_trajectory_is_the_path_of_plain_sampling() -> None:
    keep = student_points(4, 1.0)  # none of the inner points is on the grid of 7
    kept = trajectory(linear(WEIGHT), noise(2), 7, SHIFTS, keep)
    plain = rollout(linear(WEIGHT), noise(2), levels_at(student_points(7, 1.0), SHIFTS, WEIGHT))
    for m in range(2):
        torch.testing.assert_close(kept[-1][m], plain[-1][m])
        torch.testing.assert_close(kept[0][m], plain[0][m])
    # base level 3/4 lies between 6/7 and 5/7: on the straight line between those states, in each modality's own levels
    s = levels_at([6 / 7, 3 / 4, 5 / 7], SHIFTS, WEIGHT)
    for m in range(2):
        share = (s[m, 0] - s[m, 1]) / (s[m, 0] - s[m, 2])
        torch.testing.assert_close(kept[1][m], plain[1][m].lerp(plain[2][m], share))
    on_grid = trajectory(linear(WEIGHT), noise(2), 8, SHIFTS, keep)
    fine = rollout(linear(WEIGHT), noise(2), levels_at(student_points(8, 1.0), SHIFTS, WEIGHT))
    assert all(torch.allclose(on_grid[k][1], fine[2 * k][1]) for k in range(5))
    with pytest.raises(ValueError, match="falling from 1 to 0"):
        trajectory(linear(WEIGHT), noise(2), 7, SHIFTS, [1.0, 0.5])


def test_a_warp_is_one_more_shift() -> None:
    levels = levels_at(student_points(4, 0.3), SHIFTS, WEIGHT)
    for row, shift in zip(levels, SHIFTS):
        assert row.tolist() == pytest.approx(shifted_grid(4, 0.3 * shift), abs=1e-6)
    weights = segment_weights(levels_at(student_points(4, 1.0), (6.0,), WEIGHT))
    assert weights.tolist() == pytest.approx([0.2, 0.21, 0.235, 0.355], abs=0.005) and float(weights.sum()) == pytest.approx(1)
    with pytest.raises(ValueError, match="student grid"):
        student_points(0, 1.0)


def fit(student: LowRank, loss_of, steps: int, rate: float = 0.02) -> None:
    optimiser = torch.optim.Adam(student.parameters(), rate)
    for _ in range(steps):
        optimiser.zero_grad()
        loss_of().backward()
        optimiser.step()


def test_regression_finds_the_one_step_student_of_a_linear_flow() -> None:
    kept = trajectory(linear(WEIGHT), noise(64), 20, (3.0, 3.0), student_points(1, 1.0))
    student = LowRank({"w": WEIGHT}, {"w": DIM}, seed=1)
    ones = (torch.ones(64), torch.ones(64))
    zeros = (torch.zeros(64), torch.zeros(64))
    nothing = (torch.zeros(1, 1, DIM), torch.zeros(1, 1, DIM))
    offset = trajectory(linear(WEIGHT), nothing, 20, (3.0, 3.0), [1.0, 0.0])[-1]

    def velocity(state: State, levels: Levels) -> State:
        return tuple(x @ student.merged()["w.weight"].T + b for x, b in zip(state, offset))

    def loss() -> torch.Tensor:
        return segment_loss(velocity, kept[0], kept[1], ones, zeros)

    before = loss().item()
    fit(student, loss, 250)
    assert loss().item() < 1e-3 * before  # the exact student is a linear map


def test_rollouts_bring_the_end_nearer_than_the_undistilled_steps() -> None:
    levels = levels_at(student_points(2, 1.0), SHIFTS, WEIGHT)
    kept = trajectory(linear(WEIGHT), noise(64), 20, SHIFTS, student_points(2, 1.0))
    student = LowRank({"w": WEIGHT}, {"w": 2}, seed=1)

    def loss(anchor: float) -> torch.Tensor:
        return rollout_loss(linear(student.merged()["w.weight"]), kept, levels, anchor=anchor)

    def error(weight: torch.Tensor) -> float:
        ends = rollout(linear(weight), kept[0], levels)[-1]
        return sum((x - y).pow(2).mean().item() for x, y in zip(ends, kept[-1]))

    base, base_loss = error(WEIGHT), loss(0.0).item()
    samples = [(x - y).pow(2).flatten(1).mean(1) for x, y in zip(rollout(linear(WEIGHT), kept[0], levels)[-1], kept[-1])]
    assert base_loss == pytest.approx(torch.stack(samples).log().mean().item(), abs=0.01)  # B = 0 is the base
    assert loss(1.0).item() > base_loss
    fit(student, lambda: loss(0.0), 150)
    assert error(student.merged()["w.weight"].detach()) < 0.3 * base and loss(0.0).item() < base_loss - 1


def test_matching_pushes_from_what_the_fake_sees_to_what_the_teacher_sees() -> None:
    levels = (torch.full((8,), 0.6), torch.full((8,), 0.6))
    clean = tuple(x.requires_grad_() for x in noise(8, 3))
    torch.manual_seed(0)
    matching_loss(clean, linear(WEIGHT), linear(WEIGHT), levels).backward()
    assert all(float(x.grad.abs().max()) < 1e-6 for x in clean)
    higher = linear(WEIGHT)

    def fake(state: State, at: Levels) -> State:  # sees everything one too high
        return tuple(v + 1 / s[:, None, None] for v, s in zip(higher(state, at), at))

    matching_loss(clean, linear(WEIGHT), fake, levels).backward()
    assert all(bool((x.grad > 0).all()) for x in clean)  # descent lowers the student
    student = LowRank({"w": WEIGHT}, {"w": 1})
    made = generated(linear(student.merged()["w.weight"]), noise(8), levels_at(student_points(2, 1.0), SHIFTS, WEIGHT), 1)
    sum(x.sum() for x in made).backward()
    assert float(student.ups[0].grad.abs().sum()) > 0
    assert float(fake_loss(made, linear(WEIGHT), levels).detach()) > 0


def test_stop_rules() -> None:
    start = Look(30.0, 1.0, 5.0)
    for looks, word in (
        ([start, Look(29.0, 1.05, 4.0)], ""),
        ([start, Look(29.0, 1.11, 4.0)], "sharpness"),
        ([start, Look(28.4, 1.0, 4.0)], "fidelity fell"),
        ([start, Look(30.0, 1.0, 4.0), Look(30.0, 1.0, 4.5), Look(30.0, 1.0, 4.6)], "rose 2 times"),
        ([start, Look(30.0, 1.0, 5.5), Look(30.0, 1.0, 5.4)], ""),
    ):
        assert word in stop_reason(looks, 1.0) and bool(word) == bool(stop_reason(looks, 1.0))
    assert best_look([start, Look(29.0, 1.0, 4.0), Look(29.0, 1.2, 1.0)], 1.0) == 1
    assert best_look([start, Look(28.0, 1.0, 4.0)], 1.0) == 0


def test_frechet_of_gaussians() -> None:
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(4000, 3, generator=rng)
    assert frechet(a, a) == pytest.approx(0, abs=1e-6)
    assert frechet(a, a + 2) == pytest.approx(12, rel=1e-6)
    scaled = frechet(a, 3 * a)
    assert scaled == pytest.approx(4 * float(torch.cov(a.T).trace() + a.mean(0).pow(2).sum()), rel=1e-3)


def trained() -> tuple[LowRank, torch.nn.Module]:
    model = make_model()
    weights = {name: module.weight for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    ranks = {name: 3 for name in weights if ".attn." in name} | {"transformer_blocks.0.adaln_proj.linear": 2, "proj_out": 3}
    student = LowRank(weights, ranks, seed=2)
    with torch.no_grad():
        for up in student.ups:
            up.normal_(generator=torch.Generator().manual_seed(4))
    return student, model


def test_merged_weights_are_base_plus_update() -> None:
    student, model = trained()
    factors = student.adapter("a").factors
    for name, weight in student.merged().items():
        wanted = model.get_parameter(name) + factors[name.removesuffix(".weight")].delta()
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="rank it can hold"):
        LowRank({"w": WEIGHT}, {"w": DIM + 1})


def test_a_written_student_reads_back_with_its_contract(tmp_path: Path) -> None:
    student, _ = trained()
    contract = Contract(forwards=4, shift_video=3.6, shift_audio=0.9, strength=1.0, size=(160, 96))
    path = tmp_path / "turbo4.safetensors"
    rounding = write_trained(student, TARGET, path, contract, {"made_by": "a test"})
    again = load_adapter(path, TARGET)
    assert 0 < rounding < 0.01 and again.metadata["made_by"] == "a test"
    for name, factors in student.adapter("a").factors.items():
        assert float((again.factors[name].delta() - factors.delta()).norm() / factors.delta().norm()) <= rounding
        assert again.factors[name].up.dtype == torch.bfloat16 and again.factors[name].scale == 1
    found = resolve_contract(str(path), again.metadata, partition=again.partition)
    assert found.to_metadata() == contract.to_metadata() and found.partition is None
    found.require(workflow="ref2va", forwards=4)  # one file for both partitions
    found.require(workflow="t2va")
    assert math.isclose(found.schedule()["video"][1], 3.6 * 0.75 / (1 + 2.6 * 0.75))


def test_a_file_that_reads_back_otherwise_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student, _ = trained()

    def wrong(path: Path, target: object) -> Adapter:
        found = load_adapter(path, target)
        (first, *_) = found.factors
        found.factors[first].up.mul_(1.02)
        return found

    monkeypatch.setattr(trainable, "load_adapter", wrong)
    with pytest.raises(ValueError, match="of the trained update"):
        write_trained(student, TARGET, tmp_path / "a.safetensors", Contract(forwards=4), {})
    assert not list(tmp_path.iterdir())
