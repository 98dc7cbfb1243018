"""Wan's elementwise work: what it is in torch, in the stock model's own order of operations, and the same through Triton in one pass.

Letters: B batch, S rows, H heads, D channels. Tables (scale, shift, gate) are float32, (B, 1, D) for all rows or (B, S, D).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from videogen.kernels import fused, wan_triton
from videogen.kernels.check import BOUNDS, FAILS, relative_l2

_ROW, _STRETCH, _STRETCH_SIZE = 8, 4, 2048  # warps of a program: a whole row, a stretch of one


@dataclass(frozen=True, slots=True)
class WanOps:
    """One implementation; the functions are those below."""

    name: str
    layer_modulate: Callable[..., torch.Tensor]
    layer_norm: Callable[..., torch.Tensor]
    gate_add: Callable[..., torch.Tensor]
    norm_rotate: Callable[..., torch.Tensor]


def layer_modulate(x: torch.Tensor, eps: float, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Layer norm in float32, scaled and shifted: x (B, S, D)."""
    return (functional.layer_norm(x.float(), x.shape[-1:], None, None, eps) * (1 + scale) + shift).type_as(x)


def layer_norm(x: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Layer norm in float32 with weight and bias (D,): x (B, S, D)."""
    return functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).type_as(x)


def gate_add(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The residual and a gated branch, added in float32: x, y (B, S, D)."""
    return (x.float() + y * gate).type_as(x)


def norm_rotate(x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RMSNorm over all heads, then pairs of channels turned: x (B, S, H D), cos and sin (1, S, 1, D), to (B, S, H, D)."""
    heads = functional.rms_norm(x, x.shape[-1:], weight, eps).view(*x.shape[:2], -1, cos.shape[-1])
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    even, odd = heads[..., 0::2], heads[..., 1::2]
    out = torch.empty_like(heads)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def _block(width: int) -> int:
    return 1 << max(width - 1, 0).bit_length()


def _strides(table: torch.Tensor) -> tuple[int, int]:
    """From a batch to the next and from a row to the next; 0 where one row stands for all."""
    if table.stride(-1) != 1:
        raise ValueError(f"table: got strides {table.stride()}, expected channels side by side; pass a slice of one projection")
    return table.stride(0) if table.shape[0] > 1 else 0, table.stride(1) if table.shape[1] > 1 else 0


def _normed(x: torch.Tensor, eps: float, base: float, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    batch, seq, width = x.shape
    strides = _strides(scale)
    if _strides(shift) != strides:
        raise ValueError(f"tables: got strides {scale.stride()} and {shift.stride()}, expected equal ones; pass slices of one tensor")
    wan_triton.layer_modulate[(batch * seq,)](
        x, scale, shift, out, seq, width, eps, base, *strides, BLOCK=_block(width), num_warps=_ROW
    )  # fmt: skip
    return out


def _fused_layer_modulate(x: torch.Tensor, eps: float, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return _normed(x, eps, 1.0, scale, shift)


def _fused_layer_norm(x: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _normed(x, eps, 0.0, weight[None, None], bias[None, None])


def _fused_gate_add(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    x, y, out = x.contiguous(), y.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    batch, seq, width = x.shape
    block = min(_STRETCH_SIZE, _block(width))
    wan_triton.gate_add[(batch * seq, -(-width // block))](
        x, y, gate, out, seq, width, *_strides(gate), BLOCK=block, num_warps=_STRETCH
    )  # fmt: skip
    return out


def _fused_norm_rotate(x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    batch, seq, width = x.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    wan_triton.norm_rotate[(batch * seq,)](
        x, weight, cos, sin, out, seq, width, cos.shape[-1], eps, BLOCK=_block(width), num_warps=_ROW
    )  # fmt: skip
    return out.view(batch, seq, -1, cos.shape[-1])


TORCH = WanOps("torch", layer_modulate, layer_norm, gate_add, norm_rotate)
FUSED = WanOps("triton", _fused_layer_modulate, _fused_layer_norm, _fused_gate_add, _fused_norm_rotate)


def arguments(
    dtype: torch.dtype, device: torch.device, *, batch: int = 1, rows: int = 37, heads: int = 9, width: int = 24
) -> dict[str, tuple[Any, ...]]:
    """Random operands of every operation, laid out as the model's; rows that share a table, and rows with tables of their own."""
    rng = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng, device=device)

    all_heads = heads * width
    x, y = (draw(batch, rows, all_heads).to(dtype) for _ in "xy")
    one = draw(batch, 6, all_heads).chunk(6, dim=1)
    own = [each.squeeze(2) for each in draw(batch, rows, 6, all_heads).chunk(6, dim=2)]
    weight, bias = (draw(all_heads).to(dtype) for _ in "wb")
    angles = draw(1, rows, 1, width // 2).repeat_interleave(2, -1) * 9
    return {
        "layer_modulate": (x, 1e-6, one[1], one[0]),
        "layer_modulate by row": (x, 1e-6, own[1], own[0]),
        "layer_norm": (x, 1e-6, weight, bias),
        "gate_add": (x, y, one[2]),
        "gate_add by row": (x, y, own[2]),
        "norm_rotate": (x, weight, 1e-6, angles.cos(), angles.sin()),
    }


def exact(name: str, given: tuple[Any, ...]) -> torch.Tensor:
    """The definition in float32."""
    widened = [each.float() if torch.is_tensor(each) else each for each in given]
    result: torch.Tensor = getattr(TORCH, name.split()[0])(*widened)
    return result


@cache
def fault(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels must not be used there; empty when each one ran and is its definition within `BOUNDS`. Run once a process."""
    if reason := fused.refusal(device, dtype):
        return reason
    for name, given in arguments(dtype, device).items():
        try:
            apart = relative_l2(getattr(FUSED, name.split()[0])(*given), exact(name, given))
        except FAILS as error:
            return f"{name} failed: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:160]}"
        if not apart <= BOUNDS[dtype]:
            return f"{name} is {apart:.1e} from its definition, above {BOUNDS[dtype]:.0e}"
    return ""
