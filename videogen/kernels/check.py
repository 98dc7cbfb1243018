"""Whether the kernels are right on a device: each against its definition in float32, at shapes with nothing round about them."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from videogen.kernels import definitions, fused, triton_kernels
from videogen.kernels.ops import FUSED

NAMES = ("rms_modulate", "rms_norm", "gated_add", "qk_rotate", "swiglu")
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # relative L2: one rounding, and a few of the inputs' own
FAILS: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, OSError, AttributeError, *triton_kernels.ERRORS)

Arguments = dict[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one block's operands: batch, packed rows, channels, heads and their width, rotated channels, feed-forward width."""

    batch: int = 1
    rows: int = 37
    width: int = 200
    heads: int = 9
    head_width: int = 24
    rotated: int = 18
    ffn: int = 300
    timesteps: int = 2


def arguments(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Arguments:
    """Random operands of every operation, laid out as the model's: tables and heads are slices of one projection each."""
    rng = torch.Generator(device).manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng, device=device).to(dtype)

    tables = draw(3 * shape.timesteps, 6 * shape.width).chunk(6, dim=-1)
    rows = torch.arange(shape.rows, device=device) % (3 * shape.timesteps)
    angles = torch.rand(shape.rows, shape.rotated // 2, generator=rng, device=device).repeat(1, 2) * 9
    packed = draw(shape.batch, shape.rows, 3 * shape.heads * shape.head_width).chunk(3, dim=-1)[1]
    heads = packed.view(shape.batch, shape.rows, shape.heads, shape.head_width)
    x, y = draw(shape.batch, shape.rows, shape.width), draw(shape.batch, shape.rows, shape.width)
    return {
        "rms_modulate": (x, draw(shape.width), 1e-5, tables[1], tables[0], rows),
        "rms_norm": (x.float(), draw(shape.width).float(), 1e-5, dtype),
        "gated_add": (x, y, tables[2], rows),
        "qk_rotate": (heads, draw(shape.head_width), 1e-5, angles.cos(), angles.sin()),
        "swiglu": (draw(shape.batch, shape.rows, 2 * shape.ffn),),
    }


def exact(name: str, given: tuple[Any, ...]) -> torch.Tensor:
    """The definition in float32."""
    widened = [each.float() if torch.is_tensor(each) and each.is_floating_point() else each for each in given]
    widened = [torch.float32 if isinstance(each, torch.dtype) else each for each in widened]
    result: torch.Tensor = getattr(definitions, name)(*widened)
    return result


def relative_l2(new: torch.Tensor, old: torch.Tensor) -> float:
    """Distance of `new` from `old`, as a share of `old`."""
    return float((new.float() - old.float()).norm() / old.float().norm())


@cache
def fault(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels must not be used there; empty when each one ran and is its definition within `BOUNDS`. Run once a process."""
    if reason := fused.refusal(device, dtype):
        return reason
    for name, given in arguments(Shape(), dtype, device).items():
        try:
            apart = relative_l2(getattr(FUSED, name)(*given), exact(name, given))
        except FAILS as error:
            return f"{name} failed: {type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"
        if not apart <= BOUNDS[dtype]:
            return f"{name} is {apart:.1e} from its definition, above {BOUNDS[dtype]:.0e}"
    return ""
