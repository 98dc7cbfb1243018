"""Passages reused elsewhere: exact where it must be, within its budget where it need not be, forgotten with the weights."""

import pytest
import torch

from caches.policy import Action, Budget
from tests.videogen.text.models import answer, prompts, text_model
from videogen.errors import RequestError
from videogen.text.asks import Ask
from videogen.text.chunks import ChunkReuse
from videogen.text.forwarding import Forward, difference
from videogen.text.snapshots import SnapshotEngine

WIDE, TIGHT = Budget(lam=1.0, first=16, warm_up=0.0), Budget(lam=1e-4, first=16, warm_up=0.0)
A, B, C = prompts(3, shared=0, own=50)
PROMPT, PARTS = (*A, *B, *C[:20]), (len(A), len(B))


@torch.no_grad()
def full(model: object) -> torch.Tensor:
    logits, _ = Forward(model, 512).prefill(PROMPT, None)
    assert logits is not None
    return logits


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
def test_what_is_computed_again_is_exact_and_the_rest_within_its_drift(family: str) -> None:
    model = text_model(family, num_hidden_layers=4).model
    exact = full(model)
    errors, drifts = [], []
    for share in (0.0, 0.2, 0.6):
        reuse = ChunkReuse(model, WIDE, share)
        for passage in (A, B):
            reuse.learn(passage)
        told = reuse.quality(PROMPT, PARTS, exact)
        assert told["reason"] == "within budget" and told["reused"] == int((1 - share) * 101 + 1e-9) // 1
        errors.append(told["error"])
        drifts.append(told["drift"])
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-5 and drifts[0] > drifts[1] > drifts[2]
    with torch.no_grad():
        _, cache = Forward(model, 512).prefill(PROMPT, None)
    known, is_reused = reuse._known(PROMPT, PARTS)  # keys of the first layer know their place and nothing else
    assert int(is_reused.sum()) == 101 and torch.allclose(known[0][0][:, :, :101], cache.layers[0].keys[:, :, :101], atol=1e-5)
    everything = ChunkReuse(model, WIDE, share=1.0)
    everything.learn(B)
    assert torch.equal(everything.prefill(PROMPT, PARTS).logits, ChunkReuse(model, WIDE).prefill(PROMPT, PARTS).logits)
    tight = ChunkReuse(model, TIGHT)
    tight.learn(A)
    tight.learn(B)
    made = tight.prefill(PROMPT, PARTS)
    assert (made.decision.action, made.decision.reason, made.reused) == (Action.COMPUTE, "chunk drift", 0)
    assert difference(made.logits, exact) < 1e-5
    first = tight.prefill((*A, *C[:20]), (len(A),))  # a passage at its own place is a prefix, and exact
    assert first.reused == len(A) - 8 and first.decision.drift["chunk"] < 1e-6


def test_an_engine_learns_passages_and_forgets_them_with_the_weights() -> None:
    text = text_model()
    engine = SnapshotEngine(text, "weights", chunks=WIDE)
    try:
        with pytest.raises(RequestError, match="passages"):
            engine.submit(Ask(PROMPT, 1, parts=(len(PROMPT),)))
        first = engine.submit(Ask(PROMPT, 3, parts=PARTS)).result(30)
        assert first.tokens == answer(text.model, PROMPT, 3) and first.cached == 0
        swapped = (*B, *A, *C[:20])
        assert engine.submit(Ask(swapped, 3, parts=PARTS[::-1])).result(30).cached > 60
        with engine.changing("scaled"), torch.no_grad():
            next(text.model.model.layers.parameters()).mul_(1.5)
        again = engine.submit(Ask(swapped, 3, parts=PARTS[::-1])).result(30)
        assert again.cached == 0 and again.tokens == answer(text.model, swapped, 3)
        assert {"first", "within budget"} <= {each["reason"] for each in engine.record()["cache"]["steps"]}
    finally:
        engine.close()
    with pytest.raises(RequestError, match="use prefixes only"):
        ChunkReuse(text_model("qwen3_next").model, WIDE)
