"""Training steps: orthogonal updates, gradients as views of one tensor, averaging over real processes."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from videogen.pocket.muon import Muon, orthogonal
from videogen.pocket.ranks import Ranks, flat_gradients
from videogen.pocket.steps import Steps
from videogen.pocket.train_transformer import HIGH, emphasised
from videogen.pocket.training import rate_at


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 16, 6), (2, 6, 16)])
def test_orthogonal_moves_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
    assert values.min() > 0.3 and values.max() < 1.3


def test_muon_step_has_the_rms_of_an_adamw_step_whatever_the_gradients_scale() -> None:
    for scale in (1e-6, 1e3):
        p = torch.nn.Parameter(torch.zeros(32, 64))
        p.grad = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * scale
        Muon([p], 0.01).step()
        assert 0.01 * 0.2 * 0.7 < p.pow(2).mean().sqrt() < 0.01 * 0.2 * 1.3


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.transformer_blocks(x)))
        return out


def test_gradients_are_views_and_a_step_resumes_exactly() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.randn(16, 1)

    def fresh() -> tuple[Toy, Steps]:
        torch.manual_seed(1)
        model = Toy()
        return model, Steps(model, Ranks.join(), rate=1e-2, muon_rate=1e-2)

    model, steps = fresh()
    assert steps.muon is not None and [p.shape for p in steps.muon.param_groups[0]["params"]] == [(4, 4)]
    first = float((model(x) - y).detach().pow(2).mean())
    for _ in range(4):
        steps("batch", lambda: (model(x) - y).pow(2).mean())
    assert all(p.grad is not None and p.grad.untyped_storage().data_ptr() == steps.flat.data_ptr() for p in model.parameters())
    held, state = copy.deepcopy((model.state_dict(), steps.state()))
    other, again = fresh()
    other.load_state_dict(held)
    again.restore(state)
    for _ in range(20):
        steps("batch", lambda: (model(x) - y).pow(2).mean())
        again("batch", lambda: (other(x) - y).pow(2).mean())
    assert torch.equal(torch.cat([p.flatten() for p in model.parameters()]), torch.cat([p.flatten() for p in other.parameters()]))
    assert float((model(x) - y).detach().pow(2).mean()) < first


def test_two_processes_average_and_agree(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import torch\nfrom videogen.pocket.ranks import Ranks\n"
        "r = Ranks.join()\nx = torch.full((3,), float(r.rank))\nr.mean(x)\n"
        "y = torch.full((2,), float(r.rank + 5))\nr.share([y])\n"
        "assert x.tolist() == [0.5] * 3 and y.tolist() == [5.0] * 2 and r.agree(r.rank + 7.0) == 7.0 and r.count == 2\nr.leave()\n"
    )
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_flat_gradients_cover_every_parameter_once() -> None:
    model = Toy()
    flat = flat_gradients(list(model.parameters()))
    flat.copy_(torch.arange(len(flat)))
    seen = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.equal(seen, flat)


def test_emphasis_moves_a_share_of_the_levels_up() -> None:
    u = (torch.arange(1000) + 0.5) / 1000
    assert torch.allclose(emphasised(u, 0.0), u, atol=1e-6)
    moved = emphasised(u, 0.25)
    assert moved.min() >= 0 and moved.max() <= 1 and bool((moved.diff() > 0).all())
    assert abs(float((moved > HIGH).float().mean()) - (0.2 + 0.25 * 0.8)) < 0.002


def test_rate_rises_holds_and_falls() -> None:
    assert rate_at(0.0) == 0.0 and rate_at(0.2) == 1.0 and rate_at(1.0) < 0.021
