"""What an adapter is matched against: a model's parameter names, shapes and heads; knows nothing of files."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Target:
    """Names and shapes of a model. `head_dims` maps an attention module to the width of one of its heads."""

    shapes: Mapping[str, tuple[int, ...]]
    linears: frozenset[str]
    head_dims: Mapping[str, int]

    def rows(self, module: str) -> int:
        """Output rows of a module's weight."""
        return self.shapes[f"{module}.weight"][0]


def target_of(model: nn.Module) -> Target:
    """The model's own names and shapes; works on the meta device, where no weight exists."""
    linears = frozenset(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    heads = {name: getattr(module, "head_dim", None) for name, module in model.named_modules()}
    return Target(
        shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        linears=linears,
        head_dims={name: width for name, width in heads.items() if isinstance(width, int)},
    )
