"""Weights sharded over ranks, or in host memory and visiting: the clip of whole weights, and less of them in one place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.videogen.parallel.test_sequence import distance, rendered, reuses
from tests.videogen.parallel.worlds import CPU, forked, in_world
from videogen import Recipe
from videogen.cli.main import main
from videogen.config import Adapters, AdapterUse
from videogen.errors import RequestError
from videogen.families.h3_pipeline import transformer_of
from videogen.parallel.comm import Peers
from videogen.parallel.sequence import Ulysses
from videogen.parallel.sharding import ALONE
from videogen.parallel.weights import Placement, shard, stream
from videogen.pipeline import Pipeline, open_pipeline


def large_parts(transformer: Any) -> list[list[nn.Parameter]]:
    return [[*block.attn.parameters(), *block.ff.parameters()] for block in transformer.transformer_blocks]


def test_visiting_blocks_make_the_same_clip_two_at_a_time(four_heads: Pipeline, recipes: dict[str, Recipe]) -> None:
    visiting = open_pipeline(four_heads.source, Recipe(), device="cpu", placement=Placement("offload", text="offload"))
    pipe = visiting.load("t2va")
    transformer = transformer_of(pipe)
    layers, decoding = pipe.text_encoder.model.language_model.layers, pipe.vae.decoder.transformer_blocks
    parts = [*large_parts(transformer), *([*block.parameters()] for blocks in (layers, decoding) for block in blocks)]
    homes, most = [[p.data_ptr() for p in part] for part in parts], []
    here = lambda: sum(p[0].data_ptr() != home[0] for p, home in zip(parts, homes))  # noqa: E731
    ran = [*(block.attn for block in transformer.transformer_blocks), *layers, *decoding]
    handles = [module.register_forward_pre_hook(lambda *_: most.append(here())) for module in ran]
    wanted, found = (rendered(pipeline, recipes["all"], ALONE) for pipeline in (four_heads, visiting))
    assert distance(found, wanted) == 0 and reuses(found) == reuses(wanted)  # a step cache skips blocks, an adapter hangs on them
    assert set(most) == {1, 2}  # the one that runs and the next
    for handle in handles:
        handle.remove()
    assert [[p.data_ptr() for p in part] for part in parts] == homes


class Stack(nn.Module):
    """Four blocks in the shape that `stream` knows; one may fail."""

    def __init__(self) -> None:
        super().__init__()
        parts = ("attn", "ff", "adaln_proj")
        self.transformer_blocks = nn.ModuleList(nn.ModuleDict({name: nn.Linear(3, 3) for name in parts}) for _ in range(4))
        for block in self.transformer_blocks:
            block.attn, block.ff, block.adaln_proj = (block[name] for name in parts)

    def forward(self, rows: torch.Tensor, fails: int = -1) -> torch.Tensor:
        for number, block in enumerate(self.transformer_blocks):
            rows = block.attn(rows)
            if number == fails:
                raise MemoryError("no luck")
            rows = block.ff(rows)
        return rows


def test_a_forward_that_fails_leaves_no_block_behind() -> None:
    stack, rows = Stack(), torch.randn(2, 3)
    wanted = stack(rows)
    stream(stack, CPU)
    homes = [block.attn.weight.data_ptr() for block in stack.transformer_blocks]
    here = lambda: [b.attn.weight.data_ptr() != home for b, home in zip(stack.transformer_blocks, homes)]  # noqa: E731
    with pytest.raises(MemoryError):
        stack(rows, fails=2)
    assert not any(here())
    stack.transformer_blocks[0].attn.register_forward_hook(lambda *_: seen.append(here()))
    seen: list[list[bool]] = []
    assert torch.equal(stack(rows), wanted) and seen == [[True, True, False, False]] and not any(here())


def test_weights_sharded_over_ranks_make_the_same_clip(four_heads: Pipeline, recipes: dict[str, Recipe], tmp_path: Path) -> None:
    wanted = rendered(four_heads, recipes["all"], ALONE)
    whole = sum(p.numel() for part in large_parts(transformer_of(four_heads.load("t2va"))) for p in part)

    def job(peers: Peers) -> tuple[float, bool, float]:
        transformer = transformer_of(four_heads.load("t2va"))
        shard(transformer, peers, CPU)
        found = rendered(four_heads, recipes["all"], Ulysses(peers))
        held = sum(p.to_local().numel() for part in large_parts(transformer) for p in part)  # type: ignore[operator]
        return distance(found, wanted), reuses(found) == reuses(wanted), held / whole

    for error, is_same, share in forked(tmp_path, 2, lambda rank: in_world(tmp_path, rank, 2, job)):
        assert error < 1e-5 and is_same and share == pytest.approx(0.5, abs=0.01)


def test_what_cannot_be_placed_is_refused_before_anything_loads(four_heads: Pipeline) -> None:
    with pytest.raises(RequestError, match="several ranks"):
        Placement("fsdp")
    with pytest.raises(RequestError, match="whole, parked, fsdp, offload"):
        Placement("cloud")
    assert main(["render", "--prompt", "a", "--weights", "fsdp"]) == 2
    fused, sharded = (
        Recipe(adapters=Adapters((AdapterUse("a.safetensors"),), fuse=True, identity="x")),
        Placement("fsdp", Peers(0, 2, None, None)),
    )
    with pytest.raises(RequestError, match="drop --lora-fuse"):
        Pipeline(four_heads.source, four_heads.family, fused, CPU, placement=sharded)
