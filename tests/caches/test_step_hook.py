"""The hook on a toy stack whose right answers are known in closed form."""

import gc
import math
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from caches.drift import relative_change
from caches.policy import Action, Budget
from caches.step_hook import Channel, step_cache

ROWS, WIDTH, STEPS = 7, 4, 12
SIGMAS = [1.0 - (k / STEPS) ** 2 for k in range(STEPS + 1)]


class Block(nn.Module):
    """Adds `slope * sigma + offset` to every row; counts its calls."""

    def __init__(self, slope: float, offset: float) -> None:
        super().__init__()
        self.slope, self.offset, self.calls = slope, offset, 0

    def forward(self, hidden_states: torch.Tensor, sigma: float) -> torch.Tensor:
        self.calls += 1
        return hidden_states + self.slope * sigma + self.offset


class Toy(nn.Module):
    """A first block and a stack of others, run as diffusers runs them."""

    def __init__(self, first: Block, *rest: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([first, *rest])

    def forward(self, hidden_states: torch.Tensor, sigma: float) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states, sigma)
        return hidden_states


def make_toy(slope: float = 0.3) -> Toy:
    return Toy(Block(0.001, 1.0), Block(slope, 0.5), Block(slope, 0.25))


def channels(order: int = 1, sigmas: Sequence[float] = SIGMAS, drift_order: int = 1) -> dict[str, Channel]:
    return {
        "video": Channel(torch.tensor([4, 5, 6]), sigmas, order, drift_order),
        "audio": Channel(torch.tensor([2, 3]), sigmas, order, drift_order),
    }


def run(toy: Toy, budget: Budget, order: int = 1) -> tuple[list[torch.Tensor], dict[str, object]]:
    inputs = torch.randn(STEPS, 1, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    with step_cache(toy, "blocks", channels(order), budget) as trace:
        outputs = [toy(inputs[k], SIGMAS[k]) for k in range(STEPS)]
    return outputs, trace.record()


def plain() -> list[torch.Tensor]:
    toy = make_toy()
    inputs = torch.randn(STEPS, 1, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    return [toy(inputs[k], SIGMAS[k]) for k in range(STEPS)]


def test_off_and_never_reusing_are_bit_identical() -> None:
    for budget in (Budget(), Budget(lam=1e-12)):
        outputs, record = run(make_toy(), budget)
        assert record["reused"] == 0
        assert all(torch.equal(a, b) for a, b in zip(outputs, plain()))


def test_a_residual_linear_in_sigma_is_predicted_exactly_by_order_1() -> None:
    toy = make_toy()
    outputs, record = run(toy, Budget(lam=10.0))
    assert record["reused"] == 7 and toy.blocks[0].calls == STEPS and toy.blocks[1].calls == STEPS - 7  # type: ignore[union-attr]
    for a, b in zip(outputs, plain()):
        assert torch.allclose(a[:, 2:], b[:, 2:], atol=1e-5)


class Curve(Block):
    """Adds a parabola over sigma."""

    def forward(self, hidden_states: torch.Tensor, sigma: float) -> torch.Tensor:
        return super().forward(hidden_states, sigma) + 2 * self.slope * sigma**2


def test_a_parabola_is_predicted_exactly_by_order_2_and_not_by_order_1() -> None:
    wrong = {}
    inputs = torch.randn(STEPS, 1, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    for order in (1, 2):
        toy, reference = (Toy(Block(0.001, 1.0), Curve(0.3, 0.5)) for _ in range(2))
        with step_cache(toy, "blocks", channels(order), Budget(lam=10.0, first=3)) as trace:
            wrong[order] = max(
                float((toy(inputs[k], SIGMAS[k]) - reference(inputs[k], SIGMAS[k]))[:, 2:].abs().max()) for k in range(STEPS)
            )
        assert trace.reused == 6
    assert wrong[2] < 1e-3 < 1e-2 < wrong[1]


@pytest.mark.parametrize("drift_order", [0, 1, 2])
def test_drift_is_measured_from_what_the_probe_was_expected_to_be(drift_order: int) -> None:
    toy = Toy(Curve(0.2, 1.0), Block(0.1, 0.0))
    with step_cache(toy, "blocks", channels(drift_order=drift_order), Budget(lam=1e-9, first=3)) as trace:
        for k in range(STEPS):
            toy(torch.zeros(1, ROWS, WIDTH), SIGMAS[k])
    probe = [0.2 * s + 0.4 * s**2 + 1.0 for s in SIGMAS]
    x, y = SIGMAS[5 - drift_order : 6], probe[5 - drift_order : 6]
    expected = sum(y[i] * math.prod((SIGMAS[6] - x[j]) / (x[i] - x[j]) for j in range(len(x)) if j != i) for i in range(len(x)))
    assert trace.decisions[6].drift["video"] == pytest.approx(abs(probe[6] - expected) / expected, rel=1e-3, abs=1e-5)


def test_order_0_copies_the_residual_and_adds_it_once() -> None:
    outputs, record = run(make_toy(), Budget(lam=10.0), order=0)
    steps: list[dict[str, object]] = record["steps"]  # type: ignore[assignment]
    reused = next(k for k, step in enumerate(steps) if step["action"] == "reuse")
    stale = plain()[reused] - 0.6 * SIGMAS[reused] + 0.6 * SIGMAS[reused - 1]
    assert torch.allclose(outputs[reused][:, 2:], stale[:, 2:], atol=1e-5)


def test_the_model_is_put_back_and_nothing_outlives_the_scope() -> None:
    toy = make_toy()
    blocks = toy.blocks
    alive: list[weakref.ref[torch.Tensor]] = []
    with pytest.raises(RuntimeError, match="middle"), step_cache(toy, "blocks", channels(), Budget(lam=1.0)):
        toy(torch.ones(1, ROWS, WIDTH), 1.0)
        alive += [weakref.ref(point.residual) for point in toy.blocks[0].state.points["video"]]  # type: ignore[union-attr]
        assert alive[0]() is not None
        raise RuntimeError("middle")
    gc.collect()
    assert toy.blocks is blocks and alive[0]() is None
    assert torch.equal(toy(torch.ones(1, ROWS, WIDTH), 1.0), make_toy()(torch.ones(1, ROWS, WIDTH), 1.0))


def test_a_request_after_another_equals_the_request_alone() -> None:
    toy = make_toy()
    first, _ = run(toy, Budget(lam=10.0))
    with step_cache(toy, "blocks", channels(), Budget(lam=10.0)):
        toy(torch.ones(2, ROWS, WIDTH), 1.0)
    again, _ = run(toy, Budget(lam=10.0))
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_nan_means_compute_and_is_never_extrapolated_from() -> None:
    toy, seen = make_toy(), []
    with step_cache(toy, "blocks", channels(), Budget(lam=10.0)) as trace:
        for k in range(STEPS):
            hidden = torch.ones(1, ROWS, WIDTH)
            if k == 3:
                hidden[0, 4] = math.nan
            seen.append(toy(hidden, SIGMAS[k]))
    assert [trace.decisions[k].reason for k in (2, 3, 4)] == ["within budget", "unknown", "unknown"]
    assert trace.decisions[5].action is Action.REUSE
    assert all(bool(torch.isfinite(seen[k]).all()) == (k != 3) for k in range(STEPS))


def test_a_change_of_shape_means_compute() -> None:
    toy = make_toy()
    with step_cache(toy, "blocks", channels(), Budget(lam=10.0)) as trace:
        for k in range(4):
            toy(torch.ones(1 if k < 3 else 2, ROWS, WIDTH), SIGMAS[k])
    assert trace.decisions[3].reason == "unknown"


def test_a_change_of_shape_at_a_step_computed_anyway_forgets_the_past() -> None:
    toy = make_toy()
    with step_cache(toy, "blocks", channels(), Budget(lam=10.0, max_streak=1)) as trace:
        for k in range(STEPS):
            toy(torch.ones(1 if k < 3 else 2, ROWS, WIDTH), SIGMAS[k])
    assert [trace.decisions[k].reason for k in (2, 3, 4)] == ["within budget", "streak", "within budget"]


def test_ranks_agree_through_sums_that_travel_at_every_step() -> None:
    calls: list[int] = []

    def agree(sums: torch.Tensor) -> torch.Tensor:
        calls.append(len(sums))
        return sums * 3

    toy = make_toy()
    with step_cache(toy, "blocks", channels(), Budget(lam=10.0), agree=agree) as trace:
        for k in range(STEPS):
            toy(torch.ones(1, ROWS, WIDTH), SIGMAS[k])
    assert calls == [4] * (STEPS - 1) and trace.reused == 7


def test_drift_is_relative_and_apart_per_channel() -> None:
    before = {"video": torch.full((1, 2, 2), 2.0), "audio": torch.full((1, 1, 2), 1.0)}
    now = {"video": before["video"] * 1.1, "audio": before["audio"] * 0.5}
    drift = relative_change(now, before)
    assert drift["video"] == pytest.approx(0.1, rel=1e-5) and drift["audio"] == pytest.approx(0.5)
    assert math.isnan(relative_change({"a": torch.ones(1, 0, 2)}, {"a": torch.ones(1, 0, 2)})["a"])


def test_what_cannot_be_cached_is_refused() -> None:
    toy = make_toy()
    with pytest.raises(ValueError, match="expected a stack"), step_cache(toy, "nothing", channels(), Budget(lam=1.0)):
        pass
    with pytest.raises(ValueError, match="expected a stack"), step_cache(Toy(Block(0, 0)), "blocks", channels(), Budget(lam=1.0)):
        pass
    uneven = channels() | {"audio": Channel(torch.tensor([2]), SIGMAS[:-1])}
    with pytest.raises(ValueError, match="one length"), step_cache(toy, "blocks", uneven, Budget(lam=1.0)):
        pass
    with (
        pytest.raises(ValueError, match="falling schedule"),
        step_cache(toy, "blocks", channels(sigmas=[1.0, 0.5, 0.5, 0.0]), Budget(lam=1.0)),
    ):
        pass
    with (
        step_cache(toy, "blocks", channels(), Budget(lam=1.0)),
        pytest.raises(ValueError, match="has one already"),
        step_cache(toy, "blocks", channels(), Budget(lam=1.0)),
    ):
        pass
