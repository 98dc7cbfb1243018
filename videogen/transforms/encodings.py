"""Prompt and picture encodings kept across requests by the content they come from, in host memory, within bounds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from videogen.families.base import Resolved

MAX_BYTES = 1_000_000_000

Values = dict[str, Any]
First = Callable[[Callable[[], Values]], Values]


def here(compute: Callable[[], Values]) -> Values:
    """Computed by this process."""
    return compute()


def text_key(resolved: Resolved) -> tuple[Any, ...]:
    """What a text encoding depends on, its weights apart: pictures are presented at the canvas, references at their own size."""
    return ("text", resolved.workflow, resolved.prompt, *_pictures(resolved))


def picture_key(resolved: Resolved) -> tuple[Any, ...]:
    """What the encoding of the pictures depends on: the prompt does not enter."""
    return ("pictures", resolved.workflow, *_pictures(resolved))


def _pictures(resolved: Resolved) -> tuple[Any, ...]:
    pictures = tuple((each.role, each.sha256) for each in resolved.inputs)
    return (pictures, resolved.width, resolved.height, resolved.frames) if pictures else ()


@dataclass(slots=True)
class Encodings:
    """Encodings by content; the least recently used go first. One set belongs to one model's weights."""

    kept: dict[tuple[Any, ...], tuple[Values, Values, int]] = field(default_factory=dict)
    max_bytes: int = MAX_BYTES

    def take(self, key: tuple[Any, ...], limit: int, compute: Callable[[], Values]) -> tuple[Values, bool]:
        """The values under `key` as tensors of the device they came from, and whether they were kept; else computed.

        At most `limit` entries of `max_bytes` together stay; one that is too large alone is not kept.
        """
        found = self.kept.pop(key, None)
        if found is not None:
            self.kept[key] = found
            return _moved(found[0], found[1]), True
        values = compute()
        devices = {name: _device_of(value) for name, value in values.items()}
        copies = _moved(values, dict.fromkeys(values, torch.device("cpu")), copy=True)
        num_bytes = sum(tensor.nbytes for value in copies.values() for tensor in _tensors(value))
        if limit > 0 and num_bytes <= self.max_bytes:
            self.kept[key] = (copies, devices, num_bytes)
            while len(self.kept) > limit or sum(size for *_, size in self.kept.values()) > self.max_bytes:
                del self.kept[next(iter(self.kept))]
        return values, False


def _tensors(value: Any) -> list[torch.Tensor]:
    return value if isinstance(value, list) else [value]


def on_device(values: Values, device: torch.device) -> Values:
    """The same values with every embedding on a device; whole numbers (tags) stay where the layout is made, in host memory."""
    devices = {name: device if all(map(torch.is_floating_point, _tensors(value))) else _device_of(value) for name, value in values.items()}
    return _moved(values, devices, copy=False)


def _device_of(value: Any) -> torch.device:
    tensors = _tensors(value)
    return tensors[0].device if tensors else torch.device("cpu")


def _moved(values: Values, devices: Values, *, copy: bool = True) -> Values:
    """Copies on the devices named: what a request does to its tensors stays its own."""
    return {
        name: [t.to(devices[name], copy=copy) for t in value] if isinstance(value, list) else value.to(devices[name], copy=copy)
        for name, value in values.items()
    }
