"""What a recipe's savings come to on one device: `auto` becomes a value, with the reason wherever a switch cannot be on."""

from collections.abc import Collection
from dataclasses import replace
from functools import cache

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _check_attention_backend_requirements, dispatch_attention_fn

from videogen.device_profile import DeviceProfile, Winners
from videogen.errors import bad
from videogen.kernels.check import FAILS, fault
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
    rows: int | None = None,
) -> tuple[Savings, Reasons]:
    """The savings without `auto` and without what this device lacks, and why, by switch.

    `certified` are the arithmetics that the recipe's certificates are for: what `auto` means must not leave them. `profile` says
    what was found fastest here; it is used for a request of so many packed `rows`, and for none where they are not known. Raises
    RequestError when bfloat16 products are asked for by name where weights are not float32 on a CPU.
    """
    reasons: Reasons = {}
    found, why = _measured(profile, dtype, rows)
    matmul, reasons["matmul"] = _matmul(savings.matmul, device, dtype, certified, found, why)
    attention = savings.attention
    if attention == "auto":
        attention, reasons["attention"] = _attention(device, dtype, certified, found, why)
    if savings.park_adaln and device.type == "cpu":
        savings = replace(savings, park_adaln=False)
        reasons["park_adaln"] = "off: the weights are in host memory already"
    if savings.kernels:
        reason = "the certificate was calibrated without" if _is_uncovered(KERNELS, certified) else fault(device, dtype)
        if reason:
            savings, reasons["kernels"] = replace(savings, kernels=False), f"off: {reason}"
    if device.type == "cpu" and savings.decode_batch > 1:
        savings = replace(savings, decode_batch=1)  # a CPU is busy with one tile
    used = replace(savings, matmul=matmul, attention=attention)
    return used, {name: reason for name, reason in reasons.items() if reason}


def _measured(profile: DeviceProfile | None, dtype: torch.dtype, rows: int | None) -> tuple[Winners | None, str]:
    """What was fastest for such a request; else why nothing is known of it, empty where nothing was measured here at all."""
    if profile is None:
        return None, ""
    if rows is None:
        return None, "a device profile is used by a request's rows, not yet known"
    name = str(dtype).removeprefix("torch.")
    found = profile.at(name, rows)
    return found, "" if found else f"the device profile has nothing near {rows} rows in {name}"


def _attention(device: torch.device, dtype: torch.dtype, certified: Collection[str], found: Winners | None, why: str) -> tuple[str, str]:
    """What `auto` attends with, and why that is the model's own where it is."""
    if found is None or found.attention is None:
        return "model", f"model: {why}" if why else ""
    if _is_uncovered(found.attention, certified):
        return "model", "model: as the certificate was calibrated"
    if reason := backend_fault(found.attention, device, dtype):
        return "model", f"model: the device profile names {found.attention}, {reason}"
    return found.attention, ""


@cache
def backend_fault(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why diffusers cannot attend through this back end there; empty when it did, for a few rows. Tried once a process."""
    if backend.endswith("_hub"):
        return "which would be downloaded"
    try:
        name = AttentionBackendName(backend)
        _check_attention_backend_requirements(name)
        few = torch.ones(1, 16, 2, 64, device=device, dtype=dtype)
        dispatch_attention_fn(few, few, few, backend=name)
    except FAILS as error:
        return f"which is not to be had: {(str(error).strip().splitlines() or [type(error).__name__])[0][:120]}"
    return ""


def _matmul(
    asked: str, device: torch.device, dtype: torch.dtype, certified: Collection[str], found: Winners | None, why: str
) -> tuple[str, str]:
    """`model`, `bfloat16` or `float8`, and why it is not what `auto` hoped for."""
    is_possible = device.type == "cpu" and dtype == torch.float32
    if asked == "bfloat16" and not is_possible:
        raise bad("savings matmul", f"bfloat16 with {dtype} on {device.type}", "float32 weights on a CPU", "use auto")
    if asked != "auto" or not is_possible:
        return ("model" if asked == "auto" else asked), ""
    if _is_uncovered(PRODUCTS, certified):
        return "model", "model: as the certificate was calibrated"
    if found is not None and found.matmul is not None:
        return found.matmul, "" if found.matmul == "bfloat16" else "model: faster for so many rows on this device, as doctor measured"
    if has_fast_bfloat16():
        return "bfloat16", f"bfloat16: {why}" if why else ""
    return "model", "; ".join(each for each in ("model: this CPU has no bfloat16 instructions", why) if each)


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
