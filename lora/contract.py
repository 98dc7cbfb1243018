"""What an adapter was trained for: forwards, shifts or sigmas, partition, strength; from file, table or flags. No torch."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from lora.errors import bad, listed
from lora.published import find_published

_METADATA_NAMES = {  # field -> how files may spell it
    "forwards": ("nfe", "forwards"),
    "shift_video": ("shift_video",),
    "shift_audio": ("shift_audio",),
    "sigmas": ("sigmas",),
    "partition": ("partition",),
    "strength": ("strength",),
    "size": ("trained_size",),
}
_PARTITIONS = ("transformer", "transformer_ref")
_WORKFLOW_PARTITION = {"t2va": "transformer", "fl2va": "transformer", "ref2va": "transformer_ref"}
_SIGMA_TOLERANCE = 1e-3


def shifted_grid(forwards: int, shift: float) -> tuple[float, ...]:
    """Sigmas of N forwards: q = (N - i) / N, sigma = s q / (1 + (s - 1) q), and the final 0: N + 1 points."""
    points = [(forwards - i) / forwards for i in range(forwards)]
    return (*(shift * q / (1 + (shift - 1) * q) for q in points), 0.0)


@dataclass(frozen=True, slots=True)
class Contract:
    """A sampling contract; None where nothing says. `sources` names where each value came from.

    `sigmas` (with the final 0) stand for both modalities when no shift is given, else for video. `size` is the canvas it
    was trained at, (width, height) in pixels: information, not a limit.
    """

    forwards: int | None = None
    shift_video: float | None = None
    shift_audio: float | None = None
    sigmas: tuple[float, ...] | None = None
    partition: str | None = None
    strength: float | None = None
    size: tuple[int, int] | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.forwards is not None and not 1 <= self.forwards <= 1000:
            raise bad("adapter contract forwards", self.forwards, "1 to 1000", "correct the file or the option")
        for name in ("shift_video", "shift_audio", "strength"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise bad(f"adapter contract {name}", value, "a finite number above 0", "correct the file or the option")
        if self.partition is not None and self.partition not in _PARTITIONS:
            raise bad("adapter contract partition", self.partition, "transformer or transformer_ref", "correct the file or the option")
        if self.sigmas is not None:
            self._check_sigmas(self.sigmas)

    def _check_sigmas(self, sigmas: tuple[float, ...]) -> None:
        falling = len(sigmas) > 1 and all(a > b for a, b in pairwise(sigmas)) and sigmas[0] <= 1 and sigmas[-1] == 0
        if not falling:
            raise bad("adapter contract sigmas", sigmas, "falling from at most 1 to a final 0", "correct the file or the option")
        if self.forwards is not None and self.forwards != len(sigmas) - 1:
            given = f"{len(sigmas)} sigmas ({self.sources.get('sigmas', 'given')}) and {self.forwards} forwards"
            raise bad("adapter contract", f"{given} ({self.sources.get('forwards', 'given')})", "one more sigma than forwards", "drop one")
        if self.shift_video is not None:
            grid = shifted_grid(len(sigmas) - 1, self.shift_video)
            if max(abs(a - b) for a, b in zip(sigmas, grid)) > _SIGMA_TOLERANCE:
                given = f"sigmas ({self.sources.get('sigmas', 'given')}) that shift {self.shift_video:g} does not give"
                where = self.sources.get("shift_video", "given")
                raise bad("adapter contract", f"{given} ({where})", "sigmas of that shift, or no shift", "drop one")

    def schedule(self) -> dict[str, tuple[float, ...]] | None:
        """The sigmas to run, per modality, the final 0 included; None when the contract does not fix both."""
        if self.sigmas is not None and self.shift_video is None and self.shift_audio is None:
            return {"video": self.sigmas, "audio": self.sigmas}
        if self.forwards is None or self.shift_video is None or self.shift_audio is None:
            return None
        video = self.sigmas or shifted_grid(self.forwards, self.shift_video)
        return {"video": video, "audio": shifted_grid(self.forwards, self.shift_audio)}

    def grid_points(self) -> int | None:
        """What diffusers' `num_inference_steps` must be: it counts points with the final 0, one more than forwards."""
        return None if self.forwards is None else self.forwards + 1

    def disagreements(self, *, workflow: str | None = None, **asked: float | None) -> tuple[str, ...]:
        """What a request asks otherwise than the adapter was trained for, one sentence each; empty when nothing does.

        `asked` may hold forwards, shift_video, shift_audio and strength; None, there or here, says nothing.
        """
        partition = None if workflow is None else _WORKFLOW_PARTITION[workflow]
        found = []
        for name, value in {"partition": partition, **asked}.items():
            own = getattr(self, name)
            if value is not None and own is not None and value != own:
                found.append(f"{name}: {value} asked, {own} trained for (by {self.sources.get(name, 'the contract')})")
        return tuple(found)

    def require(self, *, workflow: str | None = None, **asked: float | None) -> None:
        """Raise ValueError listing every disagreement with the request."""
        found = self.disagreements(workflow=workflow, **asked)
        if found:
            raise bad("adapter contract", "; ".join(found), "a request as trained", "change the request, or ask to ignore the contract")

    def to_metadata(self) -> dict[str, str]:
        """The contract as file metadata, readable by `resolve_contract`."""
        values = {name: getattr(self, name) for name in _METADATA_NAMES}
        return {_METADATA_NAMES[name][0]: _as_text(name, value) for name, value in values.items() if value is not None}


def _as_text(name: str, value: object) -> str:
    if name == "size" and isinstance(value, tuple):
        return "x".join(map(str, value))
    return json.dumps(value) if name == "sigmas" else str(value)


def parse_value(name: str, text: str) -> object:
    """One field from its text. Raises ValueError naming it."""
    try:
        if name == "forwards":
            return int(text)
        if name == "partition":
            return text
        if name == "size":
            width, height = (int(side) for side in text.lower().split("x"))
            return width, height
        if name == "sigmas":
            return tuple(float(value) for value in text.strip().removeprefix("[").removesuffix("]").split(","))
        return float(text)
    except (ValueError, TypeError):
        raise bad(f"adapter contract {name}", text, "a value of its kind", "correct the file or the option") from None


def _from_metadata(metadata: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, spellings in _METADATA_NAMES.items():
        values = {spelling: parse_value(name, metadata[spelling]) for spelling in spellings if spelling in metadata}
        if len(set(values.values())) > 1:
            raise bad(f"adapter contract {name}", values, "one value", "correct the metadata")
        if values:
            found[name] = next(iter(values.values()))
    return found


def resolve_contract(
    path: str, metadata: Mapping[str, str], *, partition: str | None = None, flags: Mapping[str, object] | None = None
) -> Contract:
    """The contract of a file from flags, its metadata, the prefix of its keys (`partition`) and the published table.

    Raises ValueError naming both sources where two firm ones differ; a contested value of the table, and the prefix
    `transformer.`, which converters write on anything, give way.
    """
    row = find_published(path)
    layers: list[tuple[str, Mapping[str, object], frozenset[str]]] = [
        ("flag", flags or {}, frozenset()),
        ("file metadata", _from_metadata(metadata), frozenset()),
    ]
    if partition == "transformer_ref":
        layers.append(("prefix of its keys", {"partition": partition}, frozenset()))
    if row is not None:
        layers.append((f"table of published files ({row.title})", row.values, row.loose))
    if partition == "transformer":
        layers.append(("prefix of its keys", {"partition": partition}, frozenset({"partition"})))
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for label, found, loose in layers:
        _take(label, found, loose, values, sources)
    known = {each.name for each in fields(Contract)} - {"sources", "notes"}
    if not values.keys() <= known:
        raise bad("adapter contract", listed(values.keys() - known), f"only {', '.join(sorted(known))}", "check the option")
    contract = Contract(**values, sources=sources, notes=row.notes if row else ())  # type: ignore[arg-type]
    if contract.forwards is None and contract.sigmas is not None:
        return replace(contract, forwards=len(contract.sigmas) - 1, sources=sources | {"forwards": f"sigmas ({sources['sigmas']})"})
    return contract


def _take(label: str, found: Mapping[str, object], loose: Iterable[str], values: dict[str, object], sources: dict[str, str]) -> None:
    for name, value in found.items():
        if name not in values:
            values[name], sources[name] = value, label
        elif values[name] != value and name not in loose:
            given = f"{values[name]} by {sources[name]} and {value} by {label}"
            raise bad(f"adapter contract {name}", given, "one value", "drop one, or ask to ignore the contract")


def common(contracts: Iterable[Contract]) -> Contract:
    """The fields on which all agree, for a merged adapter; what differs is named in the notes and dropped."""
    each = list(contracts)
    values: dict[str, object] = {}
    notes: list[str] = []
    for name in _METADATA_NAMES:
        found = {getattr(contract, name) for contract in each}
        if len(found) == 1:
            values[name] = found.pop()
        elif len(found) > 1:
            notes.append(f"{name} differs ({', '.join(sorted(map(str, found)))}): dropped")
    return Contract(**values, sources=dict.fromkeys(values, "all merged files"), notes=tuple(notes))  # type: ignore[arg-type]
