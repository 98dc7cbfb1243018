"""A loaded component's own weights, as its files still hold them: adapters are written into weights without a second copy in memory."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from videogen.errors import EnvironmentFault, say

_MARK = "_videogen_stored"
_Stamp = tuple[int, int, int]


@dataclass(slots=True)
class StoredWeights:
    """The safetensors files of one component's folder, opened as they are asked for and read as they were then: a file that another
    takes the place of is still there for who has it open, one that is written into is not."""

    folder: Path
    _files: dict[str, Path] | None = None
    _opened: dict[Path, tuple[Any, _Stamp | None]] = field(default_factory=dict)

    def __call__(self, name: str) -> torch.Tensor | None:
        """The tensor of a parameter, in host memory and the file's own type; None where no file has it.

        Raises EnvironmentFault where a file was written into since the first time.
        """
        if self._files is None:
            self._files = _read_index(self.folder)
        path = self._files.get(name)
        if path is None:
            return None
        stamp = _stamp(path)
        if path not in self._opened:
            try:
                self._opened[path] = safe_open(path, framework="pt"), stamp
            except (OSError, SafetensorError):
                return None
        opened, before = self._opened[path]
        if stamp is not None and before is not None and stamp[0] == before[0] and stamp != before:
            raise EnvironmentFault(say(f"weights {path.name}", "a file that was written into", "unchanged files", "start again"))
        stored: torch.Tensor = opened.get_tensor(name)
        return stored


def _stamp(path: Path) -> _Stamp | None:
    """Which file this is, its size and its time; None where there is none."""
    try:
        told = path.stat()
    except OSError:
        return None
    return told.st_ino, told.st_size, told.st_mtime_ns


def _read_index(folder: Path) -> dict[str, Path]:
    """Which file has which tensor: by the index where there is one, else one file has all; those of no variant (`x.fp16.y`) first."""
    for index in sorted(folder.glob("*.safetensors.index.json"), key=_plainness):
        where: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in where.items()}
    for path in sorted(folder.glob("*.safetensors"), key=_plainness):
        with safe_open(path, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), path)
    return {}


def _plainness(path: Path) -> tuple[int, str]:
    return path.name.count("."), path.name


def remember(model: torch.nn.Module, folder: Path) -> None:
    """A model was loaded from this folder."""
    setattr(model, _MARK, StoredWeights(folder))


def stored_of(model: torch.nn.Module) -> StoredWeights | None:
    """Where the model's own weights are stored; None for one that was made here."""
    found: StoredWeights | None = getattr(model, _MARK, None)
    return found
