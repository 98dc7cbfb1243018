"""Figures of the project's own pages, as data: shown beside a recipe as published, never as measured here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """One figure. It is shown for this model only and, where `adapter` is not empty, for the adapter file of this SHA-256 only.

    `figures` are the numbers as the page writes them; a test looks them up there.
    """

    recipe: str
    model: str
    adapter: str
    short: str
    full: str
    page: str
    figures: tuple[str, ...]


_TURBO4 = "30b80ace6f347b66435936b51da4025592a95a363fc6455d4eb8adc21a32729a"
_TURBO8 = "2e85ca4026489c639c07fcb7e9e81870b8acb0539c083ca140120b2e093f3f18"
_GATE = "n = 256 from text, 160x96, 124 frames, H200"

PUBLISHED = (
    Published(
        *("exact", "pocket", "", "1.54 times plain"),
        "1.54 [1.50, 1.57] times as fast as plain, five pairs, 160x96, 124 frames, two cores of an AMD EPYC",
        *("docs/speed.md", ("1.54 [1.50, 1.57]",)),
    ),
    Published(
        *("careful", "pocket", "", "1.72 times exact; P(too far from it) <= 5 %"),
        "1.72 [1.69, 1.74] times as fast as exact, five pairs, from text at 160x96, 124 frames, two cores of an AMD EPYC; "
        "calibrated with 0 of 45 too far",
        *("docs/cache.md", ("1.72", "[1.69, 1.74]", "0 of 45")),
    ),
    Published(
        *("balanced", "pocket", "", "60.9 % of steps reused; P(too far from exact) <= 10 %"),
        "60.9 % of the steps reused, text at 160x96, 124 frames, on a CPU; twice careful's tolerances, calibrated with 2 of 52 too far",
        *("docs/cache.md", ("60.9 %", "2 of 52")),
    ),
    Published(
        *("turbo", "pocket", _TURBO4, "all right .777 (dense .805), 28.2 dB"),
        f"4 forwards for 49: all attributes right .777 where dense has .805, PSNR to the dense clip 28.2 dB; {_GATE}",
        *("docs/lora.md", (".777", ".805", "28.2")),
    ),
    Published(
        *("turbo8", "pocket", _TURBO8, "all right .809 (dense .805), 33.1 dB"),
        f"8 forwards for 49: all attributes right .809 where dense has .805, PSNR to the dense clip 33.1 dB; {_GATE}",
        *("docs/lora.md", (".809", ".805", "33.1")),
    ),
)
