"""Products of the block stack in 8-bit floats (e4m3): weights scaled a column of the output, rows as they come; approximate.

Scales a row and a column are what torch calls row-wise scaling (`torch._scaled_mm`); sums are float32, results bfloat16. The model's
own weights stay where they are, so the format costs a byte a weight on top of them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from videogen.kernels import fused
from videogen.kernels.check import FAILS, relative_l2
from videogen.transforms.scope import Forward, forward_as, once, version_of

LOW, MOST = torch.float8_e4m3fn, 448.0
MULTIPLE = 16  # what the product asks of both widths
CAPABILITY = (8, 9)  # Ada and Hopper; older devices have no such product

Scaled = tuple[torch.Tensor, torch.Tensor]


def quantised(rows: torch.Tensor) -> Scaled:
    """Rows (N, D) as e4m3 (N, D) and their float32 scales (N, 1); the largest of a row becomes 448."""
    wide = rows.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / MOST
    return (wide / scale).clamp(-MOST, MOST).to(LOW), scale


def _rows(given: torch.Tensor) -> Scaled:
    flat = given.reshape(-1, given.shape[-1])
    return fused.quantise(flat) if has_kernel(flat.device, flat.dtype) else quantised(flat)


@cache
def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernel runs there and gives what `quantised` gives; tried once a process."""
    if fused.refusal(device, dtype):
        return False
    rows = torch.randn(9, 200, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)
    try:
        (low, scale), (wanted, wanted_scale) = fused.quantise(rows), quantised(rows)
    except FAILS:
        return False
    return relative_l2(low, wanted) < 1e-3 and relative_l2(scale, wanted_scale) < 1e-6


@dataclass(slots=True)
class Float8Shelf:
    """The scaled weights of one transformer, kept across requests while its weights are the same."""

    key: Any = None
    kept: dict[str, Scaled] = field(default_factory=dict)

    def take(self, transformer: Any) -> dict[str, Scaled]:
        """Every product's weight by module name, made anew where a weight was written to since."""
        linears = dict(products(transformer))
        key = (id(transformer), tuple((id(linear.weight), version_of(linear.weight)) for linear in linears.values()))
        if key != self.key:
            self.kept.clear()
            with torch.no_grad():
                self.kept.update({name: quantised(linear.weight) for name, linear in linears.items()})
            self.key = key
        return self.kept

    @property
    def num_bytes(self) -> int:
        """Memory of the scaled weights and their scales."""
        return sum(part.numel() * part.element_size() for pair in self.kept.values() for part in pair)


def products(transformer: Any) -> Iterator[tuple[str, nn.Linear]]:
    """The linears of the main blocks that carry rows: attention and feed-forward, not modulation, and of Wan's cross-attention not what
    the few rows of text go through."""
    is_wan = not hasattr(transformer, "transformer_blocks")
    for index, block in enumerate(transformer.blocks if is_wan else transformer.transformer_blocks):
        attn, net = (block.attn1, block.ffn.net) if is_wan else (block.attn, block.ff.net)
        across = (("across q", block.attn2.to_q), ("across out", block.attn2.to_out[0])) if is_wan else ()
        for name, linear in (
            ("q", attn.to_q),
            ("k", attn.to_k),
            ("v", attn.to_v),
            ("out", attn.to_out[0]),
            *across,
            ("up", net[0].proj),
            ("down", net[2]),
        ):
            yield f"{index}.{name}", linear


def refusal(transformer: Any, device: torch.device) -> str:
    """Why the block stack cannot multiply so; empty when it can."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"compute capability {torch.cuda.get_device_capability(device)} has no 8-bit product, {CAPABILITY} has"
    if device.type not in ("cuda", "cpu"):
        return f"no 8-bit product on {device.type}"
    if any(getattr(module, "fused_projections", False) for module in transformer.modules()):
        return "projections are fused"
    weights = [linear.weight for _, linear in products(transformer)]
    if any(hasattr(weight, "to_local") for weight in weights):
        return "weights are sharded over ranks"
    odd = {size for weight in weights for size in weight.shape if size % MULTIPLE}
    return f"widths {sorted(odd)} are no multiple of {MULTIPLE}" if odd else ""


def _product(linear: nn.Linear, weight: Scaled, scaled: Callable[[torch.Tensor], Scaled]) -> Callable[[Forward], Forward]:
    low, scale = weight

    def forward(rows: torch.Tensor) -> torch.Tensor:
        left, left_scale = scaled(rows)
        made = torch._scaled_mm(left, low.t(), scale_a=left_scale, scale_b=scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
        made = made if linear.bias is None else made + linear.bias
        return made.view(*rows.shape[:-1], -1).to(rows.dtype)

    return lambda _stock: forward


@contextmanager
def float8_products(transformer: Any, shelf: Float8Shelf) -> Iterator[None]:
    """Inside the scope the block stack multiplies in 8-bit floats; weights, modules and hooks stay as they are."""
    weights, scaled = shelf.take(transformer), once(_rows)  # queries, keys and values scale the same rows once
    with ExitStack() as stack:
        for name, linear in products(transformer):
            stack.enter_context(forward_as(linear, _product(linear, weights[name], scaled)))
        yield
