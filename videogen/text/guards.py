"""What a written addition must pass before it joins a prompt: form, repetition, drift. Pure; knows no model and no family."""

import re
from collections import Counter
from collections.abc import Collection, Sequence

MAX_WORDS, MIN_WORDS = 90, 4
MAX_FOREIGN = 0.4  # of a sentence's content words; docs/text.md has what it was set on
REPEATED_SHARE = 0.8
_GRAM = 4
_STEM = 4

_META = re.compile(r"(?i)^(sure|certainly|of course|here(’s|'s| is| are| it is)|note:|as an ai|i (can|will|cannot)|user:|assistant:|okay)")
_MARKUP = re.compile(r"(<\|[^|]*\|>|https?://|```|[{}<>\[\]\\|#*_=]{1}|\b[A-Za-z]+ \d+:)")
_SENTENCE = re.compile(r"[^.!?]+[.!?]+")
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_EVERYDAY_TEXT = """
a an the and or but of in on at to from with without by for as is are was be been its it his her their they this that these
those there then than into onto over under up down out off while where when which who whose very more most some any all each
every no not only just like has have had will would can could may one two three also both through across around between toward
towards against along behind before after above below beyond within during until still again once so too
"""
_EVERYDAY = frozenset(_EVERYDAY_TEXT.split())


def words(text: str) -> list[str]:
    """The words of a text, lower case."""
    return _WORD.findall(text.lower())


def content(text: str) -> list[str]:
    """The words that carry meaning."""
    return [word for word in words(text) if len(word) > 2 and word not in _EVERYDAY]


def sentences(text: str) -> list[str]:
    """Whole sentences; what follows the last full stop is cut off."""
    return [match.group().strip() for match in _SENTENCE.finditer(text)]


def tidy(text: str, prompt: str) -> str:
    """One paragraph of whole sentences: no remarks about the task, no restated prompt, at most MAX_WORDS words."""
    flat = " ".join(text.replace("“", '"').replace("”", '"').split()).strip(' "')
    flat = flat[len(prompt) :].lstrip(" .,;:") if flat.lower().startswith(prompt.lower()) else flat
    kept: list[str] = []
    for sentence in sentences(flat):
        if _META.match(sentence) or _is_restated(sentence, prompt):
            continue
        if sum(len(words(each)) for each in [*kept, sentence]) > MAX_WORDS:
            break
        kept.append(sentence)
    whole = " ".join(kept)
    return whole if whole.count('"') % 2 == 0 else whole.replace('"', "")


def _is_restated(sentence: str, prompt: str) -> bool:
    said, asked = set(content(sentence)), set(content(prompt))
    return bool(said) and len(said & asked) / len(said) >= REPEATED_SHARE


def malformed(text: str) -> str:
    """Why a text is none that could stand in a prompt, or an empty string."""
    if len(words(text)) < MIN_WORDS:
        return "too short"
    found = _MARKUP.search(text)
    if found:
        return f"markup ({found.group()[:12]})"
    letters = [letter for letter in text if letter.isalpha()]
    return "another script" if sum(letter > "ɏ" for letter in letters) > len(letters) / 5 else ""


def repetitive(text: str) -> str:
    """Whether a text goes round in circles: a phrase of four words twice, or a sentence twice."""
    said = words(text)
    grams = Counter(tuple(said[i : i + _GRAM]) for i in range(len(said) - _GRAM + 1))
    if grams and (most := grams.most_common(1)[0])[1] > 1:
        return f"repeats {' '.join(most[0])!r}"
    return "repeats itself" if len(said) > 12 and len(set(said)) < len(said) / 2 else ""


def contradiction(prompt: str, addition: str, groups: Sequence[Sequence[re.Pattern[str]]]) -> str:
    """What an addition states against the prompt: another member of a group that excludes its members, or an empty string."""
    for group in groups:
        asked = [member for member in group if member.search(prompt)]
        for member in group:
            if asked and member not in asked and (found := member.search(addition)):
                return f"contradicts the prompt ({found.group().lower()!r})"
    return ""


def foreign_share(prompt: str, addition: str, known: Collection[str]) -> float:
    """The share of an addition's content words that neither the prompt nor `known` (the words of film) accounts for."""
    said = content(addition)
    stems = {word[:_STEM] for word in [*content(prompt), *known]}
    return sum(word[:_STEM] not in stems for word in said) / len(said) if said else 1.0


def drifted(prompt: str, addition: str, known: Collection[str]) -> str:
    """Why an addition is about something else than the prompt, or an empty string."""
    share = foreign_share(prompt, addition, known)
    return f"drifts ({share:.0%} of its words are about something else)" if share > MAX_FOREIGN else ""
