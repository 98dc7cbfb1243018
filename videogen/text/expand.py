"""A short prompt made a full one: the user's words first and unchanged, then what a model or the template adds, guarded."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from PIL import Image

from videogen.identity import hash_picture
from videogen.text.film import SEEN
from videogen.text.model import TextModel, load_text
from videogen.text.remote import RemoteModel
from videogen.text.source import TextSource

LIMITS = {"pocket": 48, "film": 160}  # tokens
ATTEMPTS = 2
_NOBODY = "a scene"  # what the likelihood guard puts in the prompt's place
SCHEMA = "videogen.expansion/1"


class Writer(Protocol):
    """What answers: a model in memory, or a server."""

    @property
    def sees(self) -> bool:
        """Whether it takes pictures."""
        ...

    def write(self, messages: Sequence[dict[str, Any]], seed: int, *, limit: int, pictures: Sequence[Image.Image] = ()) -> str:
        """The answer to a conversation."""
        ...

    def likelihood(self, messages: Sequence[dict[str, Any]], answer: str) -> float | None:
        """Mean log probability of an answer, where it can be had."""
        ...


class Form(Protocol):
    """How one family's prompts are written: `videogen.text.film`, `videogen.text.grammar`."""

    @property
    def name(self) -> str:
        """`film` or `pocket`."""
        ...

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """The conversation that asks for an addition."""
        ...

    def judge(self, prompt: str, written: str, *, has_seen: bool = False) -> tuple[str, str]:
        """(addition, reason against it)."""
        ...

    def template(self, prompt: str, rng: random.Random, addition: str = "") -> str:
        """What is still open, by rule."""
        ...

    def join(self, prompt: str, addition: str) -> str:
        """Prompt and addition as one text."""
        ...


@dataclass(frozen=True, slots=True)
class Expanded:
    """A prompt and what became of it.

    outcome is `written` (by the model), `template` (asked for, or because of `reason`) or `unchanged` (nothing was open).
    """

    original: str
    text: str
    source: TextSource
    outcome: str
    reason: str
    seed: int
    form: str
    pictures_seen: int = 0

    def record(self) -> dict[str, Any]:
        """The sidecar's `expansion` entry."""
        return {
            "schema": SCHEMA,
            "original": self.original,
            "text": self.text,
            "source": self.source.name if self.source.kind != "folder" else self.source.name.rpartition("/")[2],
            "identity": self.source.identity,
            "outcome": self.outcome,
            "reason": self.reason,
            "seed": self.seed,
            "form": self.form,
            "pictures_seen": self.pictures_seen,
        }


@dataclass(slots=True)
class Expander:
    """Expands prompts of one family; a text model is loaded at the first prompt that needs it and stays."""

    form: Form
    device: torch.device
    dtype: torch.dtype
    _writers: dict[str, Writer] = field(default_factory=dict)
    _last: tuple[Any, Expanded] | None = None

    def expand(
        self, source: TextSource, prompt: str, seed: int, *, own: Callable[[], TextModel | str], pictures: Sequence[Image.Image] = ()
    ) -> Expanded:
        """The same for the same source, prompt and seed on one device.

        `own` gives the pipeline's text encoder, or why it cannot write. Raises EnvironmentFault when a model does not load or a
        server does not answer: what was asked for is not there. An answer that fails a guard costs `ATTEMPTS`, then the
        template takes its place, and the record says why. What was written last is kept, so that a second attempt at the same clip
        has the same words wherever the weights live then.
        """
        key = (source, prompt, seed, tuple(map(hash_picture, pictures)))
        if self._last is None or self._last[0] != key:
            self._last = None
            expanded = self._expand(source, prompt, seed, own, pictures)
            self._last = None if expanded.reason else (key, expanded)
            return expanded
        return self._last[1]

    def _expand(
        self, source: TextSource, prompt: str, seed: int, own: Callable[[], TextModel | str], pictures: Sequence[Image.Image]
    ) -> Expanded:
        writer, reason = self._writer(source, own)
        addition, seen = "", 0
        if writer is not None:
            shown = list(pictures) if writer.sees else []
            addition, reason = self._written(writer, prompt, seed, shown)
            seen = 0 if reason else len(shown)
        rest = self.form.template(prompt, random.Random(f"{seed} {prompt}"), addition)
        whole = " ".join(each for each in (addition, rest) if each)
        outcome = "unchanged" if not whole else "written" if addition else "template"
        return Expanded(prompt, self.form.join(prompt, whole), source, outcome, reason, seed, self.form.name, seen)

    def _writer(self, source: TextSource, own: Callable[[], TextModel | str]) -> tuple[Writer | None, str]:
        if source.kind == "template":
            return None, ""
        if source.kind == "own":
            found = own()
            return (None, found) if isinstance(found, str) else (found, "")
        if source.identity not in self._writers:
            is_remote = source.kind == "remote"
            self._writers[source.identity] = RemoteModel(source).open() if is_remote else load_text(source, self.device, self.dtype)
        return self._writers[source.identity], ""

    def _written(self, writer: Writer, prompt: str, seed: int, pictures: Sequence[Image.Image]) -> tuple[str, str]:
        """(addition, "") of the first answer that passes every guard, or ("", why the last one did not)."""
        messages, reason = self.form.messages(prompt), ""
        if pictures and self.form.name == "film":
            messages[0] = messages[0] | {"content": messages[0]["content"] + SEEN}
        for attempt in range(ATTEMPTS):
            answer = writer.write(messages, seed + attempt, limit=LIMITS[self.form.name], pictures=pictures)
            addition, reason = self.form.judge(prompt, answer, has_seen=bool(pictures))
            if not reason and self.form.name == "film" and not pictures:
                reason = self._unrelated(writer, messages, addition)
            if not reason:
                return addition, ""
        return "", reason

    def _unrelated(self, writer: Writer, messages: Sequence[dict[str, str]], addition: str) -> str:
        """An addition about the prompt is likelier after it than after no prompt at all, by the model's own count."""
        with_prompt = writer.likelihood(messages, addition)
        if with_prompt is None:
            return ""
        nobody = [*messages[:-1], {"role": messages[-1]["role"], "content": _NOBODY}]
        gain = with_prompt - (writer.likelihood(nobody, addition) or 0.0)
        return "" if gain > 0 else f"drifts (no likelier after the prompt than without it: {gain:+.3f} a token)"
