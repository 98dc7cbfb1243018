"""One Wan clip over two gloo ranks is the clip of one process: with every lever, at rows and heads that do not divide."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from caches.policy import Action
from tests.videogen.families.wan_toy import IMAGE_DIM, transformer
from tests.videogen.parallel.worlds import forked, in_world
from videogen.attention.options import SparseAttention
from videogen.config import Recipe, Request, StepCache
from videogen.errors import EnvironmentFault
from videogen.families.wan_pipeline import run
from videogen.families.wan_sequence import own_rows, seats
from videogen.parallel.comm import Peers
from videogen.parallel.sequence import Ulysses
from videogen.parallel.sharding import ALONE, Sharding
from videogen.parallel.weights import Placement
from videogen.pipeline import Pipeline, open_pipeline
from videogen.progress import PhaseClock, StopFlag, ignore
from videogen.recipes import EXACT
from videogen.result import RawClip

REQUEST = Request("a fox runs", size=(48, 80), frames=9, steps=8, seed=3, negative_prompt="blur")  # 3x5x3 rows: 23 and 22
SPARSE = SparseAttention(budget=0.5, min_rows=0, tile=(2, 2, 2), block=(8, 2), dense_first=0.2, guard=None)
ALL = Recipe("all", savings=EXACT, sparse=SPARSE, cache=StepCache(lam=0.5, max_streak=1))


def rendered(folder: Path, sharding: Sharding, request: Request, peers: Peers | None = None) -> RawClip:
    """The clip with latents as its frames: decoding is the same on any rank, and takes longest. Only the first rank has an encoder."""
    pipeline = open_pipeline(str(folder), ALL, device="cpu", sharding=sharding, placement=Placement("whole", peers))
    resolved, clock = pipeline.family.resolve(request, ALL), PhaseClock(ignore, sharding.stop(StopFlag()))
    parts = pipeline.load(resolved.workflow)
    assert (parts.pipe.text_encoder is None) == (peers is not None and peers.rank > 0)
    parts.pipe.vae.decode = lambda latents, **_: (latents[:, :3],)
    seed = 3 if peers is None else 3 + peers.rank  # the first rank's latents count
    return run(parts, resolved, seed, clock, ALL.cache, pipeline.transforms_for(resolved), ALL.sparse, sharding)


def told(clip: RawClip) -> list[Any]:
    """What ranks must agree on: every decision with its reason, and what sparse attention did."""
    return [[(decision.action, decision.reason) for decision in clip.cache.decisions], clip.attention]


def odd_transformer() -> Any:
    """Three heads for two ranks, cross-attention to a picture too, and a hook on the head as an adapter's."""
    with torch.random.fork_rng():
        model = transformer(0, num_attention_heads=3, image_dim=IMAGE_DIM, added_kv_proj_dim=36)
    model.proj_out.register_forward_hook(lambda _, given, out: out + 0.1 * given[0].mean(-1, keepdim=True))
    return model


def forward(model: Any, timestep: torch.Tensor) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    latents, text, picture = (torch.randn(size, generator=draw) for size in ((1, 16, 3, 6, 10), (1, 512, 32), (1, 5, IMAGE_DIM)))
    with torch.no_grad():
        out: torch.Tensor = model(latents, timestep, text, picture, return_dict=False)[0]
    return out


TIMESTEPS = (torch.tensor([500.0]), torch.linspace(10, 900, 45)[None])  # of all rows, and row-wise


def test_two_ranks_make_the_clip_of_one_process(folders: dict[str, Path], tmp_path: Path) -> None:
    picture = Image.new("RGB", (48, 48), (9, 200, 30))
    given = replace(REQUEST, size=(96, 96), frames=13, image=picture, negative_prompt="", guidance=(1.0,))  # 9 rows given of 36
    wanted = {kind: rendered(folders[kind], ALONE, request) for kind, request in (("two", REQUEST), ("5b", given))}
    odd = odd_transformer()
    outputs = [forward(odd, timestep) for timestep in TIMESTEPS]
    for clip in wanted.values():
        assert any(decision.action is Action.REUSE for decision in clip.cache.decisions) and clip.attention["calls"]["sparse"]

    def job(peers: Peers) -> dict[str, Any]:
        sharding, found = Ulysses(peers), {}
        for kind, request in (("two", REQUEST), ("5b", given)):
            clip = rendered(folders[kind], sharding, request, peers)
            found[kind] = (float(np.abs(clip.frames - wanted[kind].frames).max()), told(clip) == told(wanted[kind]))
            found[f"{kind} drift"] = [dict(decision.drift) for decision in clip.cache.decisions]
        alone = [forward(odd, timestep) for timestep in TIMESTEPS]
        with sharding.attention(odd, 45, seats(odd)), own_rows([odd], 45, sharding=sharding):
            found["odd"] = max(float((forward(odd, each) - out).abs().max()) for each, out in zip(TIMESTEPS, outputs))
        found["after"] = all(torch.equal(forward(odd, each), out) for each, out in zip(TIMESTEPS, alone))
        return found

    ranks = forked(tmp_path, 2, lambda rank: in_world(tmp_path, rank, 2, job))
    for found in ranks:
        for kind in wanted:
            assert found[kind][0] < 1e-5 and found[kind][1] and found[f"{kind} drift"] == ranks[0][f"{kind} drift"], kind
        assert found["odd"] < 1e-5 and found["after"]


def test_more_ranks_than_heads_are_refused_and_nothing_stays(two: Pipeline) -> None:
    expert = two.load("t2v").pipe.transformer
    before = [block.attn1.processor for block in expert.blocks]
    with pytest.raises(EnvironmentFault, match="more replicas"), Ulysses(Peers(0, 3, None, None)).attention(expert, 99, seats(expert)):
        pass
    assert [block.attn1.processor for block in expert.blocks] == before
