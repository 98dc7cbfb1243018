"""The prompt form of film models (MiniMax-H3): prose that names camera, light, motion and sound after the subject. Pure."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from videogen.text.guards import contradiction, drifted, malformed, repetitive, sentences, tidy, words

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Aspect:
    """One thing a prompt may name: `said` finds it; `phrases` say it when nobody did."""

    name: str
    said: re.Pattern[str]
    phrases: tuple[str, ...]


def _any(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?i)\b(?:{text})\b")


_NIGHT = _any(r"night|nights|midnight|moon\w*|stars|starry|dark|neon")
_LATE = _any(r"sunset|dusk|dawn|sunrise|twilight|golden hour|evening")
_DAY = _any(r"noon|midday|daylight|sunny|sunlight|morning|afternoon")

CAMERA = Aspect(
    "camera",
    _any(
        r"camera\w*|lens|shot|close-?up|handheld|tracking|tracks|dolly|pans?|panning|zooms?|zooming|aerial|drone|tripod|"
        r"wide angle|point of view|pov"
    ),
    (
        "The camera holds still at eye level.",
        "The camera pushes in slowly and evenly.",
        "The camera tracks sideways at an even pace.",
        "The camera follows closely, handheld, with a slight sway.",
        "The camera circles slowly, keeping the subject in the middle.",
        "A wide shot from a low angle, the camera rising gently.",
    ),
)
LIGHT = Aspect(
    "light",
    _any(
        r"light\w*|lit|sun\w*|shadow\w*|shade|glow\w*|dark\w*|bright\w*|backlit|overcast|neon|lamp\w*|candle\w*|moon\w*|dawn|dusk|silhouette"
    ),
    (
        "Soft daylight from the side gives every surface depth.",
        "Even, overcast light without hard shadows.",
        "Warm light from behind draws a thin bright edge.",
        "Clear light with crisp shadows and natural colours.",
    ),
)
_NIGHT_LIGHT = (
    "Small, warm sources of light stand out from deep shadows.",
    "Cool light from above leaves most of the frame dark.",
)
_LATE_LIGHT = ("Low, warm light throws long shadows.", "The last warm light fades into blue.")
MOTION = Aspect(
    "motion",
    _any(
        r"mov\w+|motion|walk\w*|run\w*|flow\w*|drift\w*|spin\w*|turn\w*|rotat\w+|jump\w*|fly|flies|flying|fall\w*|ris(?:es?|ing)|"
        r"swim\w*|danc\w+|driv\w+|ride|rides|riding|climb\w*|crawl\w*|float\w*|swing\w*|sway\w*|wav(?:es|ing)|slow motion|speed\w*|"
        r"gallop\w*"
    ),
    (
        "Movement is slow and continuous from the first frame to the last.",
        "Small natural movements run through the whole clip.",
        "The movement begins gently and gains pace.",
        "Everything moves smoothly, without a cut.",
    ),
)
SOUND = Aspect(
    "sound",
    _any(
        r"sound\w*|silen\w+|quiet\w*|nois\w+|music|melody|song|sing\w*|voice\w*|speak\w*|talk\w*|say\w*|hum\w*|roar\w*|whisper\w*|audio|"
        r"ambien\w+|hear\w*|echo\w*|bark\w*|chirp\w*|tones?|rumbl\w+|rustl\w+"
    ),
    (
        "Sound: the quiet ambience of the place, close and clear, without music.",
        "Sound: soft natural noises that follow the movement, no voices.",
        "Sound: a calm background ambience with a few near details.",
    ),
)
ASPECTS = (CAMERA, LIGHT, MOTION, SOUND)

EXCLUSIVE: tuple[tuple[re.Pattern[str], ...], ...] = (
    (_NIGHT, _LATE, _DAY),
    (
        _any(r"static|still camera|camera (?:holds|stays|is) (?:perfectly )?still|locked[- ]off|tripod"),
        _any(r"handheld|dolly|drone|tracks|pans"),
    ),
    (_any(r"silent|silence|no sound|without sound"), _any(r"music|voices?|loud\w*|roar\w*|noise\w*")),
    (_any(r"indoors|inside|interior"), _any(r"outdoors|outside|exterior")),
    (_any(r"winter|snow\w*"), _any(r"summer|heat\w*")),
    (_any(r"slow motion|slowly"), _any(r"rapid\w*|frantic\w*|fast-paced")),
)

_MORE = (
    "wide angle frame frames background foreground focus depth field distance slow slowly gentle gently smooth steady still even soft "
    "softly warm cool cold hard low high bright dark deep faint clear crisp natural golden blue pale dim diffuse diffused reflection "
    "reflections shadow shadows shade glow glint highlights silhouette contrast colour colours color colors tone tones texture surface "
    "surfaces edge edges side front behind left right centre center middle top bottom move moves moving movement drift drifts turn turns "
    "rise rises fall falls sway sways ripple ripples pass passes follow follows circle circles track tracks push pushes pull pulls pan "
    "pans zoom zooms hold holds close closely near far away quiet quietly sound sounds noise hum murmur rustle rustles echo echoes "
    "ambience ambient silence music voice voices faintly background air wind breeze day night morning evening scene clip shot view level "
    "eye time moment subject detail details begins ends across slight slightly pace rhythm sky ground hear heard see seen visible light "
    "lights lit sun sunlight camera lens handheld tripod whole entire atmosphere mood calm"
)
KNOWN_WORDS = frozenset([*_MORE.split(), *(word for aspect in ASPECTS for phrase in aspect.phrases for word in words(phrase))])

_SYSTEM = (
    "You complete descriptions of short video clips. You get one sentence. Answer with two to four short sentences that describe, in this "
    "order, the camera, the light, the movement and the sound. Add no people, animals or objects, change nothing that was said, and do "
    "not repeat the sentence."
)
SEEN = " The pictures are what the clip refers to: describe in the first sentence what they show."
_EXAMPLE = (
    "a small wooden boat on a calm lake",
    "The camera glides low over the water towards the bow. Soft morning light comes from the left and glints on the ripples. The boat "
    "rocks slightly and turns with the breeze. Water laps quietly against the wood, and nothing else is heard.",
)


class FilmForm:
    """Prose for H3 and models like it; `has_sound` says whether the model makes sound at all."""

    name = "film"
    end = ""

    def __init__(self, *, has_sound: bool = True) -> None:
        self.aspects = ASPECTS if has_sound else ASPECTS[:-1]

    def messages(self, prompt: str) -> Messages:
        """The conversation whose last answer completes the prompt; all but its last message is the same for every prompt."""
        given, answer = _EXAMPLE
        said = [("system", _SYSTEM), ("user", given), ("assistant", answer), ("user", prompt)]
        return [{"role": role, "content": text} for role, text in said]

    def judge(self, prompt: str, written: str, *, has_seen: bool = False) -> tuple[str, str]:
        """(addition, reason against it): the reason is empty for an addition that may stand.

        Who has seen pictures may name what no word of the prompt accounts for: sentences are then not held against its words.
        """
        whole = tidy(written, prompt)
        against = malformed(whole) or repetitive(whole) or contradiction(prompt, whole, EXCLUSIVE)
        if against:
            return "", against
        kept = [each for each in sentences(whole) if has_seen or not drifted(prompt, each, KNOWN_WORDS)]
        return " ".join(kept), "" if kept else drifted(prompt, whole, KNOWN_WORDS) or "drifts in every sentence"

    def template(self, prompt: str, rng: random.Random, addition: str = "") -> str:
        """Sentences for every aspect that neither the prompt nor `addition` names; the same for the same `rng`."""
        chosen = [(aspect, rng.choice(self._phrases(aspect, prompt))) for aspect in self.aspects]  # drawn for all: one never moves another
        return " ".join(phrase for aspect, phrase in chosen if not aspect.said.search(f"{prompt} {addition}"))

    def _phrases(self, aspect: Aspect, prompt: str) -> Sequence[str]:
        if aspect is LIGHT:
            return _NIGHT_LIGHT if _NIGHT.search(prompt) else _LATE_LIGHT if _LATE.search(prompt) else aspect.phrases
        still = [phrase for phrase in aspect.phrases if not contradiction(prompt, phrase, EXCLUSIVE)]
        return still or aspect.phrases[:1]

    def join(self, prompt: str, addition: str) -> str:
        """The prompt, verbatim and first, and the addition after it."""
        if not addition:
            return prompt
        ends = prompt.rstrip()[-1:] in ".!?…。！？"
        return f"{prompt}{'' if ends else '.'} {addition}"
