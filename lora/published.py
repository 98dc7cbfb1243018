"""What is publicly known of published MiniMax-H3 and Wan adapters, found by the words of a file's name. Data; opens nothing.

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
    shift_video: float | None = None,
    sigmas: tuple[float, ...] | None = None,
    strength: float | None = None,
    partition: str | None = None,
    size: tuple[int, int] | None = None,
    without: str = "",
    loose: str = "",
    alpha: float | None = None,
    gate_first: bool | None = None,
    note: str = "",
) -> Published:
    shifts = {"shift_video": shift_video} if shift is None else {"shift_video": shift[0], "shift_audio": shift[1]}
    values = {"forwards": forwards, "sigmas": sigmas, "strength": strength, "partition": partition, "size": size, **shifts}
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
_LIGHTX2V = (1.0, 0.9375, 5 / 6, 0.625, 0.0)  # shift 5: timesteps 1000, 937.5, 833.3, 625
_PAIR = "trained for these four steps only, guidance 1, two on each expert (boundary 0.875, from pictures 0.9); read, not tried"
_MOTION = "where motion is lost users take strength 0.6 to 0.8 and guidance 2 to 3.5 on the high-noise expert; read, not tried"
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
    _row("Wan2.2-Lightning", "wan2.2 4steps seko", sigmas=_LIGHTX2V, loose="sigmas", note=_PAIR),
    _row("Wan2.2-Lightning for ComfyUI", "wan2.2 lightning 4steps", sigmas=_LIGHTX2V, without="seko", loose="sigmas", note=_PAIR),
    _row("Wan2.2 lightx2v", "wan2.2 lightx2v 4steps", sigmas=_LIGHTX2V, without="seko lightning", loose="sigmas", note=_PAIR),
    _row("Wan2.2-Distill-Loras", "wan2.2 a14b lightx2v 4step", sigmas=_LIGHTX2V, loose="sigmas", note=_MOTION),
    _row("Wan2.2-Distill-Loras for ComfyUI", "wan 2 a14b lightx2v 4step", sigmas=_LIGHTX2V, loose="sigmas", note=_MOTION),
    _row(
        "Wan2.1 lightx2v",
        "lightx2v 14b cfg step distill",
        sigmas=_LIGHTX2V,
        loose="sigmas",
        note="guidance 1; some users hold out for the LCM sampler, which is not here; read, not tried",
    ),
    _row(
        "CausVid",
        "wan21 causvid",
        forwards=12,
        shift_video=7,
        strength=0.3,
        loose="forwards shift_video strength",
        note="guidance 1; users also take strength 0.5 with 4 to 9 Euler steps; read, not tried",
    ),
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
