"""What a recipe's savings come to on one device: `auto` becomes a value, with the reason wherever a switch cannot be on."""

from collections.abc import Collection
from dataclasses import replace

import torch

from videogen.config import Savings
from videogen.errors import bad
from videogen.kernels.check import fault
from videogen.transforms.cpu_bfloat16 import has_fast_bfloat16

Reasons = dict[str, str]

PRODUCTS, KERNELS = "bfloat16 products", "fused kernels"


def settled(savings: Savings, device: torch.device, dtype: torch.dtype, certified: Collection[str] = ()) -> tuple[Savings, Reasons]:
    """The savings without `auto` and without what this device lacks, and why, by switch.

    `certified` are the arithmetics that the recipe's certificates are for: what `auto` means must not leave them.
    Raises RequestError when bfloat16 products are asked for by name where weights are not float32 on a CPU.
    """
    reasons: Reasons = {}
    matmul = savings.matmul
    on_cpu = device.type == "cpu" and dtype == torch.float32
    if matmul == "bfloat16" and not on_cpu:
        raise bad("savings matmul", f"bfloat16 with {dtype} on {device.type}", "float32 weights on a CPU", "use auto")
    if matmul == "auto":
        matmul = "bfloat16" if on_cpu and has_fast_bfloat16() else "model"
        if on_cpu and matmul == "model":
            reasons["matmul"] = "model: this CPU has no bfloat16 instructions"
        if matmul == "bfloat16" and _is_uncovered(PRODUCTS, certified):
            matmul, reasons["matmul"] = "model", "model: as the certificate was calibrated"
    if savings.park_adaln and device.type == "cpu":
        savings = replace(savings, park_adaln=False)
        reasons["park_adaln"] = "off: the weights are in host memory already"
    reason = "the certificate was calibrated without" if _is_uncovered(KERNELS, certified) else fault(device, dtype)
    if savings.kernels and reason:
        savings, reasons["kernels"] = replace(savings, kernels=False), f"off: {reason}"
    if device.type == "cpu" and savings.decode_batch > 1:
        savings = replace(savings, decode_batch=1)  # a CPU is busy with one tile
    return replace(savings, matmul=matmul), reasons


def _is_uncovered(part: str, certified: Collection[str]) -> bool:
    return bool(certified) and not any(part in each for each in certified)


def arithmetic(savings: Savings, dtype: torch.dtype) -> str:
    """The number format of weights, and what else is computed differently than they ask for: what certificates depend on."""
    parts = {str(dtype).removeprefix("torch."): True, PRODUCTS: savings.matmul == "bfloat16", KERNELS: savings.kernels}
    return ", ".join(part for part, is_so in parts.items() if is_so)
