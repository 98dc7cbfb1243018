"""The prior: its prediction is the least-squares one, its expected error is the real one, and another schedule is refused."""

import math

import pytest
import torch
from torch import nn

from caches.policy import Budget
from caches.prior import Gram, Prior, foretell, prior_of, read_prior
from caches.step_hook import Channel, step_cache

STEPS, ROWS, WIDTH = 9, 5, 6
SIGMAS = [1.0 - k / STEPS for k in range(STEPS + 1)]


def residuals(seed: int) -> torch.Tensor:
    """A smooth path with noise on it: (steps, rows, width)."""
    rng = torch.Generator().manual_seed(seed)
    basis = torch.stack([torch.tensor([math.cos(n * s) for s in SIGMAS[:-1]]) for n in range(4)], 1)
    return torch.einsum("sn,nrw->srw", basis, torch.randn(4, ROWS, WIDTH, generator=rng)) + 0.01 * torch.randn(
        STEPS, ROWS, WIDTH, generator=rng
    )


def gram(path: torch.Tensor) -> Gram:
    table = path.flatten(1).double()
    return tuple(map(tuple, (table @ table.T).tolist()))


def make_prior(probe: torch.Tensor, rest: torch.Tensor) -> Prior:
    return Prior({"video": tuple(SIGMAS[:-1])}, {"video": gram(probe)}, {"video": gram(rest)}, 1)


class Adds(nn.Module):
    """Adds a step's residual; which step it is, is its argument."""

    def __init__(self, path: torch.Tensor) -> None:
        super().__init__()
        self.path, self.calls = path, 0

    def forward(self, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
        self.calls += 1
        return hidden_states + self.path[step]


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states, step)
        return hidden_states


def run(prior: Prior, probe: torch.Tensor, rest: torch.Tensor, lam: float, order: int = 2) -> tuple[list[torch.Tensor], dict[str, object]]:
    stack = Stack(Adds(probe), Adds(rest))
    channel = Channel(torch.arange(ROWS), SIGMAS, order, prior=prior.of("video", SIGMAS[:-1]))
    with step_cache(stack, "blocks", {"video": channel}, Budget(lam=lam)) as trace:
        return [stack(torch.zeros(1, ROWS, WIDTH), k) for k in range(STEPS)], trace.record()


def test_weights_are_the_least_squares_ones_and_the_error_is_theirs() -> None:
    path = residuals(0)
    weights, error = foretell(gram(path), [1, 2, 4], 6)
    table = path.flatten(1).double()
    best = torch.linalg.lstsq(table[[1, 2, 4]].T, table[6][:, None]).solution[:, 0]
    assert torch.allclose(torch.tensor(weights).double(), best, rtol=1e-4)
    missed = table[6] - best @ table[[1, 2, 4]]
    assert error == pytest.approx(float(missed.norm() / table[6].norm()), rel=1e-4)


def test_a_reused_step_is_off_by_what_was_foretold_and_nearer_than_a_parabola() -> None:
    probe, rest = residuals(1), residuals(2)
    outputs, record = run(make_prior(probe, rest), probe, rest, lam=0.5)
    steps = record["steps"]
    assert isinstance(steps, list)
    reused = [k for k, step in enumerate(steps) if step["action"] == "reuse"]
    assert len(reused) == 1  # 9 forwards allow one
    whole = probe[reused[0]] + rest[reused[0]]
    off = float((outputs[reused[0]][0] - whole).norm() / rest[reused[0]].norm())
    assert off == pytest.approx(steps[reused[0]]["risk"], rel=1e-2)
    stack, channel = Stack(Adds(probe), Adds(rest)), Channel(torch.arange(ROWS), SIGMAS, 2)
    with step_cache(stack, "blocks", {"video": channel}, Budget(lam=1e9)) as trace:
        plain = [stack(torch.zeros(1, ROWS, WIDTH), k) for k in range(STEPS)]
    assert trace.record()["steps"][reused[0]]["action"] == "reuse"
    assert off < float((plain[reused[0]][0] - whole).norm() / rest[reused[0]].norm())


def test_a_probe_beyond_what_is_usual_raises_the_risk() -> None:
    probe, rest = residuals(1), residuals(2)
    prior = make_prior(probe, rest)
    usual = run(prior, probe, rest, lam=0.5)[1]["steps"]
    wild = run(prior, probe + 0.3 * torch.randn(probe.shape, generator=torch.Generator().manual_seed(9)), rest, lam=1e-6)[1]["steps"]
    assert isinstance(usual, list) and isinstance(wild, list)
    at = next(k for k, step in enumerate(usual) if step["action"] == "reuse")
    assert wild[at]["drift"]["video"] > 3 * usual[at]["risk"]


def test_never_reusing_changes_no_bit() -> None:
    probe, rest = residuals(1), residuals(2)
    outputs, record = run(make_prior(probe, rest), probe, rest, lam=1e-12)
    assert record["reused"] == 0
    assert all(torch.equal(out, (torch.zeros(1, ROWS, WIDTH) + probe[k]) + rest[k]) for k, out in enumerate(outputs))


def test_a_prior_comes_back_from_its_file_and_refuses_what_it_is_not_of() -> None:
    prior = make_prior(residuals(1), residuals(2))
    again = read_prior(prior.to_json(), "p.json")
    assert again.digest == read_prior(again.to_json(), "p.json").digest and again.clips == 1
    assert foretell(again.rest["video"], [0, 1, 2], 4)[1] == pytest.approx(foretell(prior.rest["video"], [0, 1, 2], 4)[1], rel=1e-4)
    with pytest.raises(ValueError, match="another schedule, expected the 9 steps"):
        prior.of("video", SIGMAS[:-2])
    with pytest.raises(ValueError, match="another schedule"):
        prior.of("video", [sigma * 0.9 for sigma in SIGMAS[:-1]])
    with pytest.raises(ValueError, match="not finite"):
        prior_of(prior.to_plain() | {"rest": {"video": [[math.nan] * (k + 1) for k in range(STEPS)]}})
    for text in ("", "{}", '{"schema": "videogen.cache-prior/1"}'):
        with pytest.raises(ValueError, match="cache prior"):
            read_prior(text, "p.json")
