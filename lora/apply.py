"""Puts adapters onto a model and takes them off again without a trace: as parallel branches, or fused into the weights.

Parallel branches are forward hooks of the linear layers: no module is replaced, so names, dtypes and other hooks stay.
What is written into parameters (fused deltas, full-rank payloads) is undone from the originals, never by subtraction.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lora.adapter import Adapter, Factors
from lora.errors import bad

logger = logging.getLogger(__name__)

_MAX_STRENGTH = 1000
_MARK = "_videogen_adapters"
_BROKEN = "half taken off"  # no adapters' identity


@dataclass(frozen=True)
class Use:
    """One adapter at a strength; 0 is off, above 1 is allowed, below 0 turns it round."""

    adapter: Adapter
    strength: float = 1.0

    def __post_init__(self) -> None:
        if not abs(self.strength) <= _MAX_STRENGTH:
            raise bad("adapter strength", self.strength, f"a number up to {_MAX_STRENGTH}", "use 1 for the strength it was trained at")

    @cached_property
    def norm(self) -> float:
        """Frobenius norm of all it adds; computed once, as it takes seconds at H3's size."""
        return math.hypot(*delta_norms(self).values())


Origin = Callable[[str], torch.Tensor | None]


def nowhere(_name: str) -> None:
    """No parameter's value is to be had again."""


class _Branch:
    """The low-rank updates of one linear layer, side by side: down (sum r, in), up (out, sum r), scales (sum r)."""

    def __init__(self, name: str, parts: Sequence[tuple[Factors, float]], like: torch.Tensor) -> None:
        self.down = torch.cat([part.down.to(like.device, like.dtype) for part, _ in parts])
        self.up = torch.cat([part.up.to(like.device, like.dtype) for part, _ in parts], dim=1)
        scales = [torch.full((part.rank,), part.scale * strength, dtype=torch.float32) for part, strength in parts]
        self.scales = torch.cat(scales).to(like.device)
        if not bool(torch.isfinite(self.down).all() and torch.isfinite(self.up).all()):
            raise bad("adapter factors", f"NaN or infinity in {name} as {like.dtype}", "finite numbers", "the model is as it was")

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """The layer's output (..., out) with the updates added; scales stay float32, as bfloat16 would bias them."""
        rows: torch.Tensor = inputs[0]
        if self.down.device != rows.device:
            self.down, self.up, self.scales = (each.to(rows.device) for each in (self.down, self.up, self.scales))
        low = nn.functional.linear(rows.to(self.down.dtype), self.down)
        low = (low.float() * self.scales).to(self.up.dtype) if low.element_size() < 4 else low * self.scales.to(low.dtype)
        return output + nn.functional.linear(low, self.up).to(output.dtype)


@dataclass(slots=True)
class Attachment:
    """Adapters in force on one model. `identity` names files, reading, strengths and mode, for caches to fingerprint."""

    model: nn.Module
    uses: tuple[Use, ...]
    is_fused: bool
    identity: str
    _handles: list[RemovableHandle] = field(default_factory=list)
    _saved: list[tuple[nn.Parameter, Callable[[], torch.Tensor]]] = field(default_factory=list)

    def detach(self) -> None:
        """Give the model back as it was, bit for bit; a second call does nothing.

        Where an original is not to be had any more its error is raised; the model is then of no known `identity`, and stays so until
        a further call succeeds.
        """
        self.identity = _BROKEN
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        with torch.no_grad():
            while self._saved:
                parameter, original = self._saved[-1]
                parameter.copy_(original())
                self._saved.pop()
        if getattr(self.model, _MARK, None) is self:
            delattr(self.model, _MARK)

    def record(self) -> list[dict[str, object]]:
        """The sidecar's entry, one for each adapter."""
        return [
            {
                "name": use.adapter.name,
                "digest": use.adapter.digest,
                "strength": use.strength,
                "fused": self.is_fused,
                "layout": use.adapter.layout,
                "ranks": {str(rank): count for rank, count in use.adapter.ranks().items()},
                "scales": [[scale, origin, count] for (scale, origin), count in use.adapter.scales().items()],
                "patches": len(use.adapter.patches),
                "delta_norm": use.norm,
            }
            for use in self.uses
        ]


def identity_of(uses: Sequence[Use], *, fuse: bool = False) -> str:
    """A stable name of adapters, strengths and mode: sha256, or the empty string when none has an effect."""
    parts = [[use.adapter.digest, float(use.strength).hex()] for use in uses if use.strength != 0]
    return hashlib.sha256(json.dumps([parts, fuse]).encode()).hexdigest() if parts else ""


def delta_norms(use: Use) -> dict[str, float]:
    """Frobenius norm of what an adapter adds, by module (factors) and by parameter (added payloads), strength included."""
    norms = {name: abs(use.strength) * factors.norm() for name, factors in use.adapter.factors.items()}
    added = {name: patch.value for name, patch in use.adapter.patches.items() if not patch.is_replacement}
    return norms | {name: abs(use.strength) * float(value.double().norm()) for name, value in added.items()}


def attached_to(model: nn.Module) -> Attachment | None:
    """What is attached to this model now; each partition has its own."""
    return getattr(model, _MARK, None)


def attach(model: nn.Module, uses: Sequence[Use], *, fuse: bool = False, origin: Origin = nowhere) -> Attachment:
    """Put adapters onto a model: all of them, or none and the model untouched.

    Unfused, each linear layer gains a parallel branch in its own dtype. With `fuse` deltas are computed in float32 and written
    into the weights; originals come from `origin` again where it gives the very same values, others are kept in host memory.
    Full-rank payloads are written in both modes. With every strength 0 the model is not touched. Raises ValueError when something
    is attached already, a name or shape does not fit, two adapters replace one parameter, or a result is not finite.
    """
    active = [use for use in uses if use.strength != 0]
    _check(model, active, fuse)
    attachment = Attachment(model, tuple(uses), fuse, identity_of(uses, fuse=fuse))
    setattr(model, _MARK, attachment)
    try:
        for name in sorted(_written(active, fuse)):
            parameter = model.get_parameter(name)
            attachment._saved.append((parameter, _way_back(parameter, name, origin)))
            _write(parameter, name, active, fuse)
        if not fuse:
            for name in sorted({name for use in active for name in use.adapter.factors}):
                module = model.get_submodule(name)
                parts = [(use.adapter.factors[name], use.strength) for use in active if name in use.adapter.factors]
                attachment._handles.append(module.register_forward_hook(_Branch(name, parts, module.get_parameter("weight"))))
    except BaseException:
        attachment.detach()
        raise
    for use in active:
        told = (use.adapter.name, use.strength, len(use.adapter.factors), use.norm)
        logger.info("adapter %s at strength %g: %d modules, norm of all deltas %.4g", *told)
    return attachment


@contextmanager
def attached(model: nn.Module, uses: Sequence[Use], *, fuse: bool = False, origin: Origin = nowhere) -> Iterator[Attachment]:
    """`attach` for one scope; detached in any case."""
    attachment = attach(model, uses, fuse=fuse, origin=origin)
    try:
        yield attachment
    finally:
        attachment.detach()


def _written(uses: Sequence[Use], fuse: bool) -> set[str]:
    """Parameters whose values change."""
    patched = {name for use in uses for name in use.adapter.patches}
    return patched | ({f"{name}.weight" for use in uses for name in use.adapter.factors} if fuse else set())


def _way_back(parameter: nn.Parameter, name: str, origin: Origin) -> Callable[[], torch.Tensor]:
    """What gives a parameter's value again, bit for bit; half of the memory of H3's weights if all of them were copied."""
    dtype = parameter.dtype

    def again() -> torch.Tensor | None:
        stored = origin(name)
        return None if stored is None else stored.to(dtype)

    found = again()
    if found is not None and found.shape == parameter.shape and torch.equal(found.to(parameter.device), parameter):
        return lambda: cast(torch.Tensor, again())
    copy = parameter.detach().to("cpu", copy=True)
    return lambda: copy


@torch.no_grad()
def _write(parameter: nn.Parameter, name: str, uses: Sequence[Use], fuse: bool) -> None:
    """Replacements first (a strength between 0 and 1 blends), then payloads and deltas on top; in float32 or wider."""
    base = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
    value = base.clone()
    for use in uses:
        patch = use.adapter.patches.get(name)
        if patch is not None and patch.is_replacement:
            new = patch.value.to(value)
            value = new if use.strength == 1 else base + use.strength * (new - base)
    for use in uses:
        patch, factors = use.adapter.patches.get(name), use.adapter.factors.get(name.removesuffix(".weight"))
        if patch is not None and not patch.is_replacement:
            value = value + use.strength * patch.value.to(value)
        if fuse and factors is not None and name.endswith(".weight"):
            value = value + use.strength * factors.scale * (factors.up.to(value) @ factors.down.to(value))
    result = value.to(parameter.dtype)
    if not bool(torch.isfinite(result).all()):
        raise bad("adapter result", f"NaN or infinity in {name}", "finite weights", "check the strength; the model is as it was")
    parameter.copy_(result)


def _check(model: nn.Module, uses: Sequence[Use], fuse: bool) -> None:
    if attached_to(model) is not None:
        raise bad("adapters", "a model that has some already", "none", "detach them first, or attach all at once")
    shapes: dict[str, tuple[int, ...]] = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    replaced: dict[str, str] = {}
    for use in uses:
        _check_fit(use.adapter, shapes)
        for name in (name for name, patch in use.adapter.patches.items() if patch.is_replacement):
            if name in replaced:
                raise bad("adapters", f"{replaced[name]} and {use.adapter.name}, which both replace {name}", "one of them", "drop one")
            replaced[name] = use.adapter.name
    touched = _written(uses, fuse) | {f"{name}.weight" for use in uses for name in use.adapter.factors}
    for name in touched:
        parameter = model.get_parameter(name)
        if not parameter.dtype.is_floating_point or parameter.element_size() < 2 or parameter.is_meta:
            given = f"{name} in {parameter.dtype} on {parameter.device}"
            raise bad("adapter target", given, "a loaded weight of at least 16 bits", "attach before quantising or offloading")
    sharded = [name for name in sorted(_written(uses, fuse)) if hasattr(model.get_parameter(name), "to_local")]
    if sharded:
        raise bad("adapter target", f"{sharded[0]}, sharded over ranks", "whole weights to write into", "use --weights whole or offload")
    owners = {name.removesuffix(".weight").rpartition(".")[0] for name in touched}
    if any(getattr(model.get_submodule(owner), "fused_projections", False) for owner in owners):
        raise bad("adapter target", "attention with fused projections", "separate q, k and v", "call unfuse_qkv_projections() first")


def _check_fit(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    wanted = {f"{name}.weight": (each.up.shape[0], each.down.shape[1]) for name, each in adapter.factors.items()}
    for name, shape in [*wanted.items(), *((name, tuple(patch.value.shape)) for name, patch in adapter.patches.items())]:
        if shapes.get(name) != shape:
            given = f"{name} {shape} in {adapter.name}, {shapes.get(name, 'absent')} in the model"
            raise bad("adapter", given, "the model it was read for", "read the file again for this model")
