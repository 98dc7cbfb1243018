"""Launches the Triton kernels; each function takes what its namesake in `definitions.py` takes and gives the same, rounded once."""

import torch

from videogen.kernels import triton_kernels

_ROW, _STRETCH, _HEADS = 8, 4, 4  # warps of a program: a whole row, a stretch of one, a few heads
_STRETCH_SIZE, _HEADS_SIZE = 2048, 8


def refusal(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels cannot run there; empty when they can."""
    if not triton_kernels.IS_AVAILABLE:
        return "Triton is not installed"
    if device.type != "cuda":
        return f"Triton has no {device.type} back end here"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{str(dtype).removeprefix('torch.')} is not a format the kernels take"
    return ""


def _power(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def rms_modulate(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor, shift: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """RMSNorm and modulation in one pass over x (B, S, D)."""
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    batch, seq, width = x.shape
    triton_kernels.rms_modulate[(batch * seq,)](
        x, weight, *_tables(scale, shift), rows, out, seq, width, eps, scale.stride(0), BLOCK=_power(width), num_warps=_ROW
    )  # fmt: skip
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """RMSNorm of x (B, S, D) and its rounding to `dtype` in one pass."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=dtype, device=x.device)
    width = x.shape[-1]
    triton_kernels.rms_norm[(x.numel() // width,)](x, weight, out, width, eps, BLOCK=_power(width), num_warps=_ROW)
    return out


def gated_add(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Gate and residual in one pass over x and y (B, S, D)."""
    x, y, out = x.contiguous(), y.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    batch, seq, width = x.shape
    block = min(_STRETCH_SIZE, _power(width))
    triton_kernels.gated_add[(batch * seq, -(-width // block))](
        x, y, *_tables(gate), rows, out, seq, width, gate.stride(0), BLOCK=block, num_warps=_STRETCH
    )  # fmt: skip
    return out


def qk_rotate(x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Head norm and rotation in one pass over x (B, S, H, D); x may be a slice of a packed projection."""
    batch, seq, heads, width = x.shape
    if x.stride(3) != 1 or x.stride(2) != width or (batch > 1 and x.stride(0) != seq * x.stride(1)):
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    triton_kernels.qk_rotate[(batch * seq, -(-heads // _HEADS_SIZE))](
        x, weight, cos, sin, out, seq, heads, cos.shape[-1], eps, x.stride(1), cos.stride(0),
        WIDTH=width, BLOCK_H=_HEADS_SIZE, BLOCK_D=_power(width), num_warps=_HEADS,
    )  # fmt: skip
    return out


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Both halves in one pass over (..., 2 F)."""
    x, width = x.contiguous(), x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    block = min(_STRETCH_SIZE, _power(width))
    triton_kernels.swiglu[(out.numel() // width, -(-width // block))](x, out, width, BLOCK=block, num_warps=_STRETCH)
    return out


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (N, D) as e4m3 and their float32 scales (N, 1) in one pass; the largest of a row becomes 448."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    triton_kernels.quantise[(len(x),)](x, out, scale, x.shape[1], BLOCK=_power(x.shape[1]), num_warps=_ROW)
    return out, scale


def _tables(*tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tables of one row stride; theirs are slices of one projection."""
    if any(table.stride(1) != 1 or table.stride(0) != tables[0].stride(0) for table in tables):
        raise ValueError(
            f"tables: got strides {[table.stride() for table in tables]}, expected rows of one stride; pass slices of one tensor"
        )
    return tables
