"""One value of a job as its type, or an error that names the place; knows nothing of the job around it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from videogen.config import SHIPPED, AdapterUse
from videogen.errors import bad
from videogen.places import user_path
from videogen.priors import MeasuredPrior, open_prior
from videogen.recipes import parse_adapter
from videogen.text.source import TextSource, find_text_source


def whole(place: str, key: str, value: Any) -> int:
    """A whole number, also as text or as 5.0. Raises RequestError naming place and key."""
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise bad(f"{place}: {key}", value, "a whole number", f"correct {key}") from None


def number(place: str, key: str, value: Any, expected: str) -> float:
    """A number, also as text, with an `s` for seconds behind it. Raises RequestError naming place and key."""
    text = value.strip().removesuffix("s") if isinstance(value, str) else value
    try:
        if isinstance(text, bool):
            raise ValueError
        return float(text)
    except (TypeError, ValueError, OverflowError):
        raise bad(f"{place}: {key}", value, expected, f"correct {key}") from None


def media_path(place: str, key: str, value: Any, folder: Path) -> Path:
    """The path of a picture; a relative one starts at `folder`. Raises RequestError naming place and key."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise bad(f"{place}: {key}", value, "a path", f"correct {key}")
    if str(value).startswith(("http://", "https://")):
        raise bad(f"{place}: {key}", value, "a path on this machine", "download the picture first")
    path = user_path(f"{place}: {key}", value)
    return path if path.is_absolute() else folder / path


def flag(place: str, key: str, value: Any) -> bool:
    """Yes or no in one of its spellings. Raises RequestError naming place and key."""
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in known:
        raise bad(f"{place}: {key}", value, "true or false", f"correct {key}")
    return known[str(value).lower()]


def text_source(value: Any, folder: Path) -> TextSource | None:
    """What completes a prompt: a source by name, `true` for the pipeline's own text encoder, `false` for nothing."""
    if str(value).lower() in ("false", "no", "none", "off", "0"):
        return None
    return find_text_source("own" if str(value).lower() in ("true", "yes", "1") else value, folder)


def scales(place: str, value: Any) -> tuple[float, ...]:
    """Guidance scales: a number, two in a list, or text such as `4` or `4,3`."""
    parts = value.replace(",", " ").split() if isinstance(value, str) else listed(value)
    return tuple(number(place, "guidance", part, "one or two numbers, such as 4,3") for part in parts)


def listed(value: Any) -> list[Any]:
    """A list, or the one value in a list."""
    return [*value] if isinstance(value, list | tuple) else [value]


def cache_prior(place: str, value: Any, folder: Path) -> MeasuredPrior:
    """The prior that a job names; a relative path starts at the job file's folder."""
    if not isinstance(value, str) or not value:
        raise bad(f"{place}: cache_prior", value, "a file of `videogen calibrate --prior-only`", "correct cache_prior")
    return open_prior(folder / user_path(f"{place}: cache_prior", value), what=f"{place}: cache_prior")


def adapter_use(place: str, value: Any, folder: Path) -> AdapterUse:
    """One adapter of a job: `FILE:STRENGTH`, or {file, strength, expert}; a relative path starts at the job file's folder."""
    if isinstance(value, Mapping) and "file" in value and value.keys() <= {"file", "strength", "expert"}:
        strength = None if value.get("strength") is None else number(place, "strength", value["strength"], "a number")
        use = AdapterUse(value["file"], strength, expert=value.get("expert") or "")
    elif isinstance(value, str):
        use = parse_adapter(value)
    else:
        raise bad("lora", value, "FILE, FILE:STRENGTH, or {file, strength, expert}", "correct lora")
    return use if use.file.startswith(SHIPPED) else replace(use, file=str(folder / user_path(f"{place}: lora", use.file)))
