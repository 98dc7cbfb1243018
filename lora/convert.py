"""From an adapter file to an `Adapter` of one model: strictly, completely, or not at all. Touches no model."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lora.adapter import Adapter, Factors, Patch
from lora.alpha import RANK_NOTE, AlphaSources, gather, positive, scale_of
from lora.errors import bad, listed
from lora.files import AdapterFile, open_file
from lora.fuse import QkvOrder, block_rank, deinterleave, order_evidence, split_qkv, swap_halves
from lora.layouts import Key, Layout, decide_layout
from lora.names import Place, parameter_name
from lora.published import find_published
from lora.refusals import refuse_by_config
from lora.shapes import check_shapes
from lora.target import Target

_PARAMETER = {"diff": "weight", "diff_b": "bias", "set_weight": "weight", "set_bias": "bias"}
_ROWS = ("up", "diff", "set_weight")  # parts whose rows are output rows of a weight
_GATE_FIRST = {"true": True, "1": True, "false": False, "0": False}
_LARGEST = 1e30  # float32 ends at 3e38, and strengths and sums come on top
QKV_ORDER = "qkv_order"  # metadata key of our own files
SWIGLU_GATE_FIRST = "swiglu_gate_first"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the user says about a file; None leaves it to the file. `partition` chooses where the file holds both."""

    alpha: float | None = None
    qkv_order: QkvOrder | None = None
    gate_first: bool | None = None
    partition: str | None = None


@dataclass(slots=True)
class _Reading:
    """One file on its way to an adapter."""

    file: AdapterFile
    target: Target
    options: ReadOptions
    layout: Layout
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load_adapter(path: str | Path, target: Target, options: ReadOptions | None = None) -> Adapter:
    """Read a safetensors file or a peft folder for a model.

    Names and shapes are settled from the header, then every tensor is read once and must be finite. Raises ValueError,
    listing up to five keys, when a key has no place, a half is missing, a shape or rank differs, a number is not finite, an
    alpha is no positive number, or a row order cannot be known.
    """
    options = options or ReadOptions()
    file = open_file(path)
    refuse_by_config(file.config, file.config_source)
    layout = decide_layout(file.entries, target, options.partition)
    check_shapes(layout, file.entries, target)
    reading = _Reading(file, target, options, layout)
    _read_tensors(reading)
    row = find_published(str(file.path))
    sources = gather(
        flag=options.alpha,
        config=file.config,
        config_name=file.config_source,
        metadata=file.metadata,
        table=row.alpha if row else None,
    )
    order, gate_first = _qkv_order(reading), _gate_first(reading, row.gate_first if row else None)
    factors: dict[str, Factors] = {}
    patches: dict[str, Patch] = {}
    for place, parts in layout.groups.items():
        if "down" in parts:
            factors |= _factors(reading, place, parts, order, gate_first, sources)
        for name in _PARAMETER.keys() & parts.keys():
            patches |= _patches(reading, place, name, parts[name], order, gate_first)
    _check_sizes(factors, patches)
    _note_alpha(reading, factors, sources)
    choices = [file.sha256, layout.partition, order, gate_first, sorted((name, each.scale) for name, each in factors.items())]
    return Adapter(
        name=file.path.stem if file.path.stem != "adapter_model" else file.path.parent.name,
        digest=hashlib.sha256(json.dumps(choices).encode()).hexdigest(),
        layout=layout.name,
        factors=dict(sorted(factors.items())),
        patches=dict(sorted(patches.items())),
        partition=layout.partition,
        metadata=file.metadata,
        notes=tuple(reading.notes),
    )


def _read_tensors(reading: _Reading) -> None:
    keys = [key.text for parts in reading.layout.groups.values() for key in parts.values()]
    broken = []
    for name, tensor in reading.file.read(keys):
        reading.tensors[name] = tensor
        if not bool(torch.isfinite(tensor).all()):
            broken.append(name)
    if broken:
        raise bad(
            "adapter tensors", f"NaN or infinity in {listed(broken)}", "finite numbers", "download the file again; nothing was loaded"
        )


def _check_sizes(factors: Mapping[str, Factors], patches: Mapping[str, Patch]) -> None:
    """Finite factors can have a product that is not."""
    huge = [name for name, each in factors.items() if not each.bound() <= _LARGEST]
    huge += [name for name, each in patches.items() if not float(each.value.abs().max().double()) <= _LARGEST]
    if huge:
        expected = f"entries up to {_LARGEST:g}, which float32 still adds up"
        raise bad("adapter tensors", f"a change beyond that of {listed(huge)}", expected, "download the file again; nothing was loaded")


def _note_alpha(reading: _Reading, factors: Mapping[str, Factors], sources: AlphaSources) -> None:
    if any(each.scale_from == "alpha = rank" for each in factors.values()):
        reading.notes.append(RANK_NOTE)
    if None not in (sources.metadata, sources.table) and sources.metadata != sources.table:
        reading.notes.append(f"alpha {sources.metadata:g} by the file is followed; published files of this name have {sources.table:g}")


def _factors(
    reading: _Reading, place: Place, parts: Mapping[str, Key], order: QkvOrder, gate_first: bool | None, sources: AlphaSources
) -> dict[str, Factors]:
    down, up = reading.tensors[parts["down"].text], reading.tensors[parts["up"].text]
    if "alpha" in parts:
        text = parts["alpha"].text
        tensor: float | None = positive(reading.tensors[text].double().item(), text)
    else:
        tensor = None
    up = _ordered(reading, place, up, order, gate_first)
    trained = block_rank(up) if place.is_qkv else None
    scale, origin = scale_of(parts["down"].stem, down.shape[0], trained or down.shape[0], tensor, sources)
    whole = Factors(down, up, scale, origin)
    return dict(zip(place.modules, split_qkv(whole) if place.is_qkv else (whole,)))


def _patches(reading: _Reading, place: Place, part: str, key: Key, order: QkvOrder, gate_first: bool | None) -> dict[str, Patch]:
    rows = _ordered(reading, place, reading.tensors[key.text], order, gate_first)
    names = [parameter_name(module, _PARAMETER[part]) for module in place.modules]
    return {name: Patch(value.contiguous(), part.startswith("set")) for name, value in zip(names, rows.chunk(len(names)))}


def _ordered(reading: _Reading, place: Place, rows: torch.Tensor, order: QkvOrder, gate_first: bool | None) -> torch.Tensor:
    """Output rows in the model's order."""
    if place.is_qkv and order == "interleaved":
        return deinterleave(rows, _head_dim(reading, place))
    if place.gate_first is not None and (place.gate_first if gate_first is None else gate_first):
        return swap_halves(rows)
    return rows


def _head_dim(reading: _Reading, place: Place) -> int:
    owner = place.modules[0].rpartition(".")[0]
    if owner not in reading.target.head_dims:
        raise bad("attention heads", f"no head width for {owner}", "a module with `head_dim`", "say --qkv-order stacked, or split q/k/v")
    return reading.target.head_dims[owner]


def _fused_rows(reading: _Reading) -> Iterator[tuple[int | None, torch.Tensor]]:
    """Fused matrices whose row order matters (with one head there is only one), with the width of a head if known."""
    for place, parts in reading.layout.groups.items():
        head_dim = reading.target.head_dims.get(place.modules[0].rpartition(".")[0])
        if place.is_qkv and head_dim != reading.target.rows(place.modules[0]):
            yield from ((head_dim, reading.tensors[key.text]) for part, key in parts.items() if part in _ROWS)


def _qkv_order(reading: _Reading) -> QkvOrder:
    """The row order of fused q/k/v: the user's word, the file's, the numbers' or, where it is unambiguous, the name's habit."""
    said = reading.options.qkv_order
    written = reading.file.metadata.get(QKV_ORDER)
    if written not in (None, "stacked", "interleaved") or (said and written and said != written):
        raise bad("q/k/v order", f"{written} by the file, {said} by the option", "stacked or interleaved", "leave the option away")
    if said or written:
        return "interleaved" if "interleaved" in (said, written) else "stacked"
    fused = list(_fused_rows(reading))
    if not fused:
        return "stacked"
    evidence = _evidence(fused)
    advice = "say --qkv-order stacked (rows [q; k; v]) or --qkv-order interleaved (DiffSynth: q, k, v of each head in turn)"
    if evidence is None:
        if reading.layout.has_infix:
            raise bad(
                "q/k/v order", f"fused rows under {reading.layout.name}, which two producers order differently", "a known order", advice
            )
        return "stacked"
    order, reason = evidence
    if order == "interleaved" and not reading.layout.has_infix:
        raise bad("q/k/v order", f"rows that look interleaved ({reason}) under names of the stacked order", "a known order", advice)
    if reading.layout.has_infix:
        reading.notes.append(f"q/k/v rows taken as {order}: {reason}")
    return order


def _evidence(fused: Sequence[tuple[int | None, torch.Tensor]]) -> tuple[QkvOrder, str] | None:
    by_width: dict[int, list[torch.Tensor]] = {}
    for width, up in fused:
        if width is not None:
            by_width.setdefault(width, []).append(up)
    found = [evidence for width, ups in by_width.items() if (evidence := order_evidence(ups, width))]
    return found[0] if len({order for order, _ in found}) == 1 else None


def _gate_first(reading: _Reading, table: bool | None) -> bool | None:
    """Whether SwiGLU rows begin with the gate, when something says so; None leaves it to the habit of each name."""
    said, text = reading.options.gate_first, reading.file.metadata.get(SWIGLU_GATE_FIRST)
    written = None if text is None else _GATE_FIRST.get(text.lower())
    if (text is not None and written is None) or (said is not None and written is not None and said != written):
        raise bad("SwiGLU order", f"{text!r} by the file, {said} by the option", "true or false, and one of them", "leave the option away")
    known = next((each for each in (said, written, table) if each is not None), None)
    if known is not None and any(place.gate_first is not None for place in reading.layout.groups):
        by = "the option" if said is not None else "the file" if written is not None else "the table of published files"
        reading.notes.append(f"SwiGLU rows taken as {'[gate; value]' if known else '[value; gate]'}, by {by}")
    return known
