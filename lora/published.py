"""What is publicly known of published MiniMax-H3 adapters, found by the words of a file's name. Data; opens nothing.

No published file could be opened where this was written: the rows restate what their authors and users report. No header
digest is known, so a renamed file is not recognised.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath


@dataclass(frozen=True, slots=True)
class Published:
    """One row: `words` must all stand in the name (or its folder's), none of `without`. `loose` fields are contested."""

    title: str
    words: frozenset[str]
    values: Mapping[str, object]
    without: frozenset[str] = frozenset()
    loose: frozenset[str] = frozenset()
    alpha: float | None = None
    gate_first: bool | None = None
    notes: tuple[str, ...] = field(default=())


def _row(
    title: str,
    words: str,
    *,
    forwards: int | None = None,
    shift: tuple[float, float] | None = None,
    sigmas: tuple[float, ...] | None = None,
    partition: str | None = None,
    size: tuple[int, int] | None = None,
    without: str = "",
    loose: str = "",
    alpha: float | None = None,
    gate_first: bool | None = None,
    note: str = "",
) -> Published:
    shifts = {} if shift is None else {"shift_video": shift[0], "shift_audio": shift[1]}
    values = {"forwards": forwards, "sigmas": sigmas, "partition": partition, "size": size, **shifts}
    return Published(
        title=title,
        words=frozenset(words.split()),
        values={name: value for name, value in values.items() if value is not None},
        without=frozenset(without.split()),
        loose=frozenset(loose.split()),
        alpha=alpha,
        gate_first=gate_first,
        notes=(note,) if note else (),
    )


_BASE, _REF = "transformer", "transformer_ref"
_HYPERFLOW = (1.0, 0.99391, 0.98429, 0.96606, 0.92308, 0.83494, 0.69685, 0.46875, 0.0)
_LARGE, _SHIFTS = (1344, 768), "shift_video shift_audio"
_CONTESTED = "shift is contested: 6/3 by its makers, 12/3 by some users"
_NO_ALPHA = "no alpha is reported for this file; the fl2v file of the same version means 8"
_SPARSE = "trained with 85 % sparse attention; under dense attention it is untried"

PUBLISHED: tuple[Published, ...] = (
    _row("larryvrh v1", "h3 turbo 4step", forwards=4, shift=(12, 3), partition=_BASE, without="fl2v ref2v v4 joyfox", loose="partition"),
    _row("larryvrh v1 ckpt500", "h3 turbo ckpt500", forwards=4, shift=(12, 3), partition=_BASE, loose="partition"),
    _row("larryvrh v1 ckpt850", "h3 turbo ckpt850", forwards=4, shift=(12, 3), partition=_BASE, loose="partition"),
    _row(
        "larryvrh v4",
        "h3 turbo v4",
        forwards=8,
        partition=_BASE,
        loose="forwards partition",
        note="6 to 8 forwards work best; no shift is stated",
    ),
    _row("lightx2v fl2v 4step v0.1", "h3 fl2v 4step v0.1", forwards=4, shift=(12, 3), partition=_BASE, alpha=8),
    _row("lightx2v fl2v 8step v1.0", "h3 fl2v 8step v1.0", forwards=8, shift=(12, 3), partition=_BASE, alpha=8),
    _row("lightx2v fl2v 4step v1.0 768p", "h3 fl2v 4step v1.0 768p", forwards=4, shift=(6, 3), partition=_BASE, size=_LARGE, alpha=128),
    _row("lightx2v fl2v 4step v1.1 768p", "h3 fl2v 4step v1.1 768p", forwards=4, shift=(6, 3), partition=_BASE, size=_LARGE, alpha=128),
    _row("lightx2v fl2v 4step v1.2 768p", "h3 fl2v 4step v1.2 768p", forwards=4, shift=(6, 3), partition=_BASE, alpha=8),
    _row("lightx2v fl2v 8step v1.0 768p", "h3 fl2v 8step v1.0 768p", forwards=8, shift=(6, 3), partition=_BASE, alpha=8),
    _row("lightx2v ref2v 4step v0.1", "h3 ref2v 4step v0.1", forwards=4, shift=(12, 3), partition=_REF, loose="forwards", note=_NO_ALPHA),
    _row(
        "lightx2v ref2v 8step v1.0 768p",
        "h3 ref2v 8step v1.0 768p",
        forwards=8,
        shift=(6, 3),
        partition=_REF,
        loose=_SHIFTS,
        alpha=8,
        note=_CONTESTED,
    ),
    _row("lightx2v SLA", "h3 fl2v 4step v0.1 768p sla", forwards=4, shift=(6, 3), partition=_BASE, alpha=128, note=_SPARSE),
    _row("dareties", "h3 dareties", forwards=4, shift=(6, 3), partition=_BASE, loose=f"forwards partition {_SHIFTS}"),
    _row("FastH3", "h3 fastvideo", forwards=4, shift=(12, 3), partition=_BASE, gate_first=False),
    _row("FastH3 extract", "h3 fasth3", forwards=4, shift=(12, 3), partition=_BASE, without="fastvideo"),
    _row("flashgen", "h3 flashgen", forwards=4, sigmas=(1.0, 0.7, 0.4, 0.15, 0.0), partition=_BASE),
    _row("HyperFlow", "h3 hyperflow", forwards=8, sigmas=_HYPERFLOW, without="ref2va"),
    _row("HyperFlow ref2va", "h3 hyperflow ref2va", forwards=8, sigmas=_HYPERFLOW, partition=_REF),
    _row("TaoMate", "h3 taomate", forwards=3),
)


def words_of(path: str) -> frozenset[str]:
    """The words of a file's name and its folder's, lower case; `FastH3` also says h3."""
    parts = PurePath(path.lower()).parts[-2:]
    name = "/".join(parts).removesuffix(".part").removesuffix(".safetensors")
    words = {word.strip(".") for word in re.split(r"[^a-z0-9.]+", name)}
    return frozenset(words | ({"h3"} if "fasth3" in words else set()))


def find_published(path: str) -> Published | None:
    """The row that asks for the most words of this name; None when none fits, or two fit equally."""
    words = words_of(path)
    fits = [row for row in PUBLISHED if row.words <= words and not row.without & words]
    most = max((len(row.words) for row in fits), default=0)
    best = [row for row in fits if len(row.words) == most]
    return best[0] if len(best) == 1 else None
