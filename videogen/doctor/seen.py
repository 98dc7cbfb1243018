"""What a call really runs: kernel and operator names from torch's profiler, and the masks that reach attention."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from videogen.doctor.rules import Call

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@contextmanager
def _without_banner() -> Iterator[None]:
    """Torch 2.14's profiler writes its comings and goings to the error stream, past Python; they go nowhere inside the scope."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def see(call: Callable[[], object], device: torch.device) -> Call:
    """Run `call` under the profiler: its kernels on a GPU (then the operators that launched them), its operators on a CPU."""
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with _without_banner(), profile(activities=activities, record_shapes=True) as profiler:
        call()
        if is_cuda:
            torch.cuda.synchronize(device)
    events = [event for event in profiler.key_averages() if not getattr(event, "is_user_annotation", False)]
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    operators = [event for event in events if event.device_type == DeviceType.CPU]
    timed = kernels if is_cuda else operators
    attribute = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    rows = sorted(((str(event.key), getattr(event, attribute) / 1e3) for event in timed), key=lambda row: -row[1])
    launchers = [(str(event.key), 0.0) for event in operators] if is_cuda else []
    return Call((*rows, *launchers), sum(ms for _, ms in rows), _products(profiler))


def _products(profiler: profile) -> frozenset[str]:
    """The formats of matrix products' operands; the profiler's own events do not carry them, those it was made from do."""
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    events = results.events() if results is not None else ()
    return frozenset(kind for event in events if event.name() in _PRODUCTS for kind in event.dtypes()[:2] if kind)


@contextmanager
def watching_masks() -> Iterator[list[str]]:
    """The mask of every scaled_dot_product_attention inside the scope: none, all true, or partial. Reading one waits for the device."""
    stock, seen = functional.scaled_dot_product_attention, list[str]()

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        if mask is None:
            seen.append("none")
        else:
            lets_all = bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())
            seen.append("all true" if lets_all else "partial")
        result: torch.Tensor = stock(*args, **kwargs)
        return result

    functional.scaled_dot_product_attention = watched
    try:
        yield seen
    finally:
        functional.scaled_dot_product_attention = stock
