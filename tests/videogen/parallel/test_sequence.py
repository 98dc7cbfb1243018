"""One clip over 2, 3 and 4 gloo ranks is the clip of one process: with every lever, at lengths and head counts that do not divide."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.videogen.parallel.worlds import forked, in_world
from videogen import Recipe, Request
from videogen.errors import CancelledRender, EnvironmentFault
from videogen.families.h3_pipeline import RawClip, run, transformer_of
from videogen.parallel.comm import Peers
from videogen.parallel.sequence import Ulysses, head_groups
from videogen.parallel.sharding import ALONE, Sharding
from videogen.parallel.weights import Placement
from videogen.pipeline import Pipeline, open_pipeline
from videogen.progress import Event, PhaseClock, StopFlag, ignore
from videogen.transforms.attach import Transforms

REQUEST = Request("a red circle moves right", size=(96, 64), frames=22)


class Undecoded(Transforms):
    """Those of a pipeline, with the video's latents in place of its frames: decoding is the same on any rank, and takes longest."""

    def call(self, name: str, block: Any, pipe: Any, state: Any) -> None:
        if name == "decode.video":
            state.set("videos", state.get("latents").numpy())
        else:
            super().call(name, block, pipe, state)


def rendered(pipeline: Pipeline, recipe: Recipe, sharding: Sharding, prompt: str = REQUEST.prompt, seed: int = 3) -> RawClip:
    """The clip with latents as its frames."""
    opened = pipeline.sharing(recipe)
    resolved = opened.family.resolve(replace(REQUEST, prompt=prompt), opened.recipe)
    clock = PhaseClock(ignore, sharding.stop(StopFlag()))
    made = opened.transforms_for(resolved)
    recipe, transforms = opened.recipe, Undecoded(**{field.name: getattr(made, field.name) for field in fields(made)})
    return run(opened.load("t2va"), resolved, seed, clock, recipe.cache, transforms, recipe.sparse, sharding)


def reuses(clip: RawClip) -> list[str]:
    return [decision.action.name for decision in clip.cache.decisions]


def distance(a: RawClip, b: RawClip) -> float:
    return max(float(np.abs(a.frames.astype(float) - b.frames).max()), float(np.abs(a.audio - b.audio).max()))


def stops_together(pipeline: Pipeline, sharding: Sharding, rank: int) -> int:
    """The last rank alone wants a stop in the second step; the step every rank was at when it came."""
    flag, steps = StopFlag(), []

    def watch(event: Event) -> None:
        steps.append(event.step)
        if rank == 1 and event.step == 2:
            flag.set()

    opened = pipeline.sharing(Recipe("plain", steps=3))
    opened.sharding = sharding
    with pytest.raises(CancelledRender):
        opened.render(replace(REQUEST, seed=1), stop=flag, on_event=watch)
    return steps[-1]


def drawn_alike(pipeline: Pipeline, peers: Peers) -> tuple[int, float]:
    """Without a seed, and with the text encoder on the first rank alone: the seed and sum of the frames that come out."""
    placement = Placement("whole", peers)
    opened = open_pipeline(pipeline.source, Recipe("plain", steps=1), device="cpu", sharding=Ulysses(peers), placement=placement)
    assert (opened.load("t2va").text_encoder is None) == (peers.rank > 0)
    result = opened.render(REQUEST)
    return result.record["resolved"]["seed"], float(result.frames.sum())


def tiled(peers: Peers, count: int) -> tuple[int, bool]:
    """How many of so many tiles this rank decodes, and whether all come out in order."""
    tiles, seen = [torch.full((1, 2, 3), float(k)) for k in range(count)], []

    def decode(some: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.extend(some)
        return [torch.cat([tile, tile + 0.5], 2)[:, None] for tile in some]

    found = Ulysses(peers).tiles(tiles, decode)
    return len(seen), all(torch.equal(a, b) for a, b in zip(found, ALONE.tiles(tiles, decode), strict=True))


def fails_alike(peers: Peers) -> str:
    """What this rank hears when the first one fails."""
    with pytest.raises(RuntimeError) as caught:
        Ulysses(peers).first(lambda: torch.zeros(2) + torch.zeros(3))  # type: ignore[arg-type,return-value]
    return str(caught.value)


def test_any_number_of_ranks_makes_the_clip_of_one_process(four_heads: Pipeline, recipes: dict[str, Recipe], tmp_path: Path) -> None:
    wanted = {name: rendered(four_heads, recipe, ALONE) for name, recipe in recipes.items()}
    longer = rendered(four_heads, recipes["plain"], ALONE, prompt := "a red circle moves right, then down again")
    assert "REUSE" in reuses(wanted["all"]) and wanted["all"].attention["forwards"]["sparse"]
    assert distance(wanted["all"], wanted["plain"]) > 1e-2 and distance(longer, wanted["plain"]) > 1e-3

    def of_world(peers: Peers) -> dict[str, Any]:
        clip = rendered(four_heads, recipes["all"], Ulysses(peers))
        told: dict[str, Any] = {"all": (distance(clip, wanted["all"]), reuses(clip), clip.attention == wanted["all"].attention)}
        told["tiles"] = tiled(peers, 7), tiled(peers, 2)
        if peers.count == 2:
            told["longer"] = distance(rendered(four_heads, recipes["plain"], Ulysses(peers), prompt), longer)
            told["stop"] = stops_together(four_heads, Ulysses(peers), peers.rank)
            told["drawn"] = drawn_alike(four_heads, peers)
            told["error"] = fails_alike(peers)
        return told

    def of_replicas(peers: Peers, rank: int) -> float:
        seed = 3 + rank // 2  # two clips at once, two ranks each
        return distance(rendered(four_heads, recipes["plain"], Ulysses(peers), seed=seed), wanted["plain"])

    def of_rank(rank: int) -> dict[Any, Any]:
        told: dict[Any, Any] = {size: in_world(tmp_path, rank, size, of_world) for size in (2, 3, 4) if rank < size}
        return told | {"replicas": in_world(tmp_path, rank, 4, lambda peers: of_replicas(peers, rank), ulysses=2)}

    found = forked(tmp_path, 4, of_rank)
    for size in (2, 3, 4):
        for told in found[:size]:
            error, decided, same_attention = told[size]["all"]
            assert error < 1e-5 and decided == reuses(wanted["all"]) and same_attention, size
    assert [told[3]["tiles"] for told in found[:3]] == [((3, True), (2, True)), ((2, True), (2, True)), ((2, True), (2, True))]
    for told in found[:2]:
        assert told[2]["longer"] < 1e-5 and told[2]["stop"] == 2
    assert found[0][2]["drawn"] == found[1][2]["drawn"]
    assert found[1][2]["error"] == f"the first rank: RuntimeError: {found[0][2]['error']}"
    errors = [told["replicas"] for told in found]
    assert max(errors[:2]) < 1e-5 and errors[2] == errors[3] > 1e-2


def test_more_ranks_than_heads_are_refused_and_nothing_stays(four_heads: Pipeline) -> None:
    transformer = transformer_of(four_heads.load("t2va"))
    before = [block.attn.processor for block in transformer.transformer_blocks]
    sharding = Ulysses(Peers(0, 5, None, None))
    with pytest.raises(EnvironmentFault, match="more replicas"), sharding.attention(transformer, 99):
        pass
    with Ulysses(Peers(0, 1, None, None)).attention(transformer, 99), Ulysses(Peers(0, 1, None, None)).stack(transformer, 99):
        assert len(transformer.transformer_blocks) == 1
    assert [block.attn.processor for block in transformer.transformer_blocks] == before and "forward" not in vars(transformer.proj_out)


@pytest.mark.parametrize(("total", "ranks", "groups"), [(4, 3, 2), (56, 8, 4), (56, 3, 4), (5, 5, 3), (1, 1, 4)])
def test_head_groups_deal_every_head_once(total: int, ranks: int, groups: int) -> None:
    cuts = head_groups(total, ranks, groups)
    assert len(cuts) == max(1, min(groups, total // ranks)) and all(end > begin for group in cuts for begin, end in group)
    assert sorted(head for group in cuts for begin, end in group for head in range(begin, end)) == list(range(total))
    of_rank: Callable[[int], list[int]] = lambda rank: [h for group in cuts for h in range(*group[rank])]  # noqa: E731
    assert [of_rank(rank) for rank in range(ranks)] == [sorted(of_rank(rank)) for rank in range(ranks)]
