"""The batched engine against the pipeline: same decisions, same clips, same losses, clip by clip."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from caches.policy import Budget
from eval.batched_cache import batched_cache
from eval.batched_engine import Batch, measure, rendered
from eval.batched_loop import Group, denoise, grouped, prepare
from eval.batched_loss import parts_of
from eval.cache_cases import PARTS, cases_of
from eval.cache_loss import loss_parts
from eval.losses import Losses
from eval.metrics.pair import Clip, Pair
from eval.quality_cases import Case, Shape, shard_of
from videogen.config import Request, StepCache
from videogen.errors import RequestError
from videogen.pipeline import Pipeline

STEPS = 11
REQUEST = Request("a large red circle moves right on a navy background, a low tone", size=(96, 64), frames=22, steps=STEPS)


def cases(count: int, **more: object) -> list[Case]:
    return [Case(f"case-{seed}", replace(REQUEST, **more), seed) for seed in range(count)]


def group_of(tiny_pipeline: Pipeline, wanted: list[Case]) -> Group:
    (group,) = grouped(tiny_pipeline.load(wanted[0].request.workflow), [prepare(tiny_pipeline, case) for case in wanted], 8)
    return group


def dividing_lambda(group: Group) -> float:
    """A lambda between two clips' drifts at the first step that may be reused, so that they decide apart."""
    channels = group.channels(StepCache())
    with batched_cache(group.transformer, "transformer_blocks", channels, Budget(1e-12), clips=len(group), width=2) as traces:
        denoise(group)
    drifts = sorted(max(trace.decisions[2].drift.values()) for trace in traces)
    return (drifts[0] + drifts[-1]) / 2


@pytest.mark.parametrize("workflow", ["t2va", "fl2va"])
def test_every_clip_is_the_one_the_pipeline_renders(workflow: str, tiny_pipeline: Pipeline) -> None:
    more = {"image": Image.new("RGB", (96, 64), "navy")} if workflow == "fl2va" else {}
    group = group_of(tiny_pipeline, cases(3, **more))
    blocks, options = group.transformer.transformer_blocks, StepCache(lam=dividing_lambda(group))
    frames, sound, traces = rendered(group, options, 2)
    decided = [[decision.action.value for decision in trace.decisions] for trace in traces]
    assert group.transformer.transformer_blocks is blocks and len({*map(tuple, decided)}) > 1
    renderer = tiny_pipeline.sharing(replace(tiny_pipeline.recipe, cache=options))
    for k in (0, 2):
        alone = renderer.render(replace(group.cases[k].request, seed=group.cases[k].seed))
        assert [step["action"] for step in alone.record["cache"]["steps"]] == decided[k]
        assert np.abs(alone.frames.astype(int) - frames[k].numpy()).max() <= 1
        assert np.abs(alone.audio - sound[k].numpy()).max() < 1e-4
    dense, dense_sound, _ = rendered(group, StepCache(), 2)
    plain = tiny_pipeline.render(replace(group.cases[0].request, seed=group.cases[0].seed))
    assert np.abs(plain.frames.astype(int) - dense[0].numpy()).max() <= 1 and not torch.equal(dense_sound, sound)


def test_losses_on_the_device_are_those_of_the_metrics() -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 255, (22, 32, 48, 3)).astype(np.uint8)
    new = np.clip(old.astype(int) + rng.integers(-9, 10, old.shape), 0, 255).astype(np.uint8)
    sound = rng.normal(size=(2, 7000)).astype(np.float32) * 0.1
    wanted = loss_parts(Pair(Clip(new, sound * 0.8, 8000, 24.0), Clip(old, sound, 8000, 24.0)))
    silent = np.zeros_like(sound)
    both = [torch.from_numpy(np.stack(part)) for part in ((new, old), (sound * 0.8, silent), (old, old), (sound, silent))]
    found = parts_of(both[0], both[1], both[2], both[3])
    assert found[0] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert found[1] == pytest.approx(dict.fromkeys(wanted, 0.0), abs=1e-4)


def test_measuring_fills_a_journal_once_and_shards_share_it(tiny_pipeline: Pipeline, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    wanted, path = cases(3), tmp_path / "a.losses.jsonl"
    plan = StepCache(lam=50.0)
    for which in ("0/2", "1/2"):
        measure(tiny_pipeline, shard_of(wanted, which), [(plan, Losses(path))], Batch(2, 2), lambda _: None)
    losses = Losses(path)
    assert len(losses.rows) == 3 and all(row["reused"] == 6 / STEPS and row["parts"]["video"] > 0 for row in losses.rows.values())
    monkeypatch.setattr("eval.batched_engine.prepare", lambda *_: pytest.fail("measured twice"))
    measure(tiny_pipeline, wanted, [(plan, losses)], Batch(2, 2), lambda _: None)
    with pytest.raises(RequestError, match="--shard"):
        shard_of(wanted, "2/2")


def test_parts_share_no_request(tiny_pipeline: Pipeline) -> None:
    ends = [(part.begin, part.end) for part in PARTS.values()]
    assert all(a[1] <= b[0] for a, b in pairwise(ends)) and ends[-1][1] - ends[-1][0] >= 500
    held = cases_of("held-out", 5, "t2va", Shape(frames=22, size=(96, 64)), tiny_pipeline)
    others = cases_of("calibrate", 512, "t2va", Shape(frames=22, size=(96, 64)), tiny_pipeline)
    assert not {case.request.prompt for case in held} & {case.request.prompt for case in others}
    with pytest.raises(RequestError, match="--clips"):
        cases_of("fit", 257, "t2va", Shape(), tiny_pipeline)
