"""The prompt form of pocket-h3: its caption grammar, read from a prompt and continued in it. Pure."""

import random
import re
from dataclasses import replace
from typing import Any

from videogen.pocket import captions
from videogen.pocket.captions import Scene
from videogen.text.film import Messages

ADDED = ("motion", "background", "sound")  # what can follow a subject; count, size, colour and shape stand before the noun
_MOTIONS = {
    "still": r"stays? still|do(?:es)? not move|rests?|still",
    "right": r"(?:moves?|slides?|drifts?)(?: to the)? right",
    "left": r"(?:moves?|slides?|drifts?)(?: to the)? left",
    "up": r"moves? up|rises?|drifts? upwards?",
    "down": r"moves? down|sinks?|drifts? downwards?",
}
_SIDES = {"left": r"(?:on|from) the left", "right": r"(?:on|from) the right", "centre": r"in the (?:centre|center|middle)"}
_COUNTS = {"one": r"an?|one", "two": "two|2", "three": "three|3"}
_SILENCE = re.compile(r"(?i)\b(?:silence|silent|no sound|no tone)\b")
_NOUN = rf"(?:(?:{'|'.join(captions.SIZES + captions.COLOURS)}) )*(?:{'|'.join(captions.SHAPES)})(?:e?s)?\b"


class _Plain(random.Random):
    """Takes the first of every choice: the grammar's plainest words."""

    def choice(self, seq: Any) -> Any:
        """The first."""
        return seq[0]


def _first(text: str, values: tuple[str, ...], pattern: str) -> int | None:
    """The index of the value that a text names first; `pattern` holds `{}` for the value."""
    tried = [(re.search(pattern.format(value), text, re.IGNORECASE), index) for index, value in enumerate(values)]
    found = [(match.start(), index) for match, index in tried if match]
    return min(found)[1] if found else None


def stated(text: str) -> dict[str, int]:
    """The attributes a caption names, each as an index into the tuples of `pocket.captions`; `sound` is the pitch."""
    sides = re.search(r"(?i)\btone\b(.*)", text)
    pitch = captions.SILENT if _SILENCE.search(text) else _first(text, captions.PITCHES[: captions.SILENT], r"\b{}(?:-pitched)? tone\b")
    values = {
        "count": _first(text, tuple(_COUNTS[each] for each in captions.COUNTS), rf"\b(?:{{}}) {_NOUN}"),
        "size": _first(text, captions.SIZES, r"\b{}\b"),
        "colour": _first(text, captions.COLOURS, r"\b{}\b"),
        "shape": _first(text, captions.SHAPES, r"\b{}(?:e?s)?\b"),
        "motion": _first(text, tuple(_MOTIONS[each] for each in captions.MOTIONS), r"\b(?:{})\b"),
        "background": _first(text, captions.BACKGROUNDS, r"\b{} background\b"),
        "sound": pitch,
        "pan": _first(sides.group(1) if sides else "", tuple(_SIDES[each] for each in captions.PANS), "{}"),
    }
    return {name: value for name, value in values.items() if value is not None}


class GrammarForm:
    """Continues a prompt in the caption grammar with what it leaves open: motion, background, sound."""

    name = "pocket"
    end = captions.EXPAND_END

    def messages(self, prompt: str) -> Messages:
        """The short prompt as the only message: the form that pocket's text model was trained on."""
        return [{"role": "user", "content": prompt}]

    def judge(self, prompt: str, written: str, *, has_seen: bool = False) -> tuple[str, str]:
        """(the addition, reason against it): a completion that changes a stated attribute has drifted."""
        asked, got = stated(prompt), stated(written)
        for name, value in asked.items():
            if name in got and got[name] != value:
                return "", f"contradicts the prompt ({name})"
        lacking = [name for name in ADDED if name not in asked and name not in got]
        if lacking:
            return "", f"leaves open {', '.join(lacking)}"
        return _continued(prompt, asked, got), ""

    def template(self, prompt: str, rng: random.Random, addition: str = "") -> str:
        """What is left open, drawn by `rng`."""
        scene = captions.draw_scene(rng, held_out=False)
        asked = stated(f"{prompt} {addition}")
        drawn = {"motion": scene.motion, "background": scene.background, "sound": scene.pitch, "pan": scene.pan}
        return _continued(prompt, asked, drawn)

    def join(self, prompt: str, addition: str) -> str:
        """The prompt, verbatim and first, and the addition; after a full stop as a sentence of its own."""
        if not addition:
            return prompt
        if prompt.rstrip()[-1:] in (".", "!", "?"):
            return f"{prompt} {addition[:1].upper()}{addition[1:]}."
        return prompt + (addition if addition.startswith(",") else f" {addition}")


def _continued(prompt: str, asked: dict[str, int], given: dict[str, int]) -> str:
    """The clause that adds to a prompt what it leaves open, in the grammar's own order and its plainest words."""
    plain = _Plain()
    scene = Scene(
        count=asked.get("count", given.get("count", 0)),
        size=0,
        colour=0,
        shape=0,
        motion=given.get("motion", 0),
        background=given.get("background", 0),
        pitch=given.get("sound", captions.SILENT),
        pan=given.get("pan", captions.PANS.index("centre")),
    )
    is_sentence = prompt.rstrip()[-1:] in (".", "!", "?")
    verb = "" if "motion" in asked else captions.verb(scene, plain)
    pronoun = "they" if scene.count else "it"
    if is_sentence or ("sound" in asked and verb):
        head = f"{pronoun} {verb or captions.verb(replace(scene, motion=asked.get('motion', 0)), plain)}"
        head = head if is_sentence else f", {head}"
    else:
        head = verb
    place = "" if "background" in asked else captions.place(scene, plain)
    sound = "" if "sound" in asked else captions.sound(scene, plain)
    if not verb and not place and not sound:
        return ""
    clause = " ".join(part for part in (head if verb or is_sentence else "", place) if part)
    return ", ".join(part for part in (clause, sound) if part) if clause else f", {sound}"
