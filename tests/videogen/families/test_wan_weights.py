"""Wan's weights in host memory, an expert or a block at a time, or sharded over ranks: the clip of whole weights."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.videogen.families.wan_toy import transformer
from tests.videogen.parallel.worlds import CPU, forked, in_world
from videogen.attention.options import SparseAttention
from videogen.cli.main import main
from videogen.config import Adapters, AdapterUse, Recipe, Request, StepCache
from videogen.errors import RequestError
from videogen.families.wan_pipeline import schedule_of
from videogen.parallel.comm import Peers
from videogen.parallel.sequence import Ulysses
from videogen.parallel.weights import Placement, _Expert, taking_turns, wait_at_home
from videogen.pipeline import Pipeline, open_pipeline

REQUEST = Request("a fox runs", size=(64, 32), frames=9, steps=8, seed=3, negative_prompt="blur", guidance=(4.0, 3.0))
SPARSE = SparseAttention(budget=0.5, min_rows=0, tile=(2, 2, 2), block=(4, 2), dense_first=0.2, guard=None)
ALL = Recipe("all", sparse=SPARSE, cache=StepCache(lam=1e9, max_streak=1))


def large(expert: Any) -> list[torch.nn.Parameter]:
    return [parameter for block in expert.blocks for part in (block.attn1, block.attn2, block.ffn) for parameter in part.parameters()]


def with_adapters(folder: Path, *, fuse: bool = False, has_payload: bool = True) -> Recipe:
    """A pair, with a low-rank change of a block, of the head, and a bias written into a block."""
    uses = []
    for seed, expert in enumerate(("high", "low")):
        draw = torch.Generator().manual_seed(seed)
        down, up, head = (torch.randn(size, generator=draw) / 5 for size in ((4, 24), (24, 4), (64, 4)))
        tensors = {"blocks.1.self_attn.q.lora_A.weight": down, "blocks.1.self_attn.q.lora_B.weight": up}
        tensors |= {"head.head.lora_A.weight": down.clone(), "head.head.lora_B.weight": head}
        tensors |= {"blocks.2.ffn.2.diff_b": up[:, 0].clone()} if has_payload else {}
        save_file({f"diffusion_model.{name}": tensor for name, tensor in tensors.items()}, folder / f"{expert}.safetensors")
        uses.append(AdapterUse(str(folder / f"{expert}.safetensors")))
    return replace(ALL, adapters=Adapters(tuple(uses), fuse=fuse))


def opened(folder: Path, kind: str, recipe: Recipe = ALL) -> Pipeline:
    return open_pipeline(str(folder), recipe, device="cpu", placement=Placement(kind))


def watch(experts: Sequence[Any]) -> Callable[[], list[bool]]:
    """Asks which experts' large parts are not at home: they are copies then, on a CPU too."""
    parts = [large(expert) for expert in experts]
    homes = [[parameter.data_ptr() for parameter in each] for each in parts]

    def here() -> list[bool]:
        away = [{p.data_ptr() != home for p, home in zip(*pair)} for pair in zip(parts, homes)]
        assert all(len(each) == 1 for each in away)  # as a whole
        return [each == {True} for each in away]

    return here


def test_one_expert_at_a_time_makes_the_same_clip(folders: dict[str, Path], tmp_path: Path) -> None:
    whole, turns = opened(folders["two"], "whole"), opened(folders["two"], "offload-idle")
    experts = turns.load("t2v").transformers
    here = watch(experts)
    seen: list[list[bool]] = []
    for expert in experts:
        expert.blocks[0].ffn.register_forward_hook(lambda *_: seen.append(here()))
    recipes = [with_adapters(tmp_path, fuse=True), ALL]
    clips = [[pipeline.sharing(recipe).render(REQUEST) for recipe in recipes] for pipeline in (whole, turns)]
    for wanted, found in zip(*clips):
        assert np.array_equal(found.frames, wanted.frames) and found.record["cache"] == wanted.record["cache"]
    assert not np.array_equal(clips[1][0].frames, clips[1][1].frames) and not any(here())
    boundary = schedule_of(turns.load("t2v").pipe, turns.family.resolve(REQUEST, ALL)).boundary_step
    calls = [[True, False]] * 2 * boundary + [[False, True]] * 2 * (8 - boundary)
    assert seen == calls * 2 and 0 < boundary < 8
    moves = clips[1][0].record["placement"]["moves"]
    size = sum(parameter.nbytes for parameter in large(experts[0]))
    assert [(each["expert"], each["forwards"], each["num_bytes"]) for each in moves] == [(0, 0, size), (1, 2 * boundary, size)]
    assert all(each["seconds"] > 0 for each in moves) and clips[0][0].record["placement"]["moves"] == []


def test_an_error_leaves_both_experts_at_home() -> None:
    experts = [transformer(seed) for seed in (0, 1)]
    for expert in experts:
        wait_at_home(expert, CPU)
    here, given = watch(experts), (torch.zeros(1), torch.zeros(1, 9, 32))
    with pytest.raises(RuntimeError), torch.no_grad(), taking_turns(experts, CPU) as moves:
        for expert in (experts[0], experts[1], experts[1], experts[0]):
            expert(torch.zeros(1, 16, 3, 4, 4), *given)
            assert here() == [expert is each for each in experts]
        experts[1](torch.zeros(1, 15, 3, 4, 4), *given)
    assert [(each["expert"], each["forwards"]) for each in moves] == [(0, 0), (1, 1), (0, 3), (1, 4)]
    assert here() == [False, False] and not any(each._forward_pre_hooks for each in experts)


@pytest.mark.parametrize(
    ("device", "text", "less"), [("cuda", "visiting", ("offload", "offload")), ("cpu", "resident", ("whole", "resident"))]
)
def test_where_one_expert_is_too_large_the_clip_is_made_block_by_block(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, device: str, text: str, less: tuple[str, str]
) -> None:
    """On a CPU with whole weights, where what visits is there twice."""
    recipe, request = replace(ALL, dtype="float32"), replace(REQUEST, frames=5, steps=4)
    turns = open_pipeline(str(folders["two"]), recipe, device="cpu", placement=Placement("offload-idle", text=text))
    come, smaller, gone, moved = _Expert.come, Pipeline._smaller, list[bool](), list[Any]()
    experts = [weakref.ref(expert) for expert in turns.load("t2v").transformers]

    def short(visitor: _Expert, to: torch.device) -> None:
        come(visitor, to)
        moved.append(None)
        if len(moved) == 2:
            raise torch.OutOfMemoryError("out of memory at the boundary")

    def decided(pipeline: Pipeline) -> Pipeline:
        gone.extend(expert() is None for expert in experts)
        pipeline.device = torch.device(device)  # nothing is loaded onto it
        other = smaller(pipeline)
        pipeline.device = other.device = CPU
        return other

    monkeypatch.setattr(_Expert, "come", short)
    monkeypatch.setattr(Pipeline, "_smaller", decided)
    found = turns.render(request)
    assert found.record["placement"] == {"weights": less[0], "text_encoder": less[1], "moves": []} and gone == [True, True]
    assert found.record["memory"] == {"attempts": 2, "first": "out of memory at the boundary"}
    assert np.array_equal(found.frames, opened(folders["two"], "whole", recipe).render(request).frames)


def test_block_by_block_and_sharded_over_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    recipe = with_adapters(tmp_path, has_payload=False)
    wanted = opened(folders["two"], "whole", recipe).render(REQUEST)
    assert np.array_equal(opened(folders["two"], "offload", recipe).render(REQUEST).frames, wanted.frames)

    (tmp_path / "b").mkdir()
    written = with_adapters(tmp_path / "b")

    def job(peers: Peers) -> tuple[int, float]:
        sharded = open_pipeline(
            str(folders["two"]), recipe, device="cpu", sharding=Ulysses(peers), placement=Placement("fsdp", peers, "visiting")
        )
        found = sharded.render(REQUEST)
        parts = large(sharded.load("t2v").transformers[1])
        with pytest.raises(RequestError, match="sharded over ranks"):
            sharded.sharing(written).load("t2v")
        held = sum(p.to_local().numel() for p in parts) / sum(p.numel() for p in parts)  # type: ignore[operator]
        return int(np.abs(found.frames.astype(int) - wanted.frames).max()), held

    for apart, held in forked(tmp_path, 2, lambda rank: in_world(tmp_path, rank, 2, job)):
        assert apart <= 1 and held == pytest.approx(0.5, abs=0.02)


def test_what_cannot_be_placed_is_refused_before_anything_loads(folders: dict[str, Path], two: Pipeline) -> None:
    for kind, model in (("parked", str(folders["two"])), ("offload-idle", str(folders["one"])), ("offload-idle", "pocket")):
        with pytest.raises(RequestError, match="--weights"):
            open_pipeline(model, "plain", device="cpu", placement=Placement(kind))
        assert main(["render", "--prompt", "a", "--model", model, "--weights", kind]) == 2
    assert two.device == CPU
