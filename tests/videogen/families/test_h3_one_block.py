"""A model whose stack is too small for the step cache renders without one."""

import pytest
from torch import nn

from videogen.config import Recipe, Request, StepCache
from videogen.families.h3_pipeline import transformer_of
from videogen.pipeline import Pipeline

REQUEST = Request("a red circle", size=(96, 64), frames=22, steps=8, seed=1)


def test_lambda_0_asks_nothing_of_the_stack(tiny_pipeline: Pipeline) -> None:
    transformer = transformer_of(tiny_pipeline.load("t2va"))
    whole = transformer.transformer_blocks
    nothing = {"lambda": 0.0, "reused": 0, "computed": 0, "reasons": {}, "warning": "", "steps": [], "certificate": None, "note": ""}
    try:  # a module's part: monkeypatch would take it for the class's and delete it in the end
        transformer.transformer_blocks = nn.ModuleList(whole[:1])
        assert tiny_pipeline.render(REQUEST).record["cache"] == nothing
        with pytest.raises(ValueError, match="stack of at least 2 blocks; use lambda 0"):
            tiny_pipeline.sharing(Recipe(savings=tiny_pipeline.savings, cache=StepCache(lam=0.1))).render(REQUEST)
    finally:
        transformer.transformer_blocks = whole
