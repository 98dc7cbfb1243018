"""What a recipe's savings come to on one device: `auto` becomes a value, with the reason wherever a switch cannot be on."""

from collections.abc import Collection
from dataclasses import replace

import torch

from videogen.device_profile import DeviceProfile
from videogen.errors import bad
from videogen.kernels.check import fault
from videogen.transforms.cpu_bfloat16 import has_fast_bfloat16
from videogen.transforms.options import Savings

Reasons = dict[str, str]

PRODUCTS, EIGHT, KERNELS = "bfloat16 products", "8-bit products", "fused kernels"


def settled(
    savings: Savings,
    device: torch.device,
    dtype: torch.dtype,
    certified: Collection[str] = (),
    profile: DeviceProfile | None = None,
) -> tuple[Savings, Reasons]:
    """The savings without `auto` and without what this device lacks, and why, by switch.

    `certified` are the arithmetics that the recipe's certificates are for: what `auto` means must not leave them. `profile` says
    what was found fastest here. Raises RequestError when bfloat16 products are asked for by name where weights are not float32
    on a CPU.
    """
    reasons: Reasons = {}
    matmul, reasons["matmul"] = _matmul(savings.matmul, device, dtype, certified, profile)
    named = None if savings.attention in ("model", "auto") else savings.attention
    attention = profile.attention if profile and savings.attention == "auto" else named
    if attention and not named and _is_uncovered(attention, certified):
        attention, reasons["attention"] = None, "model: as the certificate was calibrated"
    if savings.park_adaln and device.type == "cpu":
        savings = replace(savings, park_adaln=False)
        reasons["park_adaln"] = "off: the weights are in host memory already"
    if savings.kernels:
        reason = "the certificate was calibrated without" if _is_uncovered(KERNELS, certified) else fault(device, dtype)
        if reason:
            savings, reasons["kernels"] = replace(savings, kernels=False), f"off: {reason}"
    if device.type == "cpu" and savings.decode_batch > 1:
        savings = replace(savings, decode_batch=1)  # a CPU is busy with one tile
    used = replace(savings, matmul=matmul, attention=attention or "model")
    return used, {name: reason for name, reason in reasons.items() if reason}


def _matmul(
    asked: str, device: torch.device, dtype: torch.dtype, certified: Collection[str], profile: DeviceProfile | None
) -> tuple[str, str]:
    """`model`, `bfloat16` or `float8`, and why it is not what `auto` hoped for."""
    is_possible = device.type == "cpu" and dtype == torch.float32
    if asked == "bfloat16" and not is_possible:
        raise bad("savings matmul", f"bfloat16 with {dtype} on {device.type}", "float32 weights on a CPU", "use auto")
    if asked != "auto" or not is_possible:
        return ("model" if asked == "auto" else asked), ""
    if _is_uncovered(PRODUCTS, certified):
        return "model", "model: as the certificate was calibrated"
    if profile is not None and profile.matmul is not None:
        return profile.matmul, "" if profile.matmul == "bfloat16" else "model: faster on this device, as doctor measured"
    return ("bfloat16", "") if has_fast_bfloat16() else ("model", "model: this CPU has no bfloat16 instructions")


def _is_uncovered(part: str, certified: Collection[str]) -> bool:
    return bool(certified) and not any(part in each for each in certified)


def arithmetic(savings: Savings, dtype: torch.dtype) -> str:
    """The number format of weights, and what else is computed differently than they ask for: what certificates depend on."""
    parts = {
        str(dtype).removeprefix("torch."): True,
        PRODUCTS: savings.matmul == "bfloat16",
        EIGHT: savings.matmul == "float8",
        KERNELS: savings.kernels,
    }
    parts[savings.attention] = savings.attention != "model"
    return ", ".join(part for part, is_so in parts.items() if is_so)
