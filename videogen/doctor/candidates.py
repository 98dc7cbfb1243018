"""Dense attention candidates: each with the facts it depends on, compared with float32 and timed at one shape."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _check_attention_backend_requirements,
    dispatch_attention_fn,
)
from torch.nn import functional

from videogen.doctor.rules import TILES
from videogen.timing import synchronizer, time_call
from videogen.transforms.cpu_bfloat16 import attend

HALF = (torch.bfloat16, torch.float16)
ANY = (*HALF, torch.float32)
BOUNDS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 1e-2}  # relative L2 from float32, on sampled rows
SAMPLED = 128
FAILS = (RuntimeError, ValueError, TypeError, ImportError, NotImplementedError, OSError)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttnSpec:
    """One way to attend. Queries, keys and values are (1, S, H, D); `backend` is what diffusers calls it, empty for our own."""

    name: str
    backend: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    package: str
    is_close: bool
    never: str

    def refusal(self, query: torch.Tensor) -> str:
        """Why it cannot be used here; empty when it can be tried."""
        if self.never:
            return self.never
        if query.device.type not in self.devices:
            return f"not on {query.device.type}"
        if query.dtype not in self.dtypes:
            return f"not in {str(query.dtype).removeprefix('torch.')}"
        if self.package and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.backend:
            try:
                _check_attention_backend_requirements(AttentionBackendName(self.backend))
            except FAILS as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        return ""

    def call(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend: (1, S, H, D)."""
        if self.backend:
            out: torch.Tensor = dispatch_attention_fn(query, key, value, backend=AttentionBackendName(self.backend))
            return out
        heads = [part[0].transpose(0, 1).to(torch.bfloat16) for part in (query * query.shape[-1] ** -0.5, key, value)]
        return attend(*heads)[None].to(query.dtype)


_HUB, _QUANTISED = "comes from the hub at the first call; nothing is downloaded here", "approximate: it quantises queries and keys"
CANDIDATES = (
    AttnSpec("native", "native", ("cpu", "cuda"), ANY, "", True, ""),
    AttnSpec("_native_flash", "_native_flash", ("cpu", "cuda"), ANY, "", True, ""),
    AttnSpec("_native_cudnn", "_native_cudnn", ("cuda",), HALF, "", True, ""),
    AttnSpec("_native_efficient", "_native_efficient", ("cuda",), ANY, "", True, ""),
    AttnSpec("flash", "flash", ("cuda",), HALF, "flash_attn", True, ""),
    AttnSpec("_flash_3", "_flash_3", ("cuda",), HALF, "flash_attn_interface", True, ""),
    AttnSpec("xformers", "xformers", ("cuda",), HALF, "xformers", True, ""),
    AttnSpec(TILES, "", ("cpu",), (torch.float32,), "", True, ""),
    AttnSpec("sage", "sage", ("cuda",), HALF, "sageattention", False, _QUANTISED),
    AttnSpec("flex", "flex", ("cpu", "cuda"), ANY, "", False, "diffusers calls it without compiling it"),
    AttnSpec("flash_4_hub", "flash_4_hub", ("cuda",), HALF, "", False, _HUB),
)


def sampled_reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The attention of some query rows in float32: (1, R, H, D)."""
    scores = torch.einsum("brhd,bshd->bhrs", query[:, rows].float(), key.float()) * query.shape[-1] ** -0.5
    return torch.einsum("bhrs,bshd->brhd", functional.softmax(scores, -1), value.float())


def try_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[dict[str, Any]]:
    """A row per candidate: milliseconds and distance from float32, or why not. Operands (1, S, H, D), the model's own."""
    rows = torch.linspace(0, query.shape[1] - 1, min(SAMPLED, query.shape[1]), device=query.device).long()
    wanted, found = sampled_reference(query, key, value, rows), list[dict[str, Any]]()
    for spec in CANDIDATES:
        row: dict[str, Any] = {"name": spec.name, "backend": spec.backend, "ms": None, "error": None, "reason": spec.refusal(query)}
        if not row["reason"]:
            try:
                made = spec.call(query, key, value)
                timing = time_call(partial(spec.call, query, key, value), warmup=1, synchronize=synchronizer(query.device))
                row["ms"], row["error"] = 1e3 * timing.median_s, float((made[:, rows].float() - wanted).norm() / wanted.norm())
                bound = BOUNDS[torch.bfloat16 if spec.name == TILES else query.dtype]
                row["reason"] = "" if row["error"] <= bound else f"{row['error']:.1e} from float32, above {bound:.0e}"
            except FAILS as error:
                row["reason"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"
        found.append(row)
    return found


def winner(rows: list[dict[str, Any]], *, own: bool = True) -> dict[str, Any] | None:
    """The fastest that is right; without `own` among diffusers' back ends only."""
    right = [row for row in rows if row["ms"] is not None and not row["reason"] and (own or row["backend"])]
    return min(right, key=lambda row: float(row["ms"]), default=None)
