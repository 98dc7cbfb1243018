"""What is asked for by name and does not exist for a model's family: refused before a weight loads; imports no torch."""

from typing import Any

from videogen.config import Recipe
from videogen.errors import bad
from videogen.source import ModelSource


def check_limits(source: ModelSource, family: Any, recipe: Recipe, weights: str = "whole") -> None:
    """Raises RequestError for a recipe, or a place of the weights, that the family does not have; what is left to `auto` is told in the
    record instead."""
    if weights == "offload-idle" and not (source.is_wan and family.geometry.has_two_experts):
        raise bad("--weights", weights, "a model of two experts (Wan 2.2 A14B)", "use --weights offload")
    if weights in ("fsdp", "offload", "offload-idle") and recipe.savings.matmul == "float8":
        advice = "choose another recipe or --weights"
        raise bad(f"--weights {weights}", "float8 products", "products in the weights' own format", advice)
    if weights == "fsdp" and recipe.adapters.fuse:
        raise bad("--weights fsdp", "adapters written into the weights", "adapters beside them", "drop --lora-fuse")
    if not source.is_wan:
        return
    if weights == "parked":
        raise bad("--weights", weights, "another place: Wan has no AdaLN projections to park", "use --weights offload or offload-idle")
    if recipe.savings.matmul == "bfloat16":
        raise bad("savings matmul", recipe.savings.matmul, "model, auto or float8 for Wan", "choose another recipe")
    if recipe.cache.prior is not None:
        raise bad("cache prior", "one", "none for Wan: the two streams of its guidance have no measured prior", "use --cache-lambda")
