"""videogen: render clips with open video diffusion models faster, and say what each speed-up costs.

Public names: `open_pipeline`, `render`, `Request`, `Recipe`, `Adapters`, `AdapterUse`, `Result`. Importing this package loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from videogen.config import Adapters, AdapterUse, Recipe, Request
from videogen.result import Result

if TYPE_CHECKING:
    from videogen.pipeline import open_pipeline, render

__version__ = "0.1.0"
__all__ = ["AdapterUse", "Adapters", "Recipe", "Request", "Result", "__version__", "open_pipeline", "render"]


def __getattr__(name: str) -> object:
    """Give `open_pipeline` and `render` on first use, so that `videogen plan` never waits for torch."""
    if name in ("open_pipeline", "render"):
        return getattr(import_module("videogen.pipeline"), name)
    raise AttributeError(f"module 'videogen' has no attribute {name!r}")
