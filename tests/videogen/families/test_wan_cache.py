"""The step cache on Wan: two streams of guidance, two experts; off is diffusers' own clip, on is held against a replay by hand."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from caches.step_hook import replaced
from caches.trace import Trace
from videogen.config import Recipe, Request, StepCache
from videogen.families.wan_cache import open_states
from videogen.families.wan_pipeline import schedule_of
from videogen.pipeline import Pipeline, open_pipeline

REQUEST = Request("a fox runs", size=(64, 32), frames=5, steps=12, seed=3, negative_prompt="blur")
COPYING = StepCache(lam=1e9, max_streak=2, video_order=0, drift_order=0)


class Replay(nn.Module):
    """A stack that follows a list of `compute` and `reuse`, for each stream in turn, adding the residual it kept."""

    def __init__(self, blocks: nn.ModuleList, actions: list[str], streams: int) -> None:
        super().__init__()
        self.blocks, self.actions, self.streams, self.calls = blocks, actions, streams, 0
        self.kept: dict[int, torch.Tensor] = {}

    def forward(self, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        stream, action = self.calls % self.streams, self.actions[self.calls]
        self.calls += 1
        first: torch.Tensor = self.blocks[0](hidden, *args)
        if action == "reuse":
            return first + self.kept[stream]
        out = first
        for block in [*self.blocks][1:]:
            out = block(out, *args)
        self.kept[stream] = out - first
        return out


def actions_of(record: dict[str, Any]) -> list[str]:
    return [step["action"] for step in record["cache"]["steps"]]


def test_a_cached_clip_equals_a_replay_by_hand(two: Pipeline) -> None:
    cached = two.sharing(Recipe("cached", cache=COPYING)).render(REQUEST)
    actions, record = actions_of(cached.record), cached.record["cache"]
    parts = two.load("t2v")
    split = 2 * schedule_of(parts.pipe, two.family.resolve(REQUEST, Recipe())).boundary_step
    assert 8 <= split <= 16 and len(actions) == cached.record["forwards"] == 24
    assert actions[split : split + 4] == ["compute"] * 4 and actions[-2:] == ["compute"] * 2  # the second expert begins anew
    assert record["reused"] >= 8 and record["reasons"]["compute: first"] == 8
    for streams, is_equal in ((2, True), (1, False)):
        with ExitStack() as stack:
            for transformer, own in zip(parts.transformers, (actions[:split], actions[split:])):
                stack.enter_context(replaced(transformer, "blocks", [Replay(transformer.blocks, own, streams)]))
            assert np.array_equal(two.render(REQUEST).frames, cached.frames) == is_equal


def test_a_cache_that_reuses_nothing_and_one_that_is_off_leave_the_clip(two: Pipeline) -> None:
    parts, plain = two.load("t2v"), two.render(REQUEST)
    stacks = [transformer.blocks for transformer in parts.transformers]
    strict = two.sharing(Recipe("strict", cache=StepCache(lam=1e-12))).render(REQUEST)
    assert np.array_equal(strict.frames, plain.frames) and set(actions_of(strict.record)) == {"compute"}
    assert "reused nothing" in strict.record["cache"]["warning"] and plain.record["cache"]["steps"] == []
    assert [transformer.blocks for transformer in parts.transformers] == stacks
    assert all("cache_context" not in vars(transformer) for transformer in parts.transformers)


def test_streams_decide_each_or_together(two: Pipeline) -> None:
    steps = two.sharing(Recipe("x", cache=replace(COPYING, streams="together"))).render(REQUEST).record["cache"]["steps"]
    first = next(index for index, step in enumerate(steps) if step["action"] == "reuse")
    assert first % 2 == 0 and steps[first + 1]["reason"] == "as cond" and steps[first + 1]["action"] == "reuse"
    drifts = [steps[first + k]["drift"]["video"] for k in range(2)]
    for how, is_split in (("each", True), ("together", False)):
        options = replace(COPYING, lam=sum(drifts) / 2, streams=how)
        actions = actions_of(two.sharing(Recipe("x", cache=options)).render(REQUEST).record)
        assert (actions[first] != actions[first + 1]) == is_split and (actions[::2] != actions[1::2]) == is_split


def test_a_cached_clip_stays_close(two: Pipeline) -> None:
    plain = two.render(REQUEST).frames.astype(float)
    cached = two.sharing(Recipe("x", cache=replace(COPYING, video_order=1, drift_order=1))).render(REQUEST)
    assert 0 < np.abs(cached.frames - plain).mean() < 1


def test_one_stream_without_guidance_and_a_given_first_frame(folders: dict[str, Path]) -> None:
    picture = Image.new("RGB", (64, 32), (200, 30, 30))
    model = open_pipeline(str(folders["5b"]), "plain", device="cpu")
    request = replace(REQUEST, image=picture, negative_prompt="", guidance=(1.0,))
    result = model.sharing(Recipe("x", cache=COPYING)).render(request)
    assert len(actions_of(result.record)) == result.record["forwards"] == 12 and "reuse" in actions_of(result.record)
    schedule = schedule_of(model.load("i2v").pipe, model.family.resolve(request, Recipe()))
    assert (schedule.begin, schedule.end) == (2, 4)  # 2x1 rows a latent frame, the first of two given


def test_states_of_one_expert_are_let_go_when_the_other_is_asked(two: Pipeline) -> None:
    schedule = schedule_of(two.load("t2v").pipe, two.family.resolve(REQUEST, Recipe()))
    experts = open_states(COPYING, schedule, (0, schedule.boundary_step), torch.device("cpu"), lambda *_: pytest.fail("not asked"))
    high = experts.states[0]["cond"]
    assert isinstance(high.trace, Trace) and experts.states[1]["uncond"].index == schedule.boundary_step
    experts.enter(0)
    high.keep(torch.zeros(1, schedule.end, 3), torch.ones(1, schedule.end, 3))
    experts.enter(0)
    assert high.num_bytes > 0
    experts.enter(1)
    assert high.num_bytes == 0
