"""What a text model's cached states depend on, as one digest; and a cheap look that notices a change nobody announced."""

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch

from videogen.text.model import TextModel

_VERSION, _PLACE = attrgetter("_version"), methodcaller("data_ptr")
_ADAPTERS = "_videogen_adapters"  # where lora.apply leaves its attachment


@dataclass(frozen=True, slots=True)
class TextIdentity:
    """Everything a cached prefix depends on besides its tokens."""

    weights: str
    config: str
    dtype: str
    quantisation: str
    adapters: str
    template: str
    tokenizer: str
    attention: str

    @property
    def digest(self) -> str:
        """SHA-256 over all of it."""
        return _hash(asdict(self))


def identify(text: TextModel, weights: str) -> TextIdentity:
    """The identity now; `weights` is that of the files (`TextSource.identity`), adapters are read from the model itself."""
    model, tokenizer = text.model, text.tokenizer
    config = {key: value for key, value in model.config.to_dict().items() if key not in ("_name_or_path", "transformers_version", "dtype")}
    return TextIdentity(
        weights=weights,
        config=_hash(config),
        dtype=str(model.dtype),
        quantisation=_hash(getattr(model.config, "quantization_config", None)),
        adapters=adapters_of(model),
        template=_hash(getattr(tokenizer, "chat_template", None)),
        tokenizer=_hash(sorted(tokenizer.get_vocab().items()) if tokenizer is not None else None),
        attention=str(getattr(model.config, "_attn_implementation", "")),
    )


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def adapters_of(model: Any) -> str:
    """What is on the model: this project's attachments by their identity, peft's layers by content, strength and whether merged."""
    found = hashlib.sha256()
    is_bare = True
    for name, module in model.named_modules():
        attached = getattr(module, _ADAPTERS, None)
        if attached is not None:
            is_bare = False
            found.update(f"{name} {attached.identity}".encode())
        for part, tensor in _peft_parts(module):
            is_bare = False
            found.update(f"{name} {part}".encode())
            found.update(b"" if tensor is None else tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return "" if is_bare else found.hexdigest()


def _peft_parts(module: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Names with strengths, and factors, of the adapters that act in a peft layer; none of another module or a disabled layer."""
    active = getattr(module, "active_adapters", None)
    if not hasattr(module, "lora_A") or active is None:
        return
    merged = [*getattr(module, "merged_adapters", [])]
    acting = [] if getattr(module, "disable_adapters", False) else [*active]
    for name in dict.fromkeys([*merged, *acting]):
        if name in module.lora_A:
            yield f"{name} x{module.scaling[name]} {'merged' if name in merged else ''}", module.lora_A[name].weight
            yield f"{name} up", module.lora_B[name].weight


class Watch:
    """Notices changes of one model's weights and adapters that nobody announced, in under a millisecond a thousand tensors.

    Sees in-place writes, swapped tensors and modules, adapters on, off, merged or at another strength. Does not see a write through
    `parameter.data`, which torch does not count: that is what checks are for.
    """

    def __init__(self, model: Any) -> None:
        self.model, self._lock = model, threading.Lock()
        self._list()

    def _list(self) -> None:
        self._modules = [*self.model.modules()]
        self._children = [module._modules for module in self._modules]
        self._parameters = [module._parameters for module in self._modules]
        self._counts_writes = not any(p.is_inference() for p in self.model.parameters())
        self._known = self._look()[0]

    def look(self) -> tuple[Any, ...]:
        """Equal to an earlier look unless something changed in between."""
        with self._lock:
            now = self._look()
            if now[0] != self._known:  # modules were put in or taken out
                self._list()
                now = self._look()
            return now

    def _look(self) -> tuple[Any, ...]:
        children = sum(map(id, chain.from_iterable(map(dict.values, self._children))))
        tensors = [tensor for tensor in chain.from_iterable(map(dict.values, self._parameters)) if tensor is not None]
        versions = sum(map(_VERSION, tensors)) if self._counts_writes else 0
        adapted = [module for module in self._modules if _ADAPTERS in module.__dict__ or "lora_A" in module._modules]
        return children, versions, sum(map(_PLACE, tensors)), *map(_state, adapted)


def _state(module: Any) -> tuple[Any, ...]:
    attached = getattr(module, _ADAPTERS, None)
    peft = ("disable_adapters", "active_adapters", "merged_adapters", "scaling")
    return (None if attached is None else attached.identity, *(str(getattr(module, name, None)) for name in peft))
