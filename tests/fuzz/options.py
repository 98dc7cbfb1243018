"""Requests and recipes made in Python: every field good or of any type, through the family's checks to an identity."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from PIL import Image

from tests.fuzz.box import ADAPTER, GOOD_PICTURE, Box, must_be_finite
from tests.fuzz.values import mixed, text
from videogen.attention.options import BACKENDS, TAILS, Guard, SparseAttention
from videogen.config import DTYPES, Adapters, AdapterUse, Recipe, Request, StepCache, as_plain, recipe_record
from videogen.identity import canonical_json
from videogen.recipes import PLANNED, RECIPES, find_recipe, parse_adapter, with_adapters, with_cache, with_sparse
from videogen.text.source import OWN, find_text_source
from videogen.transforms.options import MATMULS, Savings

Options = tuple[str, dict[str, Any]]
REQUEST: dict[str, tuple[Any, ...]] = {
    "prompt": ("a red circle moves right", "x"),
    "image": (f"inputs/{GOOD_PICTURE}", None, "<picture>", "<float>", "missing.png"),
    "last_image": (f"inputs/{GOOD_PICTURE}", None, "<picture>"),
    "references": ((f"inputs/{GOOD_PICTURE}",), ("<picture>", "<wide>"), ("<picture>",) * 10, ()),
    "size": ((160, 96), (96, 160), [160, 96], (161, 96), (16_384, 16_384)),
    "frames": (22, 124, 345, 23),
    "seconds": (1, 2.5, 5),
    "steps": (1, 2, 49),
    "seed": (0, 7, 2**63 - 1),
    "round_size": (True, False),
    "expand": ("<own>", "template", None),
    "negative_prompt": ("", "blurred"),
    "guidance": ((4.0,), (4, 3), None),
}
_LENT = {
    "<picture>": lambda: Image.new("RGBA", (40, 30), (1, 2, 3, 4)),
    "<float>": lambda: Image.new("F", (40, 30), float("nan")),
    "<wide>": lambda: Image.new("L", (400, 10)),
    "<own>": lambda: OWN,
}
SPARSE: dict[str, tuple[Any, ...]] = {
    "budget": (None, 0.3, 1),
    "tail": TAILS,
    "dense_first": (0.2, 0, 1),
    "dense_last": (0, 2),
    "per_head": (True, False),
    "refresh": (1, 3),
    "tile": (None, (2, 4, 4)),
    "block": (None, (32, 32)),
    "min_rows": (None, 0, 64),
    "backend": BACKENDS,
    "guard": ("<guard>", None),
    "on_unsupported": ("dense", "error"),
}
GUARD: dict[str, tuple[Any, ...]] = {"every": (1, 5), "rows": (1, 64), "head": (0.25, 1), "layer": (0.2,), "request": (0.2, 0)}
CACHE: dict[str, tuple[Any, ...]] = {
    "lam": (0, 0.1, 1.5),
    "max_streak": (1, 3),
    "video_order": (0, 1, 2),
    "audio_order": (0, 2),
    "drift_order": (0, 1, 2),
    "warm_up": (0, 0.08, 1),
    "streams": ("each", "together"),
    "certificates": ((),),
    "on_mismatch": ("refuse", "compute"),
}
SAVINGS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("adaln_tables", "park_adaln", "refined_text", "rope_tables", "text_cut", "lean_loop", "kernels"), (True, False)),
    "encodings": (0, 64),
    "decode_batch": (0, 1, 14),
    "attention": ("model", "auto", "native"),
    "matmul": MATMULS,
}
USE: dict[str, tuple[Any, ...]] = {"file": (f"inputs/{ADAPTER}", "model:turbo4", "x"), "strength": (None, 1, 0.5, 0)}
RECIPE: dict[str, tuple[Any, ...]] = {"name": ("mine",), "steps": (None, 4), "dtype": DTYPES}
PARTS: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, ...]]]] = {
    "sparse": (SparseAttention, SPARSE),
    "guard": (Guard, GUARD),
    "cache": (StepCache, CACHE),
    "savings": (Savings, SAVINGS),
    "use": (AdapterUse, USE),
    "recipe": (Recipe, RECIPE),
}


def _some(rng: random.Random, fields: dict[str, tuple[Any, ...]], odds: float) -> dict[str, Any]:
    keys = rng.sample(sorted(fields), rng.randint(0, min(4, len(fields))))
    return {key: mixed(rng, fields[key], odds) for key in keys}


def make_request(rng: random.Random) -> dict[str, Any]:
    """Fields of a Request; `<picture>` and the like stand for pictures in memory."""
    return {"prompt": mixed(rng, REQUEST["prompt"], 0.85)} | _some(rng, REQUEST, rng.choice([0.9, 0.6]))


def check_request(fields: dict[str, Any], box: Box) -> None:
    """Made, resolved by the family, priced and described."""
    given = {key: _lent(value, box) for key, value in fields.items()}
    if given.get("expand") == "template":
        given["expand"] = find_text_source("template")
    request = Request(**given)
    resolved = box.family.resolve(request, find_recipe("exact"))
    estimate = box.family.estimate(resolved)
    canonical_json([as_plain(resolved), as_plain(estimate), as_plain(request)])
    must_be_finite([request, resolved, estimate])


def _lent(value: Any, box: Box) -> Any:
    if isinstance(value, tuple):
        return tuple(_lent(item, box) for item in value)
    if isinstance(value, str) and value in _LENT:
        return _LENT[value]()
    return str(box.root / value) if isinstance(value, str) and value.startswith("inputs/") else value


def make_recipe(rng: random.Random) -> Options:
    """Fields of one part of a recipe, or the words that the command line makes one of."""
    kind = rng.choice([*PARTS, "adapters", "named", "words"])
    if kind in PARTS:
        start = {"file": mixed(rng, USE["file"], 0.8)} if kind == "use" else {}
        return kind, start | _some(rng, PARTS[kind][1], rng.choice([0.9, 0.5]))
    if kind == "adapters":
        modes, stated = ("apply", "ignore"), (("shift_video=6", "shift_audio=3"), ("forwards=4",), ())
        return kind, {"contract": mixed(rng, modes), "stated": mixed(rng, stated), "fuse": mixed(rng, (True, False))}
    if kind == "named":
        return kind, {"name": mixed(rng, (*RECIPES, *PLANNED, "plain+cache")), "lam": mixed(rng, (0.1, 0)), "budget": mixed(rng, (0.3, 1))}
    words = [
        rng.choice(["apply", "ignore", "shift_video=6", "forwards=nan", "sigmas=1,0", "size=9x9", text(rng)])
        for _ in range(rng.randint(0, 3))
    ]
    return kind, {"adapter": mixed(rng, (f"inputs/{ADAPTER}", f"inputs/{ADAPTER}:0.5", "model:turbo8", text(rng)), 1.0), "words": words}


def check_recipe(options: Options, box: Box) -> None:
    """Made, read by the adapter reader, settled against a request, recorded."""
    kind, fields = options
    recipe = _recipe(kind, {key: _lent(value, box) for key, value in fields.items()}, box)
    recipe = box.reader(recipe)
    resolved = box.family.resolve(Request("x"), recipe)
    canonical_json([as_plain(recipe), recipe_record(recipe), as_plain(resolved)])
    must_be_finite([recipe, resolved])


def _recipe(kind: str, fields: dict[str, Any], box: Box) -> Recipe:
    if kind == "named":
        return with_sparse(with_cache(find_recipe(fields["name"]), fields["lam"]), fields["budget"])
    if kind == "words":
        use = parse_adapter(fields["adapter"])
        return with_adapters(find_recipe("exact"), [replace(use, file=use.file.replace("inputs/", f"{box.inputs}/"))], fields["words"])
    if kind == "adapters":
        return Recipe(adapters=Adapters((AdapterUse(str(box.inputs / ADAPTER)),), **fields))
    if fields.get("guard") == "<guard>":
        fields["guard"] = Guard()
    part = PARTS[kind][0](**fields)
    if kind == "recipe":
        return part
    if kind in ("sparse", "guard"):
        return Recipe(sparse=part if kind == "sparse" else SparseAttention(0.3, guard=part))
    if kind == "use":
        return Recipe(adapters=Adapters((part,)))
    return Recipe(cache=part) if kind == "cache" else Recipe(savings=part)
