"""Several recipes opened over one set of weights; knows neither clips nor figures."""

from dataclasses import replace

from videogen.config import Recipe, StepCache
from videogen.load import pick_dtype
from videogen.pipeline import Pipeline, open_pipeline
from videogen.source import ModelSource


def open_arms(model: str | ModelSource, recipes: dict[str, Recipe], device: str) -> dict[str, Pipeline]:
    """A pipeline per recipe, by its name. All share the first one's weights; another dtype needs weights of its own.

    Raises what `open_pipeline` raises.
    """
    arms: dict[str, Pipeline] = {}
    for name, recipe in recipes.items():
        first = next(iter(arms.values()), None)
        if first is not None and pick_dtype(recipe.dtype, first.device) == first.dtype:
            arms[name] = first.sharing(recipe)
        else:
            arms[name] = open_pipeline(model if first is None else first.source, recipe, device=device)
    return arms


def in_full(cached: Pipeline) -> Pipeline:
    """The same weights without the step cache, in the same arithmetic: what `auto` means does not change with a certificate gone."""
    dense = cached.sharing(replace(cached.recipe, name="in full", cache=StepCache()))
    dense.strata, dense.savings = cached.strata, cached.savings
    return dense
