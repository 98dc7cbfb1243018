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
    """The safetensors files of one component's folder, opened as they are asked for; they must not change while the model is in use."""

    folder: Path
    _files: dict[str, Path] | None = None
    _opened: dict[Path, tuple[Any, _Stamp]] = field(default_factory=dict)

    def __call__(self, name: str) -> torch.Tensor | None:
        """The tensor of a parameter, in host memory and the file's own type; None where no file has it.

        Raises EnvironmentFault where a file is another one than at the first time.
        """
        if self._files is None:
            self._files = _read_index(self.folder)
        path = self._files.get(name)
        if path is None:
            return None
        try:
            stamp = _stamp(path)
            if path not in self._opened:
                self._opened[path] = safe_open(path, framework="pt"), stamp
            opened, before = self._opened[path]
            if stamp != before:
                raise EnvironmentFault(say(f"weights {path.name}", "another file than was loaded", "unchanged files", "start again"))
            stored: torch.Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise EnvironmentFault(say(f"weights {path.name}", error, "the files that were loaded", "start again")) from error
        return stored


def _stamp(path: Path) -> _Stamp:
    told = path.stat()
    return told.st_ino, told.st_size, told.st_mtime_ns


def _read_index(folder: Path) -> dict[str, Path]:
    """Which file has which tensor: by the index where there is one, else one file has all."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        where: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in where.items()}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), path)
    return {}


def remember(model: torch.nn.Module, folder: Path) -> None:
    """A model was loaded from this folder."""
    setattr(model, _MARK, StoredWeights(folder))


def stored_of(model: torch.nn.Module) -> StoredWeights | None:
    """Where the model's own weights are stored; None for one that was made here."""
    found: StoredWeights | None = getattr(model, _MARK, None)
    return found
