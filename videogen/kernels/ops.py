"""The two implementations of H3's elementwise work under one name each, and which of them a device gets."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from videogen.kernels import definitions, fused


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation; the functions are those of `definitions.py`."""

    name: str
    rms_modulate: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    gated_add: Callable[..., torch.Tensor]
    qk_rotate: Callable[..., torch.Tensor]
    swiglu: Callable[..., torch.Tensor]


TORCH = Ops("torch", definitions.rms_modulate, definitions.rms_norm, definitions.gated_add, definitions.qk_rotate, definitions.swiglu)
FUSED = Ops("triton", fused.rms_modulate, fused.rms_norm, fused.gated_add, fused.qk_rotate, fused.swiglu)
