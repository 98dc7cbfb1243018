"""Each peer really caches on H3, starts fresh, and leaves the model as it was."""

import numpy as np
import pytest

from eval.peers import compare, counting, methods
from eval.quality_cases import Shape, fixed_cases
from videogen.pipeline import Pipeline

STEPS = 8


@pytest.fixture(scope="module")
def cases(pipeline: Pipeline) -> list:  # type: ignore[type-arg]
    shape = Shape(size=(96, 64), frames=22, steps=STEPS)
    return fixed_cases(3, "t2va", shape, pipeline.family, pipeline.recipe)


@pytest.mark.parametrize("name", ["videogen, order 1", "videogen, order 0", "FirstBlockCache", "MagCache", "TaylorSeer"])
def test_a_peer_skips_work_repeats_itself_and_leaves_no_trace(name: str, pipeline: Pipeline, cases: list) -> None:  # type: ignore[type-arg]
    from dataclasses import replace

    case = cases[0]
    request = replace(case.request, seed=case.seed)
    before = pipeline.render(request)
    scope, _ = methods(cases[-1])[name]
    strength = 3.0 if name == "TaylorSeer" else 50.0
    results, counts = [], []
    for _ in range(2):
        with scope(pipeline, "t2va", strength) as renderer, counting(pipeline, "t2va") as count:
            results.append(renderer.render(request))
        counts.append(count[0])
    assert 1 <= counts[0] == counts[1] < STEPS
    assert np.array_equal(results[0].frames, results[1].frames) and np.array_equal(results[0].audio, results[1].audio)
    assert not np.array_equal(results[0].frames, before.frames)
    after = pipeline.render(request)
    assert np.array_equal(before.frames, after.frames) and np.array_equal(before.audio, after.audio)


def test_curves_hold_every_point(pipeline: Pipeline, cases: list, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[type-arg,no-untyped-def]
    from eval import peers

    kept = {name: (scope, strengths[-1:]) for name, (scope, strengths) in methods(cases[-1]).items() if name in ("TaylorSeer", "MagCache")}
    monkeypatch.setattr(peers, "methods", lambda _case: kept)
    report = compare(pipeline, cases[:2], cases[-1], tmp_path)
    assert set(report["curves"]) == {"TaylorSeer", "MagCache"} and (tmp_path / "peers.json").exists()
    for curve in report["curves"].values():
        assert 0 < curve[0]["computed"] <= 1 and set(curve[0]["parts"]) == {"video", "motion", "spectrum", "level"}
