"""The page's form as data, read from the request dataclass, so that a new field there is a new field here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from videogen.config import Media, Request
from videogen.families.base import Family

ASPECTS = ((16, 9), (9, 16), (1, 1), (4, 3), (3, 4), (21, 9))
MAX_LINES = 200

_KINDS: dict[Any, str] = {
    str: "text",
    bool: "flag",
    int | None: "whole",
    float | None: "number",
    tuple[int, int] | None: "size",
    Media | None: "picture",
    tuple[Media, ...]: "pictures",
}
_WORDS = {
    "prompt": ("Prompt", "what the clip shows, and what is heard"),
    "image": ("First frame", "a picture the clip begins with"),
    "last_image": ("Last frame", "a picture the clip ends with"),
    "references": ("Reference pictures", "objects the clip should show; up to nine"),
    "size": ("Size", "the sizes this model can make"),
    "seconds": ("Length in seconds", "snapped up to the model's ladder"),
    "frames": ("Length in frames", "instead of seconds; 0 leaves it out"),
    "steps": ("Steps", "model evaluations; 0 takes the recipe's"),
    "seed": ("Seed", "-1 draws one and keeps it"),
    "negative_prompt": ("Negative prompt", "what not to show, for models with guidance (MiniMax-H3 has none)"),
    "guidance": ("Guidance", "one scale, or 4,3 for two experts; empty is the model's own (MiniMax-H3 has none)"),
    "round_size": ("Round the size", "to what the model can make"),
}
MAIN = ("prompt", "size", "seconds", "seed")
PICTURE_KINDS = ("picture", "pictures")


@dataclass(frozen=True, slots=True)
class FormField:
    """One input: the request's field it fills, how it looks, and its words."""

    name: str
    kind: str
    label: str
    info: str
    is_main: bool


def form_fields() -> tuple[FormField, ...]:
    """An input for every field of `Request`, in its order."""
    found = []
    for each in fields(Request):
        words = _WORDS.get(each.name, (each.name.replace("_", " ").capitalize(), ""))
        found.append(FormField(each.name, _KINDS.get(each.type, "text"), *words, is_main=each.name in MAIN))
    return tuple(found)


def sizes(family: Family) -> list[tuple[str, str]]:
    """Legal canvases as (label, value), the model's own choice first."""
    named = {"the model's own": ""}
    for wide, high in ASPECTS:
        width, height = family.canvas(wide, high)
        named.setdefault(f"{width}x{height} (about {wide}:{high})", f"{width}x{height}")
    return list(named.items())


def lengths(family: Family) -> tuple[float, float, float]:
    """Seconds of the shortest, the usual and the longest clip, rounded to tenths so that all are legal."""
    least, usual, most = family.lengths_s()
    return round(least + 0.049, 1), round(usual - 0.049, 1), round(most - 0.049, 1)


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """A filled form as fields of the desk: what was left alone is left out."""
    kept = {name: value for name, value in values.items() if value not in (None, "", [], False)}
    for name in ("steps", "frames", "seed"):
        if name in kept or values.get(name) == 0:
            number = int(values[name])
            kept[name] = number
            if number == 0 and name != "seed":
                del kept[name]
    if "frames" in kept:
        kept.pop("seconds", None)
    return kept


def prompts_of(text: str, *, is_one_per_line: bool) -> list[str]:
    """The prompts of the box: all of it, or one a line without blanks."""
    return [line.strip() for line in text.splitlines() if line.strip()] if is_one_per_line else [text]


def told_count(prompts: Sequence[str], repeats: int, seconds_each: float | None, told: str) -> str:
    """`12 prompts x 2 seeds = 24 clips, 39 frames (1.625 s) each, about 41 min`."""
    total = len(prompts) * repeats
    when = (
        f", about {round(total * seconds_each / 60, 1):g} min here"
        if seconds_each is not None
        else ", time not known before the first clip"
    )
    return f"{len(prompts)} prompt{'s' * (len(prompts) != 1)} x {repeats} = {total} clip{'s' * (total != 1)}, {told} each{when}"
