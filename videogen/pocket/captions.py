"""The words of the core world: attributes, captions and paraphrases; knows nothing of pixels or tensors."""

import hashlib
import random
from dataclasses import dataclass, replace

COUNTS = ("one", "two", "three")
SIZES = ("small", "large")
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "cyan", "white")
SHAPES = ("circle", "square", "triangle", "cross", "ring")
MOTIONS = ("still", "right", "left", "up", "down")
BACKGROUNDS = ("black", "gray", "navy", "brown")
PITCHES = ("low", "medium", "high", "silent")
PANS = ("left", "centre", "right")
SILENT = PITCHES.index("silent")

# chat form of the text encoder's second job: complete a short prompt into a full caption
EXPAND_PREFIX = "<|im_start|>user\n{short}<|im_end|>\n<|im_start|>assistant\n"
EXPAND_END = "<|im_end|>"

_PLURALS = {"cross": "crosses"}
_VERBS = {  # singular, plural
    "still": (("stays still", "stay still"), ("does not move", "do not move"), ("rests", "rest")),
    "right": (("moves right", "move right"), ("slides to the right", "slide to the right"), ("drifts right", "drift right")),
    "left": (("moves left", "move left"), ("slides to the left", "slide to the left"), ("drifts left", "drift left")),
    "up": (("moves up", "move up"), ("rises", "rise"), ("drifts upward", "drift upward")),
    "down": (("moves down", "move down"), ("sinks", "sink"), ("drifts downward", "drift downward")),
}
_PLACES = ("on a {} background", "over a {} background", "against a {} background")
_SILENCES = ("silence", "no sound", "no tone")
_SIDES = {
    "left": ("on the left", "from the left"),
    "centre": ("in the centre", "in the middle", "in the center", ""),
    "right": ("on the right", "from the right"),
}
_FORMS = (
    "{subject} {verb} {place}, {sound}",
    "{place}, {subject} {verb}, {sound}",
    "{subject} {place} {verb} with {sound}",
    "{sound}, {subject} {verb} {place}",
)
_PICTURED = ("the object in the picture", "the emblem from the picture", "the badge in the picture")


@dataclass(frozen=True, slots=True)
class Scene:
    """One clip in words, every field an index into the tuples above; `pan` is centre when the clip is silent."""

    count: int
    size: int
    colour: int
    shape: int
    motion: int
    background: int
    pitch: int
    pan: int


def draw_scene(rng: random.Random, *, held_out: bool) -> Scene:
    """A uniform random scene whose visible combination is (or is not) one of those kept for evaluation."""
    while True:
        pitch = rng.randrange(len(PITCHES))
        scene = Scene(
            count=rng.randrange(len(COUNTS)),
            size=rng.randrange(len(SIZES)),
            colour=rng.randrange(len(COLOURS)),
            shape=rng.randrange(len(SHAPES)),
            motion=rng.randrange(len(MOTIONS)),
            background=rng.randrange(len(BACKGROUNDS)),
            pitch=pitch,
            pan=PANS.index("centre") if pitch == SILENT else rng.randrange(len(PANS)),
        )
        if is_held_out(scene) == held_out:
            return scene


def is_held_out(scene: Scene) -> bool:
    """Whether the visible combination is among the tenth that no training clip shows."""
    key = (scene.count, scene.size, scene.colour, scene.shape, scene.motion, scene.background)
    return hashlib.sha256(repr(key).encode()).digest()[0] % 10 == 0


def subject(scene: Scene, *, with_size: bool = True) -> str:
    """The counted noun phrase, e.g. "two small red crosses"."""
    shape = SHAPES[scene.shape]
    noun = shape if scene.count == 0 else _PLURALS.get(shape, shape + "s")
    words = ["a" if scene.count == 0 else COUNTS[scene.count]]
    if with_size:
        words.append(SIZES[scene.size])
    elif scene.count == 0 and COLOURS[scene.colour][0] in "aeio":
        words = ["an"]
    return " ".join([*words, COLOURS[scene.colour], noun])


def verb(scene: Scene, rng: random.Random, *, plural: bool | None = None) -> str:
    """One phrasing of the motion, agreeing with the count."""
    many = scene.count > 0 if plural is None else plural
    return rng.choice(_VERBS[MOTIONS[scene.motion]])[int(many)]


def sound(scene: Scene, rng: random.Random) -> str:
    """One phrasing of pitch and side; a tone without a side is in the centre."""
    if scene.pitch == SILENT:
        return rng.choice(_SILENCES)
    return f"a {PITCHES[scene.pitch]} tone {rng.choice(_SIDES[PANS[scene.pan]])}".strip()


def place(scene: Scene, rng: random.Random) -> str:
    """One phrasing of the background."""
    return rng.choice(_PLACES).format(BACKGROUNDS[scene.background])


def full(scene: Scene, rng: random.Random) -> str:
    """A caption that states every attribute, in one of the paraphrases."""
    text = rng.choice(_FORMS).format(subject=subject(scene), verb=verb(scene, rng), place=place(scene, rng), sound=sound(scene, rng))
    return _maybe_sentence(text, rng)


def plain(scene: Scene) -> str:
    """The canonical full caption: first phrasing of everything."""
    return full(scene, _First())


def short(scene: Scene, rng: random.Random) -> str:
    """A caption that leaves attributes open, as people type them."""
    parts = [subject(scene, with_size=rng.random() < 0.3)]
    if rng.random() < 0.5:
        parts.append(verb(scene, rng))
    if rng.random() < 0.4:
        parts.append(place(scene, rng))
    text = " ".join(parts)
    if rng.random() < 0.3:
        text += ", " + sound(scene, rng)
    return _maybe_sentence(text, rng)


def animate(scene: Scene, rng: random.Random) -> str:
    """A caption for given first or last frames: it names what happens, not what is seen."""
    many = scene.count > 0
    who = rng.choice(("they", "the objects") if many else ("it", "the object"))
    return _maybe_sentence(f"{who} {verb(scene, rng)}, {sound(scene, rng)}", rng)


def pictured(scene: Scene, rng: random.Random) -> str:
    """A caption for a reference picture: the emblem itself cannot be said in words."""
    text = rng.choice(_FORMS).format(
        subject=rng.choice(_PICTURED), verb=verb(scene, rng, plural=False), place=place(scene, rng), sound=sound(scene, rng)
    )
    return _maybe_sentence(text, rng)


def as_badge(scene: Scene) -> Scene:
    """The scene of a reference clip: a single large square tile, everything else unchanged."""
    return replace(scene, count=0, size=1, shape=SHAPES.index("square"))


def expansion(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """A chat-form short prompt and the full caption that completes it, agreeing in all that the short one says."""
    return EXPAND_PREFIX.format(short=short(scene, rng)), full(scene, rng) + EXPAND_END


def _maybe_sentence(text: str, rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.15:
        text = text[0].upper() + text[1:]
    return text + "." if roll < 0.08 else text


class _First(random.Random):
    """A source of choices that always takes the first, for the canonical caption."""

    def choice(self, seq):  # type: ignore[no-untyped-def]
        return seq[0]

    def random(self) -> float:
        return 1.0
