"""Where inputs are tried: good files to start from, a folder for the input, one for output, and the shipped model's family."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

from caches.certificate import Certificate, Fingerprint
from videogen.adapters import model_target
from videogen.cli.planning import adapter_reader
from videogen.config import Recipe, as_plain
from videogen.source import ModelSource, find_model, open_family

GOOD_PICTURE, BROKEN_PICTURE, ADAPTER, WRONG_ADAPTER = "good.png", "broken.png", "good.safetensors", "wrong.safetensors"


class Broken(Exception):
    """A promise that an accepted input broke."""


def certificate() -> Certificate:
    """One that fits nothing."""
    empty = Fingerprint(**{each.name: 4 if each.name == "steps" else "x" for each in fields(Fingerprint)})
    numbers = {"lam": 0.1, "max_streak": 3, "video_order": 2, "audio_order": 2, "alpha": 0.1, "delta": 0.1, "n": 30}
    return Certificate(empty, **numbers, tolerances={"video": 0.1}, violations=0, mean_reused=0.4, clips_sha256="0" * 64)  # type: ignore[arg-type]


@dataclass
class Box:
    """A folder for one run of the fuzzer. `lent` keeps what a kind builds once, such as a server."""

    root: Path
    lent: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in (self.inputs, self.work, self.out):
            each.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (160, 96), (200, 40, 40)).save(self.inputs / GOOD_PICTURE)
        (self.inputs / BROKEN_PICTURE).write_bytes((self.inputs / GOOD_PICTURE).read_bytes()[:90])
        save_file(self.factors(), self.inputs / ADAPTER, {"nfe": "4", "shift_video": "12", "shift_audio": "3", "alpha": "2"})
        save_file({"blocks.0.lora_A.weight": torch.ones(2, 2)}, self.inputs / WRONG_ADAPTER)

    @property
    def inputs(self) -> Path:
        """Good files; nothing may write here."""
        return self.root / "inputs"

    @property
    def work(self) -> Path:
        """The input itself."""
        return self.root / "work"

    @property
    def out(self) -> Path:
        """The output folder."""
        return self.root / "out"

    @cached_property
    def source(self) -> ModelSource:
        """The shipped model, as found."""
        return find_model("pocket", offline=True)

    @cached_property
    def family(self) -> Any:
        """Its family: configs only."""
        return open_family(self.source)

    @cached_property
    def reader(self) -> Callable[[Recipe], Recipe]:
        """Reads adapters as the command line does."""
        return adapter_reader(self.source)

    @cached_property
    def target(self) -> Any:
        """Names and shapes of the shipped transformer."""
        return model_target(self.source)

    def factors(self) -> dict[str, torch.Tensor]:
        """A rank-2 adapter of two modules, in diffusers' names."""
        names = sorted(self.target.linears)
        found = {}
        for module in (names[0], names[-1]):
            rows, columns = self.target.shapes[f"{module}.weight"]
            found |= {f"{module}.lora_A.weight": torch.ones(2, columns), f"{module}.lora_B.weight": torch.ones(rows, 2)}
        return found

    def lend(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gave at the first call of this name."""
        if name not in self.lent:
            self.lent[name] = make()
        return self.lent[name]


def must_be_finite(value: Any, where: str = "value") -> None:
    """Raise Broken for a NaN or infinity anywhere in what was accepted, and for text that cannot be stored."""
    plain = as_plain(value)
    json.dumps(plain, ensure_ascii=False, allow_nan=True).encode()  # lone surrogates raise here
    _walk(plain, where)


def _walk(plain: Any, where: str) -> None:
    if isinstance(plain, float) and not math.isfinite(plain):
        raise Broken(f"accepted {plain} at {where}")
    pairs = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, item in pairs:
        _walk(item, f"{where}.{key}")
