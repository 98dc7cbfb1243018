"""Sparse attention in H3's blocks: what it leaves alone, what it counts, how it gives way."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from caches.policy import Budget
from caches.step_hook import Channel, step_cache
from tests.conftest import TINY
from tests.videogen.attention.cases import FIRST, GRID, ROWS, apart, packed_inputs, tiny_model
from videogen import Recipe, Request
from videogen.attention import gather, state
from videogen.attention.blocks import Blocks
from videogen.attention.install import settle, sparse_attention
from videogen.attention.options import Guard, SparseAttention
from videogen.attention.route import Route, pool, select
from videogen.attention.select import Choice
from videogen.attention.state import FIRST as FIRST_MODE
from videogen.attention.state import SPARSE, Heads, open_request
from videogen.errors import EnvironmentFault, RequestError
from videogen.families.h3 import H3Family
from videogen.jobs.files import RawJob
from videogen.jobs.plan import make_drafts
from videogen.pipeline import Pipeline

ON = SparseAttention(budget=0.4, dense_first=0.0, block=(16, 8), min_rows=0, guard=Guard(head=0.5, layer=0.4))
Out = tuple[torch.Tensor, torch.Tensor]


def chosen(model: Any, options: SparseAttention) -> Choice:
    return settle(options, model, first=FIRST, rows=ROWS, grid=GRID)


@torch.no_grad()
def forwards(model: Any, options: SparseAttention, count: int = 1, change: Callable[[Any], None] = lambda _: None) -> tuple[Out, Any]:
    """The last of `count` forwards under sparse attention, and its record."""
    with sparse_attention(model, options, chosen(model, options), ROWS, count) as request:
        change(model)
        for _ in range(count):
            out = model(**packed_inputs())
        return out, request.record() if request else None


@torch.no_grad()
def dense(model: Any) -> Out:
    out: Out = model(**packed_inputs())
    return out


def test_a_whole_budget_is_the_dense_model_and_nothing_stays_behind() -> None:
    model = tiny_model()
    wanted, before = dense(model), [block.attn.processor for block in model.transformer_blocks]
    out, record = forwards(model, replace(ON, budget=1.0))
    assert all(apart(a, b) < 1e-6 for a, b in zip(out, wanted)) and record["kept_blocks"] == 1.0
    with pytest.raises(ZeroDivisionError), sparse_attention(model, ON, chosen(model, ON), ROWS, 1):
        raise ZeroDivisionError
    assert [block.attn.processor for block in model.transformer_blocks] == before
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert all(torch.equal(a, b) for a, b in zip(dense(model), wanted))


def test_sound_rows_are_exact_and_video_rows_are_near() -> None:
    model = tiny_model(num_layers=1)
    wanted = dense(model)
    (video, audio), record = forwards(model, ON)
    assert apart(audio, wanted[1]) < 1e-6 and 1e-3 < apart(video, wanted[0]) < 0.03
    assert abs(record["kept_blocks"] - 0.4) < 0.03 and record["rows"] == {"all": ROWS, "exact": FIRST}


def test_dense_forwards_run_the_processor_that_was_there_and_say_why() -> None:
    model = tiny_model()
    wanted = dense(model)
    out, record = forwards(model, replace(ON, dense_first=0.5, dense_last=1), 4)
    assert record["calls"] == {"first forwards": 4, "last forwards": 2, "sparse": 2}
    assert all(torch.equal(a, b) for a, b in zip(out, wanted))
    out, record = forwards(model, replace(ON, dense_first=1.0))
    assert "dense ones" in record["reason"] and all(torch.equal(a, b) for a, b in zip(out, wanted))


def test_the_guard_gives_way_head_by_head_then_layer_then_request() -> None:
    model = tiny_model()
    wanted = dense(model)
    _, record = forwards(model, ON, 3)
    assert 0 < record["guard"]["worst"] < 0.5 and not record["guard"]["widened_heads"] and record["calls"] == {"sparse": 6}
    strict = replace(ON, guard=Guard(every=1, head=0.0, layer=1.0))
    _, record = forwards(model, strict, 3)
    assert len(record["guard"]["widened_heads"]) == 8 and len(record["guard"]["dense_heads"]) == 8 and record["calls"] == {"sparse": 6}
    out, record = forwards(model, replace(ON, guard=Guard(head=1.0, layer=0.0)), 2)
    assert record["calls"] == {"2 of 2 layers dense, more than 20%": 2, "sparse": 2}
    assert record["guard"]["dense_layers"][0].startswith("mean error ") and record["reason"]
    assert all(torch.equal(a, b) for a, b in zip(out, wanted))


@pytest.mark.parametrize(("options", "selections"), [({}, 5), ({"refresh": 3, "per_head": False}, 2), ({"refresh": 3}, 3)])
def test_a_selection_may_serve_several_forwards(options: dict[str, Any], selections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more where budgets per head are set after the first."""
    made: list[Route] = []
    monkeypatch.setattr(state, "select", lambda *args: made.append(select(*args)) or made[-1])
    _, record = forwards(tiny_model(), replace(ON, **options), 5)
    assert len(made) == 2 * selections and record["calls"] == {"sparse": 10}


def test_back_end_and_parallel_settings_stay_where_diffusers_looks() -> None:
    model = tiny_model()
    model.set_attention_backend("_native_math")
    before = [block.attn.processor for block in model.transformer_blocks]

    def look(model: Any) -> None:
        assert {block.attn.processor._attention_backend for block in model.transformer_blocks} == {before[0]._attention_backend}
        model.set_attention_backend("native")

    forwards(model, ON, 1, look)
    assert before[0]._attention_backend.value == "native"

    class Ring:
        context_parallel_config = type("Config", (), {"ring_degree": 2, "ulysses_degree": 1})()

    model.transformer_blocks[0].attn.processor._parallel_config = Ring()
    assert "ring attention" in chosen(model, ON).reason
    with pytest.raises(EnvironmentFault, match="ring attention"):
        chosen(model, replace(ON, on_unsupported="error"))
    model.transformer_blocks[0].attn.processor = object()
    assert chosen(model, ON).reason.startswith("attention processor object")


def test_a_mask_is_refused_or_dense() -> None:
    model = tiny_model()
    hidden, mask = torch.randn(1, ROWS, 32), torch.ones(1, ROWS, dtype=torch.bool)
    attn = model.transformer_blocks[0].attn
    wanted = attn(hidden, None, mask)
    for options in (ON, replace(ON, on_unsupported="error")):
        with sparse_attention(model, options, chosen(model, options), ROWS, 1) as request:
            assert request is not None
            request.begin()
            if options is ON:
                assert torch.equal(attn(hidden, None, mask), wanted) and request.reason == "an attention mask"
            else:
                with pytest.raises(EnvironmentFault, match="an attention mask"):
                    attn(hidden, None, mask)


def test_ranks_that_share_heads_compute_what_one_computes() -> None:
    draw = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 300, 4, 16, generator=draw) for _ in range(3)]
    blocks, options = Blocks(20, 300, 16, 8), replace(ON, guard=Guard(head=0.0))

    def attend(heads: Heads) -> list[torch.Tensor]:
        request = open_request(
            options, Choice("gather"), blocks, heads, 1, torch.device("cpu"), implementation=(pool, gather.attend), forwards=2,
            agree=lambda sums: sums,
        )  # fmt: skip
        outs, part = [], slice(heads.offset, heads.offset + heads.local)
        for mode in (FIRST_MODE, SPARSE):
            request.begin()
            assert request.layers[0].mode in (mode, "probe")
            outs.append(request.attend(request.layers[0], *(x[:, :, part] for x in qkv)))
            request.layers[0].has_run = True
            request.end()
        return outs

    whole, halves = attend(Heads(4, 4)), [attend(Heads(4, 2, offset)) for offset in (0, 2)]
    for index in range(2):
        assert torch.equal(whole[index], torch.cat([half[index] for half in halves], 2))


def sparse(pipeline: Pipeline, options: SparseAttention) -> Pipeline:
    return pipeline.sharing(Recipe(name="sparse", sparse=options))


def test_forwards_that_a_cache_lets_run_are_the_ones_that_count() -> None:
    model, sigmas = tiny_model(num_layers=3), [1 - k / 12 for k in range(13)]
    channels = {"video": Channel(torch.arange(FIRST, ROWS), sigmas), "audio": Channel(torch.arange(FIRST - 8, FIRST), sigmas)}
    options = replace(ON, dense_first=0.25)
    with torch.no_grad(), sparse_attention(model, options, chosen(model, options), ROWS, 12) as request:
        assert request is not None
        with step_cache(model, "transformer_blocks", channels, Budget(lam=1e9, max_streak=1)) as trace:
            for _ in range(12):
                model(**packed_inputs())
        record, reused = request.record(), trace.reused
    assert reused > 2 and record["forwards"] == {"steps": 12, "executed": 12 - reused, "sparse": 12 - reused - 3}
    assert sum(record["calls"].values()) == 3 * (12 - reused) + reused  # the first block always runs


def test_a_clip_is_dense_where_short_and_near_where_sparse(pipeline: Pipeline) -> None:
    request = Request("a large red circle moves right", seed=3, **TINY)
    wanted = pipeline.sharing(Recipe()).render(request)
    assert wanted.record["attention"] == {"budget": None, "backend": "dense", "reason": "off"}
    short = sparse(pipeline, SparseAttention(budget=0.25)).render(request)
    assert short.record["attention"]["reason"].startswith("short: ") and np.array_equal(short.frames, wanted.frames)
    near = sparse(pipeline, replace(ON, dense_first=0.2)).render(request)
    assert near.record["attention"]["backend"] == "gather" and near.record["attention"]["reason"] == ""
    assert 0 < np.abs(near.frames.astype(float) - wanted.frames).mean() < 0.2 * np.abs(wanted.frames - wanted.frames.mean()).mean()


def test_a_certificate_for_dense_attention_does_not_cover_sparse(pipeline: Pipeline) -> None:
    resolved = pipeline.family.resolve(Request("a circle", **TINY), Recipe())
    plain = pipeline.sharing(Recipe())
    assert plain.stratum(resolved).differences(sparse(pipeline, ON).stratum(resolved))


def test_a_job_may_ask_for_a_budget(pipeline: Pipeline) -> None:
    family: H3Family = pipeline.family
    (draft,) = make_drafts([RawJob({"prompt": "a circle", "sparse_budget": "0.25"}, "a.csv:2")], family, Recipe())
    assert draft.recipe.sparse.budget == 0.25 and draft.recipe.name == "plain+sparse"
    with pytest.raises(RequestError, match=r"a.csv:2: sparse budget: got 1.5, expected a share above 0, up to 1"):
        make_drafts([RawJob({"prompt": "a circle", "sparse_budget": 1.5}, "a.csv:2")], family, Recipe())
