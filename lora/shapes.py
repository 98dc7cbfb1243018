"""Checks a placed file against the model from header and names alone: halves, ranks, dims, payloads. Reads no tensor."""

from collections.abc import Mapping

from lora.errors import bad, listed
from lora.files import Entry
from lora.layouts import Key, Layout
from lora.names import Place, parameter_name
from lora.target import Target

_NOTHING = "nothing was loaded"


def check_shapes(layout: Layout, entries: Mapping[str, Entry], target: Target) -> None:
    """Raise ValueError for the first kind of fault, listing up to five of its keys."""
    keys = [key.text for parts in layout.groups.values() for key in parts.values()]
    whole = [key.text for parts in layout.groups.values() for key in parts.values() if key.part != "alpha"]
    if faults := [f"{key} is {entries[key].dtype}" for key in whole if not entries[key].is_float]:
        raise bad("adapter tensors", listed(faults), "floating point", f"ask for an unquantised file; {_NOTHING}")
    if not whole:
        raise bad("adapter file", f"only alphas: {listed(keys)}", "low-rank pairs or payloads", "download the file again")
    halves = [fault for parts in layout.groups.values() for fault in _halves(parts)]
    if halves:
        raise bad("adapter pairs", listed(halves), "both halves of every pair", f"download the file again; {_NOTHING}")
    for place, parts in layout.groups.items():
        if "down" in parts:
            _check_pair(place, parts, entries, target)
        if "alpha" in parts and entries[parts["alpha"].text].shape not in ((), (1,), (1, 1)):
            raise bad("alpha", f"{parts['alpha'].text} of shape {entries[parts['alpha'].text].shape}", "one number", _NOTHING)
        for part in ("diff", "diff_b", "set_weight", "set_bias"):
            if part in parts:
                _check_payload(place, parts, part, entries, target)


def _halves(parts: Mapping[str, Key]) -> list[str]:
    if "down" in parts and "up" in parts:
        return []
    return [f"{key.text} alone" for key in parts.values() if key.part in ("down", "up", "alpha")]


def _check_pair(place: Place, parts: Mapping[str, Key], entries: Mapping[str, Entry], target: Target) -> None:
    down, up = (entries[parts[part].text].shape for part in ("down", "up"))
    names = f"{parts['down'].text} {down} and {parts['up'].text} {up}"
    missing = [module for module in place.modules if module not in target.linears]
    if missing:
        raise bad("adapter pair", f"{names} for {listed(missing)}", "a linear layer of the model", f"check the file; {_NOTHING}")
    shapes = [target.shapes[f"{module}.weight"] for module in place.modules]
    rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
    if len(down) == 2 and len(up) == 2 and down == (up[1], columns) and up[0] == rows and down[0] > 0:
        return
    wanted = f"(r, {columns}) and ({rows}, r) for {place.modules[0]}"
    advice = f"check that the file is for this model; {_NOTHING}"
    if "adaln_proj" in parts["down"].text and len(down) == 2 and down[1] != columns:
        advice = "this looks like an adapter of a pruned base: use the file made for the full base"
    elif len(down) == 2 and len(up) == 2 and down[0] == columns and up[1] == rows:
        advice = f"both look transposed; ask for a file in the usual orientation; {_NOTHING}"
    elif len(down) > 2:
        advice = f"this is a convolution's adapter; the model has a linear layer; {_NOTHING}"
    raise bad("adapter shapes", names, wanted, advice)


def _check_payload(place: Place, parts: Mapping[str, Key], part: str, entries: Mapping[str, Entry], target: Target) -> None:
    parameter = "bias" if part in ("diff_b", "set_bias") else "weight"
    other = {"diff": "set_weight", "diff_b": "set_bias"}.get(part)
    text = parts[part].text
    if other in parts:
        raise bad("adapter keys", f"{text} and {parts[str(other)].text}", "a difference or a replacement", f"remove one; {_NOTHING}")
    shapes = [target.shapes.get(parameter_name(module, parameter)) for module in place.modules]
    if None in shapes:
        expected = f"a parameter of the model; {place.modules[0]} has no {parameter}"
        raise bad("adapter payload", text, expected, f"check that the file is for this model; {_NOTHING}")
    rows, rest = sum(shape[0] for shape in shapes if shape), tuple(shapes[0] or ())[1:]
    found = entries[text].shape
    if found == (rows, *rest):
        return
    advice = f"check that the file is for this model; {_NOTHING}"
    if len(found) == 1 + len(rest) and found[0] > rows and found[0] % rows == 0 and found[1:] == rest:
        advice = f"this is a bank of {found[0] // rows} output heads (Parallel Decoding Distillation), which needs code of its own"
    raise bad("adapter shapes", f"{text} {found}", f"{(rows, *rest)} for {place.modules[0]}.{parameter}", advice)
