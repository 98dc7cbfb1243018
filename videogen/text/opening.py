"""From a source's name to a text model in memory and the engine that its layers allow."""

from typing import Any

import torch

from caches.policy import Budget
from caches.prefix_hook import TEXT_BUDGET
from videogen.errors import EnvironmentFault, bad, say
from videogen.text.batching import BatchingEngine
from videogen.text.choose import BATCHING, Choice, choose
from videogen.text.loop import Paging, has_loop
from videogen.text.model import TextModel, load_text
from videogen.text.shapes import random_model
from videogen.text.snapshots import CHUNK, MAX_QUEUE, SnapshotEngine
from videogen.text.source import OWN, find_text_source

ENGINES = ("auto", "batching", "snapshots")


class NoWords:
    """Stands where a random model's tokenizer would: it counts, and cannot read."""

    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        """Nothing."""
        return {}


def open_text(name: str, device: torch.device, dtype: torch.dtype) -> tuple[TextModel, str]:
    """(model, identity of its weights): a text source, or `random:NAME` of `videogen.text.shapes`, which has no tokenizer.

    Raises RequestError for a name that is no model to load here, EnvironmentFault when it does not load.
    """
    if name.startswith("random:"):
        return TextModel(random_model(name.removeprefix("random:"), device, dtype), NoWords()), name
    source = find_text_source("pocket" if name == "own" else name)
    if source.kind not in ("folder", "gguf"):
        raise bad(
            "text model", name, f"one that loads here (pocket, embedded, a folder, a .gguf file, a hub id), not {OWN.kind}", "choose one"
        )
    return load_text(source, device, dtype), source.identity


def chosen(text: TextModel, asked: str = "auto") -> Choice:
    """The engine for a model; asking for batching where layers do not page raises RequestError."""
    found = choose(text.model.config, can_page=has_loop(text.model))
    if asked == "auto" or (asked == "batching") == (found.engine == BATCHING):
        return found
    if asked == "batching":
        raise bad("--engine", asked, f"snapshots for this model ({found.reason})", "use auto")
    return Choice("prefix snapshots", f"asked for; {found.reason}")


def budget(*, reuse: bool) -> Budget:
    """The budget of an engine that reuses prefixes, or of one that never does."""
    return TEXT_BUDGET if reuse else Budget()


def open_engine(
    text: TextModel,
    weights: str,
    asked: str = "auto",
    *,
    paging: Paging | None = None,
    chunk: int = CHUNK,
    max_queue: int = MAX_QUEUE,
    sampling: bool = False,
    **options: Any,
) -> BatchingEngine | SnapshotEngine:
    """The engine running; `options` are those that both take (`budget`). Raises EnvironmentFault where CUDA lacks the memory."""
    try:
        if chosen(text, asked).engine == BATCHING:
            return BatchingEngine(text, weights, paging=paging, max_queue=max_queue, sampling=sampling, **options)
        return SnapshotEngine(text, weights, chunk=chunk, max_queue=max_queue, **options)
    except torch.OutOfMemoryError as error:
        told = say("text engine", str(error).split(".")[0], "memory for its cache", "use fewer pages (--pages)")
        raise EnvironmentFault(told) from error
