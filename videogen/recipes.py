"""Named recipes as data; the ones that are planned are named so that asking for them gives a true answer."""

from dataclasses import replace

from videogen.config import Recipe, StepCache
from videogen.errors import bad

RECIPES: dict[str, Recipe] = {"exact": Recipe(name="exact")}

PLANNED: dict[str, str] = {
    "careful": "step cache at the strictest certificate",
    "balanced": "step cache and sparse attention",
    "turbo": "few-step adapter",
    "draft": "few-step adapter, step cache and sparse attention",
}


UNCERTIFIED = "+cache"


def with_cache(recipe: Recipe, lam: float) -> Recipe:
    """The recipe with an uncertified step cache, and a name that says so; lambda 0 leaves the recipe as it is.

    Raises RequestError for a lambda that is not a finite number of at least 0.
    """
    cache = StepCache(lam=lam)
    return replace(recipe, name=recipe.name + UNCERTIFIED, cache=cache) if lam else recipe


def find_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of this name; a `Recipe` passes through.

    Raises RequestError for a name that does not exist or is not built yet.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe in RECIPES:
        return RECIPES[recipe]
    if recipe in PLANNED:
        raise bad("recipe", recipe, f"one of {', '.join(RECIPES)}", f"{recipe} ({PLANNED[recipe]}) is not built yet; use exact")
    raise bad("recipe", recipe, f"one of {', '.join(RECIPES)}", "change recipe")
