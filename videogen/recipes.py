"""Named recipes as data; the ones that are planned are named so that asking for them gives a true answer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from caches.certificate import Certificate
from videogen.attention.options import SparseAttention
from videogen.attention.select import MIN_ROWS
from videogen.certificates import open_certificate
from videogen.config import EXPERTS, SHIPPED, Adapters, AdapterUse, Recipe, StepCache
from videogen.errors import bad
from videogen.priors import CAREFUL_START, MeasuredPrior, with_prior
from videogen.transforms.options import Savings

EXACT = Savings(  # every part that is bit-identical
    adaln_tables=True,
    refined_text=True,
    rope_tables=True,
    text_cut=True,
    lean_loop=True,
    encodings=64,
    decode_batch=1,
)
CLOSE = replace(EXACT, decode_batch=14, kernels=True, attention="auto", matmul="auto")

TURBO = Recipe(name="turbo", steps=4, savings=CLOSE, adapters=Adapters((AdapterUse(f"{SHIPPED}turbo4"),), fuse=True))

RECIPES: dict[str, Recipe] = {
    "exact": Recipe(name="exact", savings=CLOSE),
    "plain": Recipe(name="plain"),
    "float8": Recipe(name="float8", savings=replace(CLOSE, matmul="float8")),
    "turbo": TURBO,
    "turbo8": Recipe(name="turbo8", steps=8, savings=CLOSE, adapters=Adapters((AdapterUse(f"{SHIPPED}turbo8"),), fuse=True)),
    "draft": replace(TURBO, name="draft", sparse=SparseAttention(budget=0.25, min_rows=MIN_ROWS)),
}

CERTIFICATES = Path(__file__).parent / "pocket" / "certificates"  # NAME-*.json make the recipe NAME available

PLANNED: dict[str, str] = {
    "careful": "step cache at the strictest certificate",
    "balanced": "step cache at a certificate with wider tolerances",
}


UNCERTIFIED, SPARSE, ADAPTED = "+cache", "+sparse", "+lora"


def with_cache(recipe: Recipe, lam: float, prior: MeasuredPrior | None = None) -> Recipe:
    """The recipe with an uncertified step cache, by a prior where there is one, and a name that says so; lambda 0 leaves it as it is.

    Raises RequestError for a lambda that is not a finite number of at least 0.
    """
    cache = StepCache(lam=lam)
    if prior is not None:
        cache = replace(with_prior(prior.prior, CAREFUL_START), lam=lam, prior_file=prior.file, prior_of=prior.of)
    return replace(recipe, name=recipe.name + UNCERTIFIED, cache=cache) if lam else recipe


def with_sparse(recipe: Recipe, budget: float) -> Recipe:
    """The recipe with sparse attention at this budget, and a name that says so.

    Raises RequestError for a budget that is no share above 0.
    """
    return replace(recipe, name=recipe.name + SPARSE, sparse=replace(recipe.sparse, budget=budget))


def parse_adapter(text: str) -> AdapterUse:
    """`FILE`, `FILE:STRENGTH`, and either with `:high`, `:low` or `:both` behind it; any other colon belongs to the name."""
    name, _, expert = text.rpartition(":")
    if name and expert in EXPERTS:
        return replace(parse_adapter(name), expert=expert)
    name, separator, tail = text.rpartition(":")
    try:
        strength = float(tail) if separator and name else None
    except ValueError:
        strength = None
    return AdapterUse(text) if strength is None else AdapterUse(name, strength)


def with_adapters(recipe: Recipe, uses: Sequence[AdapterUse], words: Sequence[str] = (), *, fuse: bool = False) -> Recipe:
    """The recipe with these adapters beside its own; `words` are `apply`, `ignore` and FIELD=VALUE, about all of them.

    Without any adapter the recipe stays as it is. Raises RequestError for words or `fuse` that then have no adapter.
    """
    own = recipe.adapters
    if not uses and not own.uses:
        if words or fuse:
            raise bad("--lora-contract or --lora-fuse", [*words], "an adapter it is about", "add --lora FILE")
        return recipe
    modes = {word for word in words if word in ("apply", "ignore")}
    if len(modes) > 1:
        raise bad("adapter contract", "apply and ignore", "one of the two", "change --lora-contract")
    adapters = Adapters(
        uses=(*own.uses, *uses),
        contract=modes.pop() if modes else own.contract,
        stated=(*own.stated, *(word for word in words if word not in ("apply", "ignore"))),
        fuse=fuse or own.fuse,
    )
    return replace(recipe, name=recipe.name + (ADAPTED if uses else ""), adapters=adapters)


def shipped_certificates(recipe: str) -> tuple[Certificate, ...]:
    """The certificates of a recipe that is made of them, one a stratum; none before it is calibrated."""
    return tuple(open_certificate(path) for path in sorted(CERTIFICATES.glob(f"{recipe}-*.json"))) if recipe in PLANNED else ()


def unavailable() -> dict[str, str]:
    """The planned recipes that cannot be used yet, and what they will be."""
    return {name: what for name, what in PLANNED.items() if not any(CERTIFICATES.glob(f"{name}-*.json"))}


def find_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of this name; a `Recipe` passes through.

    Raises RequestError for a name that does not exist or is not built yet.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise bad("recipe", recipe, "a name, or a Recipe", "change recipe")
    if recipe in RECIPES:
        return RECIPES[recipe]
    if certificates := shipped_certificates(recipe):
        return replace(RECIPES["exact"], name=recipe, cache=StepCache(certificates=certificates, on_mismatch="compute"))
    known = f"one of {', '.join([*RECIPES, *(name for name in PLANNED if name not in unavailable())])}"
    if recipe in PLANNED:
        raise bad("recipe", recipe, known, f"{recipe} ({PLANNED[recipe]}) is not built yet; use exact")
    raise bad("recipe", recipe, known, "change recipe")
