"""Where a model's weights go when nobody says: the simplest place that leaves room for a clip on this device.

The components' sizes are read off their outlines, which take no memory; what a clip takes besides was measured on H3 (docs/parallel.md).
A guess: a clip that runs out of memory all the same is made once more in less of it.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from videogen.config import Recipe, Request
from videogen.errors import RequestError
from videogen.families.limits import check_limits
from videogen.load import outline, pick_dtype
from videogen.parallel.weights import Placement, blocks_of, decoder_stack, large_parts, text_stack
from videogen.source import ModelSource

logger = logging.getLogger(__name__)

VECTORS_A_ROW = 13  # of the denoiser's width in bfloat16: 5.3 GB at H3's 37,836 rows, by the peak less the weights
OTHERS_BYTES, USABLE = 2.5e9, 0.95  # CUDA's own, the libraries', a schedule's tables; what an allocator in pieces gets of the rest
_GIB = 2**30


def fitted(
    placement: Placement,
    source: ModelSource,
    family: Any,
    recipes: Sequence[Recipe],
    device: torch.device,
    *,
    is_alone: bool,
    rows: int | None = None,
) -> Placement:
    """The placement without `auto`: whole and resident, but on a CUDA device that does not hold all of it.

    `recipes` are all that will share the weights: none may be refused where they go. `rows` are those of the largest clip to come, by
    default of the model's usual one. Where nothing can be told it is the simplest,
    and what opens or loads the model says what is wrong.
    """
    if "auto" not in (placement.kind, placement.text):
        return placement
    kind, text = ("whole" if placement.kind == "auto" else placement.kind), ("resident" if placement.text == "auto" else placement.text)
    simplest = replace(placement, kind=kind, text=text)
    places = [each for each in _places(placement) if all(_is_allowed(each, source, family, recipe) for recipe in recipes)]
    if device.type != "cuda" or is_alone == (placement.peers is not None) or not places:
        return simplest
    try:
        resolved = family.resolve(usual(family), Recipe())
        parts = outline(source, resolved.workflow, pick_dtype(recipes[0].dtype, device))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        logger.debug("what the model takes is not known: %s", error)
        return simplest
    rows = rows or family.estimate(resolved).rows
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    room = int(free * USABLE - OTHERS_BYTES)
    if any(recipe.savings.matmul == "float8" for recipe in recipes):
        room -= sum(_of_blocks(module) // 2 for module in _denoisers(parts))  # copies of a byte a weight
    has_tables = all(recipe.savings.adaln_tables for recipe in recipes)
    found, needed = fitting(parts, places, rows, room, has_tables=has_tables)
    if found != simplest:
        gib = tuple(amount / _GIB for amount in (needed, room, needs(parts, simplest, rows, has_tables=has_tables)))
        said = "weights: %s, text encoder: %s; a clip needs about %.0f of the device's %.0f GiB so, %.0f otherwise%s"
        hosted = sum(size(module) for name, module in parts.items() if found.is_hosted(name))
        logger.warning(said, found.kind, found.text, *gib, _short_of_host(hosted))
    return found


def usual(family: Any) -> Request:
    """A request of the model's own size and length."""
    has_words = "t2v" in getattr(family, "workflows", ("t2v",))
    return Request("a clip", image=None if has_words else Image.new("RGB", (64, 64)))


def _places(asked: Placement) -> Iterator[Placement]:
    """In the order of preference; the last takes least."""
    several = "fsdp" if asked.peers is not None and asked.kind == "auto" else "offload-idle"
    for kind in ("whole", "parked", several, "offload"):
        for text in ("resident", "visiting", "offload"):
            if asked.kind in ("auto", kind) and (asked.text == text or (asked.text == "auto" and text != "visiting")):
                yield replace(asked, kind=kind, text=text)


def _is_allowed(place: Placement, source: ModelSource, family: Any, recipe: Recipe) -> bool:
    try:
        check_limits(source, family, recipe, place.kind)
    except RequestError:
        return False
    return True


def fitting(
    parts: Mapping[str, nn.Module], places: Sequence[Placement], rows: int, room: int, *, has_tables: bool = True
) -> tuple[Placement, int]:
    """The first place whose need is within `room` bytes, else the last, which needs least; and what it needs.

    Ranks that share a clip take the first one's.
    """
    needed = [needs(parts, place, rows, has_tables=has_tables) for place in places]
    chosen = next((number for number, need in enumerate(needed) if need <= room), len(places) - 1)
    if places[0].peers is not None:
        chosen = places[0].peers.same(chosen)
    return places[chosen], needed[chosen]


def size(module: nn.Module) -> int:
    """Bytes of its parameters, tied ones once."""
    return sum(parameter.nbytes for parameter in module.parameters())


def needs(parts: Mapping[str, nn.Module], place: Placement, rows: int, *, has_tables: bool = True) -> int:
    """Bytes of the device at the peak of a clip of so many rows; the text encoder is done before the rows come.

    Without tables of them the AdaLN projections are on the device wherever the rest lives.
    """
    denoisers, ranks = _denoisers(parts), 1 if place.peers is None else place.peers.count
    held = sum(_of_denoiser(module, place.kind, ranks, has_tables=has_tables) for module in denoisers)
    if place.kind == "offload-idle":
        held += max(map(_of_blocks, denoisers))
    held += sum(size(module) for name, module in parts.items() if not name.startswith(("transformer", "text_encoder", "vae")))
    held += _but_two(parts["vae"], decoder_stack(parts["vae"])[1]) if place.kind == "offload" else size(parts["vae"])
    clip, text = rows * _width(denoisers[0]) * 2 * VECTORS_A_ROW // ranks, parts.get("text_encoder")
    if text is None:
        return held + clip
    if place.text == "resident":
        return held + size(text) + clip
    return held + max(clip, size(text) if place.text == "visiting" else _but_two(text, text_stack(text)[1]))


def _width(denoiser: Any) -> int:
    config = denoiser.config
    return int(config.get("hidden_size") or config["num_attention_heads"] * config["attention_head_dim"])


def _of_denoiser(module: nn.Module, kind: str, ranks: int, *, has_tables: bool) -> int:
    """What stays on the device of one denoiser; of one that waits at home only what never waits."""
    blocks = [large_parts(block) for block in blocks_of(module)]
    parked = sum(size(block.adaln_proj) for block in blocks_of(module) if hasattr(block, "adaln_proj")) if has_tables else 0
    if kind == "whole":
        return size(module)
    if kind == "parked":
        return size(module) - parked
    if kind in ("offload", "fsdp"):
        return _but_two(module, blocks) - parked + (_of_blocks(module) // ranks if kind == "fsdp" else 0)
    return size(module) - parked - _of_blocks(module)


def _of_blocks(denoiser: nn.Module) -> int:
    """What of a denoiser visits, or is multiplied in 8 bits."""
    return sum(size(part) for block in blocks_of(denoiser) for part in large_parts(block))


def _denoisers(parts: Mapping[str, nn.Module]) -> list[nn.Module]:
    return [module for name, module in parts.items() if name.startswith("transformer")]


def _but_two(module: nn.Module, blocks: list[Any]) -> int:
    """A module's bytes where only two of these blocks are there at a time."""
    sizes = [sum(map(size, block)) for block in blocks]
    return size(module) - sum(sizes) + 2 * max(sizes, default=0)


def _short_of_host(wanted: int) -> str:
    """What to add where host memory does not hold the model either."""
    free = _host_bytes()
    return "" if wanted <= free else f"; host memory may run short: {wanted / _GIB:.0f} GiB of weights, {free / _GIB:.0f} GiB free"


def _host_bytes() -> float:
    """What programs may still have of it; without end where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return float("inf")
