"""Each peer really caches on H3, starts fresh, and leaves the model as it was."""

import json
import sys
import xml.etree.ElementTree as xml
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from caches.prior import Prior
from eval import peers
from eval.batched_loop import Group, denoise, prepare
from eval.cache_cases import cases_of
from eval.cache_prior import measure_prior
from eval.peer_methods import counting, described, methods
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


def test_a_peers_question_is_its_own(prior: Prior) -> None:
    assert described("SeaCache", None) == described("SeaCache", prior) != described("MagCache", None)
    assert described("videogen", None) != described("videogen", prior) != described("videogen", replace(prior, clips=9))


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
    monkeypatch.setattr(sys, "argv", ["peers", *shape, "--out", str(tmp_path), "--steps", "9"])
    peers.main()  # another question: nothing that is known answers it
    assert len((tmp_path / "taylorseer.losses.jsonl").read_text().splitlines()) == 8
    assert [len(row["by_clip"]["loss"]) for row in report["curves"]["videogen"]] == [2, 2]
    assert len(xml.parse(tmp_path / "peers.svg").getroot().findall("{*}polyline")) == 2


def curve(*losses: list[float]) -> list[dict[str, Any]]:
    """A curve whose points compute 1, 0.6 and 0.4 of the steps in every clip."""
    found = []
    for share, each in zip((1.0, 0.6, 0.4), losses, strict=True):
        by_clip = {"computed": [share] * len(each), "loss": each}
        found.append({"computed": share, "loss": {"mean": sum(each) / len(each)}, "by_clip": by_clip})
    return found


def test_equal_shares_are_compared_between_points_only() -> None:
    theirs, ours = curve([0.0], [0.2], [0.6]), curve([0.0], [0.1], [0.3])
    low, *_, middle = peers.compared({"videogen": ours, "peer": theirs})
    assert low["ours_over_best_peer"] is None and low["loss"]["peer"] is None and low["interval_95"] is None
    assert middle["loss"]["peer"] == pytest.approx(0.4) and middle["ours_over_best_peer"] == pytest.approx(0.5)
    assert [row["computed"] for row in peers.compared({"videogen": ours, "peer": theirs})] == [0.35, 0.4, 0.45, 0.5]


def test_the_interval_is_of_pairs_of_prompts() -> None:
    rng = np.random.default_rng(1)
    hard = rng.lognormal(0, 1, 64)  # of a prompt, for every method
    theirs = curve(*((scale * hard).tolist() for scale in (0.0, 0.2, 0.6)))
    worse = curve(*((scale * hard).tolist() for scale in (0.0, 0.4, 1.2)))
    ours = curve(*((scale * hard * rng.uniform(0.4, 0.6, 64)).tolist() for scale in (0.0, 0.2, 0.6)))
    rows = peers.compared({"videogen": ours, "worse": worse, "peer": theirs})
    for row in rows[1:]:
        low, high = row["interval_95"]
        assert low < row["ours_over_best_peer"] < high and 0.01 < high - low < 0.06  # unpaired it would be ten times as wide
    wanted = stats.bootstrap(  # at 0.4, a point of both curves
        (np.asarray(ours[2]["by_clip"]["loss"]), 0.6 * hard),
        lambda a, b, axis: a.mean(axis=axis) / b.mean(axis=axis),
        n_resamples=2000,
        paired=True,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(5),
    ).confidence_interval
    assert rows[1]["interval_95"] == pytest.approx([wanted.low, wanted.high], abs=0.003)
    assert rows == peers.compared({"videogen": ours, "worse": worse, "peer": theirs})  # seeded


def test_curves_of_other_requests_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"clips of the curves: got \[1, 2\]"):
        peers.compared({"videogen": curve([0.0], [0.1], [0.3]), "peer": curve([0.0] * 2, [0.2] * 2, [0.6] * 2)})
