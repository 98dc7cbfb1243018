"""An adapter to a file of a named layout, re-read through our own loader and compared before it counts."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from lora.adapter import Adapter, Factors, Patch
from lora.alpha import FOLDED
from lora.convert import QKV_ORDER, SWIGLU_GATE_FIRST, load_adapter
from lora.errors import bad, listed
from lora.fuse import fuse_qkv, interleave, swap_halves
from lora.names import is_swiglu, is_table, is_wan, original_name
from lora.target import Target

LAYOUTS = ("diffusers", "diffusers-bare", "original", "comfyui", "kohya", "diffsynth")
_TOLERANCE = 1e-6
_SPLIT_LAYOUTS = ("diffusers", "diffusers-bare")
_PREFIX = {"diffusers": "transformer.", "comfyui": "diffusion_model.", "kohya": "lora_unet_"}


def write_adapter(
    adapter: Adapter, target: Target, layout: str, path: Path, metadata: Mapping[str, str], *, overwrite: bool = False
) -> None:
    """Write `path` through `path.part`; scales are folded in (alpha = rank), so that no loader can misread them.

    Raises ValueError when the file exists and `overwrite` is off, when the layout cannot hold the adapter, or when the
    written file does not read back to the same deltas within 1e-6.
    """
    if path.exists() and not overwrite:
        raise bad("output", f"{path}, which exists", "a new file", "choose another name, or pass --overwrite")
    if not path.parent.is_dir():
        raise bad("output", str(path), "a file in an existing folder", "make the folder first")
    tensors = export(adapter, target, layout)
    order = {QKV_ORDER: "interleaved" if layout == "diffsynth" else "stacked", SWIGLU_GATE_FIRST: str(layout not in _SPLIT_LAYOUTS).lower()}
    part = path.with_name(f"{path.name}.part")
    try:
        save_file(tensors, part, {"format": "pt", FOLDED: "true", **metadata, **order})
        compare(adapter, load_adapter(part, target))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def compare(a: Adapter, b: Adapter) -> None:
    """Raise ValueError unless both hold the same updates within 1e-6, relative, and equal payloads.

    A module that only one of them has must be without effect: fusing fills an absent q, k or v with zeros.
    """
    alone = [name for name in a.factors.keys() ^ b.factors.keys() if (a.factors.get(name) or b.factors[name]).norm() > 0]
    odd = {*alone, *(a.patches.keys() ^ b.patches.keys())}
    if odd:
        raise bad("written adapter", f"other modules ({listed(odd)})", "the same modules", "report this as a bug")
    for name in a.factors.keys() & b.factors.keys():
        one = a.factors[name]
        gap, size = _gap(one, b.factors[name]), one.norm()
        if not gap <= _TOLERANCE * max(size, 1e-30):
            raise bad("written adapter", f"{name} off by {gap:.3g} of {size:.3g}", "the same update", "report this as a bug")
    for name, patch in a.patches.items():
        if patch.is_replacement != b.patches[name].is_replacement or not torch.equal(patch.value, b.patches[name].value):
            raise bad("written adapter", f"another payload of {name}", "the same payload", "report this as a bug")


def _gap(one: Factors, two: Factors) -> float:
    if one.down.shape == two.down.shape and torch.equal(one.down, two.down):
        ups = one.scale * one.up.double() - two.scale * two.up.double()
        return Factors(one.down, ups, 1.0).norm()
    return float((one.delta().double() - two.delta().double()).norm())


def export(adapter: Adapter, target: Target, layout: str) -> dict[str, torch.Tensor]:
    """The tensors of one layout. Raises ValueError for an unknown one."""
    if layout not in LAYOUTS:
        raise bad("layout", layout, f"one of {', '.join(LAYOUTS)}", "choose one of them")
    tensors: dict[str, torch.Tensor] = {}
    for name, factors in _named_factors(adapter, target, layout).items():
        stem, folded = _stem(name, layout), _folded(factors)
        infix = ".default" if layout == "diffsynth" else ""
        halves = ("lora_down", "lora_up") if layout == "kohya" else (f"lora_A{infix}", f"lora_B{infix}")
        tensors |= {f"{stem}.{halves[0]}.weight": folded.down, f"{stem}.{halves[1]}.weight": folded.up}
        if layout in ("comfyui", "kohya"):
            tensors[f"{stem}.alpha"] = torch.tensor(float(folded.rank))
    for parameter, patch in adapter.patches.items():
        module, leaf = (parameter, "weight") if is_table(parameter) else (parameter.rpartition(".")[0], parameter.rpartition(".")[2])
        name, value = _named_payload(module, patch.value, target, layout)
        tensors[f"{_stem(name, layout)}.{_payload_part(leaf, patch)}"] = value
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def _stem(name: str, layout: str) -> str:
    return _PREFIX.get(layout, "") + (name.replace(".", "_") if layout == "kohya" else name)


def _folded(factors: Factors) -> Factors:
    """Scale 1: in the dtype at hand where that is exact (a power of two is), else in float32."""
    if factors.scale == 1:
        return factors
    wide = factors.up.float() * factors.scale
    exact = math.frexp(factors.scale)[0] == 0.5 and torch.equal(wide.to(factors.up.dtype).float(), wide)
    return Factors(factors.down, wide.to(factors.up.dtype) if exact else wide, 1.0)


def _named_factors(adapter: Adapter, target: Target, layout: str) -> dict[str, Factors]:
    """Factors by the name the layout gives them, rows in its order; q/k/v fused, where an absent one counts as zero."""
    if layout in _SPLIT_LAYOUTS:
        return dict(adapter.factors)
    if is_wan(target):  # its original names keep q, k and v apart
        return {original_name(module, of_wan=True): factors for module, factors in adapter.factors.items()}
    named: dict[str, Factors] = {}
    for module, factors in adapter.factors.items():
        owner, _, leaf = module.rpartition(".")
        if leaf not in ("to_q", "to_k", "to_v"):
            up = swap_halves(factors.up) if is_swiglu(module, target) else factors.up
            named[original_name(module)] = Factors(factors.down, up, factors.scale)
        elif f"{original_name(owner)}.qkv_proj" not in named:
            fused = fuse_qkv([_part(adapter, target, f"{owner}.to_{letter}", factors) for letter in "qkv"])
            up = interleave(fused.up, target.head_dims[owner]) if layout == "diffsynth" else fused.up
            named[f"{original_name(owner)}.qkv_proj"] = Factors(fused.down, up, fused.scale)
    return named


def _part(adapter: Adapter, target: Target, module: str, like: Factors) -> Factors:
    if module in adapter.factors:
        return adapter.factors[module]
    return Factors(like.down, torch.zeros(target.rows(module), like.rank, dtype=like.up.dtype), like.scale)


def _named_payload(module: str, value: torch.Tensor, target: Target, layout: str) -> tuple[str, torch.Tensor]:
    """A payload under the layout's name. One of q, k or v alone fits no fused name and is refused."""
    if layout in _SPLIT_LAYOUTS:
        return module, value
    if is_wan(target):
        return original_name(module, of_wan=True), value
    if module.endswith((".to_q", ".to_k", ".to_v")):
        raise bad("layout", f"{layout} for a payload of {module}", "a layout that keeps q, k and v apart", "use diffusers")
    return original_name(module), swap_halves(value) if is_swiglu(module, target) else value


def _payload_part(leaf: str, patch: Patch) -> str:
    if patch.is_replacement:
        return f"set_{leaf}"
    return "diff" if leaf == "weight" else "diff_b"
