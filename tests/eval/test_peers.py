"""Each peer really caches on H3, starts fresh, and leaves the model as it was."""

import json
import sys
import xml.etree.ElementTree as xml
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from caches.prior import Prior
from eval import peers
from eval.batched_loop import Group, denoise, prepare
from eval.cache_cases import cases_of
from eval.cache_prior import measure_prior
from eval.peer_methods import counting, methods
from eval.quality_cases import Case, Shape
from videogen.config import Request
from videogen.pipeline import Pipeline

STEPS = 8
NAMES = ["videogen", "videogen, parabolas", "FirstBlockCache", "MagCache", "TaylorSeer", "TaylorSeer, order 2", "SeaCache"]


@pytest.fixture(scope="module")
def make(tiny_pipeline: Pipeline) -> Callable[[], Group]:
    request = Request("a large red circle moves right on a navy background, a low tone", size=(96, 64), frames=22, steps=STEPS)
    prepared = prepare(tiny_pipeline, Case("a", request, 1))
    return lambda: Group(tiny_pipeline.load("t2va"), [prepared])


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def prior(tiny_pipeline: Pipeline) -> Prior:
    shape = Shape(size=(96, 64), frames=22, steps=STEPS)
    return measure_prior(tiny_pipeline, cases_of("fit", 2, "t2va", shape, tiny_pipeline))


@pytest.mark.parametrize("name", NAMES)
def test_a_peer_skips_work_repeats_itself_and_leaves_no_trace(name: str, make: Callable[[], Group], prior: Prior) -> None:
    group = make()
    before = denoise(group)
    scope, _ = methods(make, prior)[name]
    strength = 3.0 if "Taylor" in name else 50.0
    results, counts = [], []
    for _ in range(2):
        cache = scope(group, strength)
        with counting(group.transformer) as count, cache:
            results.append(denoise(group))
        counts.append(count[0])
    assert 1 <= counts[0] == counts[1] < STEPS
    assert same(*results) and not same(results[0], before)
    assert same(before, denoise(group)) and not group.transformer.is_cache_enabled


def test_the_command_writes_curves_a_comparison_and_a_plot(
    tiny_pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = methods

    def few(calibration: Callable[[], Group], prior: Prior | None) -> dict[str, object]:
        table = stock(calibration, prior)
        return {name: (table[name][0], strengths) for name, strengths in (("videogen", (1e-9, 50.0)), ("TaylorSeer", (2, 4)))}

    monkeypatch.setattr(peers, "methods", few)
    monkeypatch.setattr(peers, "open_pipeline", lambda *_, **__: tiny_pipeline)
    shape = ["--size", "96x64", "--frames", "22", "--steps", str(STEPS), "--prompts", "2"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["peers", *shape, "--out", str(tmp_path)])
        peers.main()
        report = json.loads((tmp_path / "peers.json").read_text())
    assert report["clips"] == 2 and set(report["curves"]) == {"videogen", "TaylorSeer"}
    exact, cached = report["curves"]["videogen"]
    assert exact["computed"] == 1 and exact["loss"]["mean"] < cached["loss"]["mean"] and cached["computed"] == 7 / 8
    assert len((tmp_path / "taylorseer.losses.jsonl").read_text().splitlines()) == 4
    assert len(xml.parse(tmp_path / "peers.svg").getroot().findall("{*}polyline")) == 2


def test_equal_shares_are_compared_between_points_only() -> None:
    curve = [{"computed": share, "loss": {"mean": loss}} for share, loss in ((1.0, 0.0), (0.6, 0.2), (0.4, 0.6))]
    better = [{"computed": share, "loss": {"mean": loss / 2}} for share, loss in ((1.0, 0.0), (0.6, 0.2), (0.4, 0.6))]
    low, middle = peers.compared({"videogen": better, "peer": curve})
    assert low["ours_over_best_peer"] is None and low["loss"]["peer"] is None
    assert middle["loss"]["peer"] == pytest.approx(0.4) and middle["ours_over_best_peer"] == pytest.approx(0.5)
