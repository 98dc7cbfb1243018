"""A clip that runs out of memory is made once more from nothing, then fails alone; the next one is that of a fresh process."""

import logging
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import TINY
from tests.model_faults import Starved
from videogen import Recipe, Request
from videogen.errors import DoesNotFit
from videogen.parallel.sharding import Alone
from videogen.parallel.weights import WHOLE, Placement
from videogen.pipeline import Pipeline, open_pipeline
from videogen.recipes import EXACT
from videogen.transforms.options import Savings

REQUEST = Request("a red circle", seed=1, **TINY)


@pytest.fixture
def opened(tiny_model: Path) -> Pipeline:
    """A pipeline of its own: what it keeps is let go here."""
    return open_pipeline(str(tiny_model), Recipe("exact", savings=EXACT))


def test_it_is_made_once_more_and_then_fails_alone(opened: Pipeline, tiny_pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="videogen")
    wanted, first = tiny_pipeline.render(REQUEST), list[Any]()
    starved = Starved(opened, victim=1, number=900, twice=0)
    starved.on_hit = lambda: first.append(weakref.ref(opened._opened["t2va"].transformer))
    again = starved.render(REQUEST)
    assert np.array_equal(again.frames, wanted.frames) and np.array_equal(again.audio, wanted.audio)
    assert again.record["memory"]["attempts"] == 2 and again.record["recipe"] == wanted.record["recipe"]
    assert "once more, in less of it" in caplog.text and "Traceback" not in caplog.text
    assert first[0]() is None and not opened._opened and not opened._shared and not opened._kept.encodings.kept
    with pytest.raises(DoesNotFit, match=r"clip 96x64, 22 frames: got out of memory \(twice.*; render it smaller or shorter"):
        Starved(opened, victim=1, number=5, twice=5).render(REQUEST)
    after = opened.render(REQUEST)
    assert np.array_equal(after.frames, wanted.frames) and "memory" not in after.record


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")]
)
def test_host_memory_counts_too_and_ranks_of_one_clip_do_not_try_again(opened: Pipeline, error: Exception) -> None:
    opened.sharding = Alone()

    def fail(*_: Any) -> None:
        raise error

    opened._render = fail  # type: ignore[method-assign]
    with pytest.raises(DoesNotFit, match="out of memory"):
        opened.render(REQUEST)
    other = RuntimeError("no luck")
    opened._render = lambda *_: (_ for _ in ()).throw(other)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no luck"):
        opened.render(REQUEST)


def test_less_memory_is_weights_that_wait_and_only_then_fewer_tiles(opened: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    opened.device = torch.device("cuda")  # nothing is loaded onto it here
    opened.savings = Savings(adaln_tables=True, encodings=4, decode_batch=14)
    monkeypatch.setattr("videogen.pipeline.settled", lambda savings, *_: (savings, {}))
    opened.recipe = Recipe("exact", savings=opened.savings)
    smaller = opened._smaller()
    assert (smaller.placement, smaller.savings.decode_batch) == (Placement("offload", None, "offload"), 14)
    assert smaller.savings.encodings == 0 and smaller.savings.park_adaln and opened.placement == WHOLE
    for text in ("offload", "visiting"):
        opened.placement = Placement("offload", None, text)
        assert opened._smaller().savings.decode_batch == 1 and opened._smaller().placement == Placement("offload", None, "offload")
    opened.placement = Placement("offload")  # the text encoder goes first
    assert opened._smaller().savings.decode_batch == 14
