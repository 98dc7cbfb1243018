"""What the fused kernels compute, in torch, in the stock model's own order of operations: the fall-back and the reference.

Letters: B batch, S packed rows, H heads, D channels, F feed-forward width, R table rows (a timestep and modality each).
"""

import torch
from torch.nn import functional


def rms_modulate(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor, shift: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """RMSNorm, then each row scaled and shifted by its table row: x (B, S, D), scale and shift (R, D), rows (S,)."""
    normed = functional.rms_norm(x, x.shape[-1:], weight, eps)
    return normed * (1.0 + scale.index_select(0, rows)) + shift.index_select(0, rows)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """RMSNorm of x (B, S, D) in its own format, handed over in another."""
    return functional.rms_norm(x, x.shape[-1:], weight, eps).to(dtype)


def gated_add(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The residual and a branch gated by its table row: x, y (B, S, D), gate (R, D), rows (S,)."""
    return x + gate.index_select(0, rows) * y


def qk_rotate(x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RMSNorm of every head, its leading channels rotated (halves, not pairs): x (B, S, H, D), cos and sin (S, rotated)."""
    normed = functional.rms_norm(x, x.shape[-1:], weight, eps)
    rotated, passed = normed[..., : cos.shape[-1]], normed[..., cos.shape[-1] :]
    cos, sin = (part.to(x.dtype)[None, :, None, :] for part in (cos, sin))
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return torch.cat((rotated * cos + turned * sin, passed), dim=-1)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """The first half times the SiLU of the second: (..., 2 F) to (..., F)."""
    hidden, gate = x.chunk(2, dim=-1)
    return hidden * functional.silu(gate)
