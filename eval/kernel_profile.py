"""Which kernels one call spends its time in: torch's profiler, summed by kernel and by kind. Its own cost is in the figures."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

TOP = 40
_KINDS = (  # the first pattern found in a kernel's name, in lower case, names its kind
    ("attention", r"flash|fmha|sdpa|attention|mha_"),
    ("convolution", r"conv|winograd|im2col|vol2col"),
    ("gemm", r"gemm|nvjet|cutlass|cublas|xmma|splitk|addmm|::mm$|::bmm$|linear"),
    ("norm", r"rms_?norm|layer_?norm|group_?norm|batch_?norm"),
    ("copy, cat, index", r"memcpy|memset|copy|\bcat|catarray|index|gather|scatter|transpose|_to_copy"),
    ("reduce", r"reduce|softmax|sum|mean"),
    ("elementwise", r"elementwise|vectorized|unrolled|foreach|pointwise|::mul|::add|::silu|::div"),
)


def kind_of(kernel: str) -> str:
    """The kind of a kernel (or, on the CPU, of an operator) by its name."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, kernel.lower())), "other")


def profile_call(call: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Run `call` once under the profiler: milliseconds by kind, the top kernels, and on a GPU the operators that launched them."""
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiler:
        call()
        if is_cuda:
            torch.cuda.synchronize(device)
    events = [event for event in profiler.key_averages() if not getattr(event, "is_user_annotation", False)]
    on_device = [event for event in events if (event.device_type == DeviceType.CUDA) is is_cuda]
    kernels = _rows(on_device, "self_device_time_total" if is_cuda else "self_cpu_time_total")
    launchers = [event for event in events if event.device_type == DeviceType.CPU and "::" in str(event.key)]
    return {
        "device": device.type,
        "total_ms": sum(row["ms"] for row in kernels),
        "kinds": _kinds(kernels),
        "kernels": kernels[:TOP],
        "operators": _rows(launchers, "self_device_time_total")[:TOP] if is_cuda else [],
    }


def _rows(events: list[FunctionEventAvg], attribute: str) -> list[dict[str, Any]]:
    rows = [{"name": str(e.key), "ms": getattr(e, attribute) / 1e3, "calls": e.count, "kind": kind_of(str(e.key))} for e in events]
    return sorted((row for row in rows if row["ms"] > 0), key=lambda row: -row["ms"])


def _kinds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    total = sum(row["ms"] for row in rows)
    summed: dict[str, dict[str, Any]] = {}
    for row in rows:
        kept = summed.setdefault(row["kind"], {"kind": row["kind"], "ms": 0.0, "calls": 0})
        kept["ms"] += row["ms"]
        kept["calls"] += row["calls"]
    return sorted(({**row, "share": row["ms"] / total} for row in summed.values()), key=lambda row: -row["ms"])


def as_text(found: dict[str, Any]) -> str:
    """The profile as a table for a terminal: kinds first, then the kernels."""
    lines = [f"kernels of one call ({found['device']}): {found['total_ms']:.1f} ms", ""]
    lines += [f"{row['ms']:10.1f} ms {row['share']:6.1%} {row['calls']:7d}  {row['kind']}" for row in found["kinds"]]
    for title, rows in (("kernels", found["kernels"]), ("operators that launched them", found["operators"])):
        if rows:
            lines += ["", title, *(f"{row['ms']:10.2f} ms {row['calls']:7d}  {row['kind']:<18} {row['name'][:150]}" for row in rows)]
    return "\n".join(lines) + "\n"
