"""An adapter file on disk: header first, then tensors one at a time; knows nothing about what the keys mean."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lora.errors import bad, listed

PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_MAX_HEADER_BYTES = 64 << 20
_MAX_TENSORS = 200_000
_MAX_NAME = 1024  # characters; names of models have under 100
_IN_FILE_CONFIG = "lora_adapter_metadata"  # where diffusers' save_lora_weights puts the peft config


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as the header declares it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether it can hold factors: F64, F32, F16, BF16 or one of the 8-bit floats."""
        return "F" in self.dtype


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A safetensors file with what travels beside it. `config` is peft's, from `config_source`; empty where there is none."""

    path: Path
    sha256: str
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    config: Mapping[str, Any]
    config_source: str

    def read(self, keys: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors on the CPU, in the dtype of the file (8-bit floats as float32, which holds them exactly)."""
        with safe_open(self.path, framework="pt") as handle:
            for key in keys:
                tensor = handle.get_tensor(key)
                yield key, tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def open_file(path: str | Path) -> AdapterFile:
    """Open a safetensors file, or a peft folder (`adapter_model.safetensors` beside `adapter_config.json`).

    Raises ValueError when it is anything else: a state dict has already lost the file's alpha, a pickle may run code.
    """
    if not isinstance(path, str | Path):
        raise bad("adapter", type(path).__name__, "the path of a safetensors file", "pass the path: a dict has lost the file's alpha")
    place = Path(path).expanduser()
    if place.is_dir():
        if not (place / PEFT_WEIGHTS).is_file() or not (place / PEFT_CONFIG).is_file():
            raise bad("adapter folder", str(place), f"{PEFT_WEIGHTS} and {PEFT_CONFIG}", "pass the safetensors file itself")
        place = place / PEFT_WEIGHTS
    _check_start(place)
    try:
        with safe_open(place, framework="pt") as handle:
            metadata: dict[str, str] = handle.metadata() or {}
            names = list(handle.keys())
            if not names or len(names) > _MAX_TENSORS:
                raise bad("adapter file", f"{len(names)} tensors in {place}", f"1 to {_MAX_TENSORS}", "check the file")
            if longest := max((name for name in names if len(name) > _MAX_NAME), key=len, default=""):
                raise bad("adapter keys", f"{listed([longest])} of {len(longest)} characters", f"at most {_MAX_NAME}", "check the file")
            slices = {name: handle.get_slice(name) for name in names}
            entries = {name: Entry(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        raise bad("adapter file", f"{place} ({error})", "a whole safetensors file", "download it again") from None
    config, source = _peft_config(place, metadata)
    with place.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return AdapterFile(place, sha256, entries, metadata, config, source)


def _check_start(place: Path) -> None:
    if not place.is_file():
        raise bad("adapter", str(place), "an existing safetensors file or peft folder", "check the path")
    with place.open("rb") as stream:
        start = stream.read(24)
    if start.startswith(b"version https://git-lfs"):
        raise bad("adapter file", f"{place} (a Git LFS pointer)", "the weights themselves", "run git lfs pull, or download it again")
    size, header = place.stat().st_size, int.from_bytes(start[:8], "little")
    if len(start) < 10 or start[8:9] != b"{" or header > min(size - 8, _MAX_HEADER_BYTES):
        raise bad("adapter file", str(place), "a safetensors file", "pickled files (.pt, .bin, .ckpt) are not opened: ask for safetensors")


def _peft_config(place: Path, metadata: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Peft's settings from beside the file or from inside it, with the name of where they stood."""
    beside = place.with_name(PEFT_CONFIG)
    if place.name == PEFT_WEIGHTS and beside.is_file():
        return _json_object(beside.read_text(encoding="utf-8", errors="replace"), PEFT_CONFIG), PEFT_CONFIG
    if _IN_FILE_CONFIG in metadata:
        found = _json_object(metadata[_IN_FILE_CONFIG], f"metadata {_IN_FILE_CONFIG}")
        return _without_component(found), f"metadata {_IN_FILE_CONFIG}"
    return {}, ""


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise bad(where, text[:60], "a JSON object", "restore the file the adapter came with")
    return found


def _without_component(found: Mapping[str, Any]) -> dict[str, Any]:
    """Diffusers writes `transformer.lora_alpha`; the component's name is dropped, two components are not told apart here."""
    short: dict[str, Any] = {}
    for key, value in found.items():
        name = key.rpartition(".")[2]
        if name in short and short[name] != value:
            raise bad(f"metadata {_IN_FILE_CONFIG}", f"two values of {name}", "one component", "save each partition to its own file")
        short[name] = value
    return short
