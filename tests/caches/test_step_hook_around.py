"""The hook beside what else touches a transformer: other ranks, compiled blocks, adapters. Real H3 blocks at toy size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from caches.policy import Budget
from caches.step_hook import Channel, step_cache
from caches.trace import Trace
from lora.adapter import Adapter, Factors
from lora.apply import Use, attached
from tests.caches.two_ranks import RATES, decisions, rank
from tests.lora.toys import make_model, make_truth

STEPS, TEXT, AUDIO, VIDEO = 9, 3, 4, 12
ROWS = TEXT + AUDIO + VIDEO
SIGMAS = [1.0 - (k / STEPS) ** 2 for k in range(STEPS + 1)]


def denoised(model: torch.nn.Module, budget: Budget) -> tuple[list[torch.Tensor], Trace]:
    """Every step's outputs, each step on what the last one gave."""
    generator = torch.Generator().manual_seed(0)
    video, audio = torch.randn(1, VIDEO, 16, generator=generator), torch.randn(1, AUDIO, 8, generator=generator)
    text = torch.randn(1, TEXT, 24, generator=generator)
    a, v = torch.arange(TEXT, TEXT + AUDIO), torch.arange(TEXT + AUDIO, ROWS)
    layout = {
        "token_tags": torch.tensor([1] * TEXT + [2] * AUDIO + [0] * VIDEO),
        "position_ids": torch.arange(ROWS * 3).view(ROWS, 3) % 7,
        "video_indices": v,
        "audio_indices": a,
        "text_indices": torch.arange(TEXT),
    }
    out: list[torch.Tensor] = []
    channels = {"video": Channel(v, SIGMAS), "audio": Channel(a, SIGMAS)}
    with torch.no_grad(), step_cache(model, "transformer_blocks", channels, budget) as trace:
        for k in range(STEPS):
            t = torch.tensor([1 - SIGMAS[k]])
            seen, heard = model(video, audio, text, t, torch.zeros(ROWS, dtype=torch.long), **layout, return_dict=False)
            video, audio = (x + (SIGMAS[k] - SIGMAS[k + 1]) * dx for x, dx in ((video, seen), (audio, heard)))
            out += [seen, heard]
    return out, trace


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_compiled_blocks_reuse_the_same_steps() -> None:
    model = make_model()
    wanted, trace = denoised(model, Budget(lam=10.0))
    dense, _ = denoised(model, Budget())
    for block in model.transformer_blocks:
        block.compile(backend="eager")
    found, compiled = denoised(model, Budget(lam=10.0))
    assert trace.reused == compiled.reused == 1 and not same(wanted, dense)
    assert [d.reason for d in trace.decisions] == [d.reason for d in compiled.decisions]
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    assert same(denoised(model, Budget(lam=1e-12))[0], denoised(model, Budget())[0])


@pytest.mark.parametrize("fuse", [False, True])
def test_adapters_are_cached_like_weights_and_leave_nothing(fuse: bool) -> None:
    model = make_model()
    adapter = Adapter("a", "a", "toy", {name: Factors(down, up, 2.0) for name, (down, up) in make_truth().items()}, {})
    plain, plain_cached = denoised(model, Budget())[0], denoised(model, Budget(lam=10.0))[0]
    with attached(model, [Use(adapter)], fuse=fuse):
        dense = denoised(model, Budget())[0]
        assert not same(dense, plain) and same(denoised(model, Budget(lam=1e-12))[0], dense)
        cached, trace = denoised(model, Budget(lam=10.0))
        assert trace.reused == 1 and not same(cached, dense)
        moved = max(float((x - y).norm() / y.norm()) for x, y in zip(cached, dense, strict=True))
        other = min(float((x - y).norm() / y.norm()) for x, y in zip(plain_cached, dense, strict=True))
        assert moved < other  # what was cached is the adapted model's
    assert same(denoised(model, Budget())[0], plain) and same(denoised(model, Budget(lam=10.0))[0], plain_cached)


def test_two_ranks_take_the_same_decisions_where_each_alone_would_not(tmp_path: Path) -> None:
    alone = [decisions(RATES[:3], agree=False), decisions(RATES[3:], agree=False)]
    assert alone[0] != alone[1]
    other = subprocess.Popen([sys.executable, "-m", "tests.caches.two_ranks", str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
    mine = rank(0, tmp_path / "store")
    told, _ = other.communicate(timeout=60)
    assert other.returncode == 0 and json.loads(told) == mine
    assert mine not in alone and "video drift" in mine and "within budget" in mine
