"""File names from a template: safe, distinct and short; touches no disk."""

import re
import string
import unicodedata
from collections.abc import Callable
from typing import Any

from videogen.errors import bad

DEFAULT_TEMPLATE = "{index:04d}-{prompt:40}-{seed}"
MAX_BYTES = 180
FIELDS = ("index", "id", "seed", "prompt", "model", "recipe", "size", "frames", "steps", "stem")

_COUNTED = ("index", "seed", "frames", "steps")
_NUMBER, _CUT = re.compile(r"\d{0,3}d?"), re.compile(r"\d{0,3}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def safe(text: str, max_bytes: int = MAX_BYTES) -> str:
    """Text as a file name: ASCII letters, digits, `.`, `_`, `-`; never empty, hidden or longer than `max_bytes`."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    cleaned = _UNSAFE.sub("-", plain)
    cleaned = re.sub(r"-{2,}", "-", re.sub(r"\.{2,}", ".", cleaned))[:max_bytes].strip("-.")
    return cleaned or "clip"


class _Text(str):
    """A value whose format width cuts instead of pads: `{prompt:40}` is its first 40 safe characters."""

    def __format__(self, spec: str) -> str:
        return safe(self, int(spec)) if spec.isdigit() else safe(self) if not spec else super().__format__(spec)


def check_template(template: str) -> str:
    """The template itself.

    Raises RequestError for an unknown placeholder, a broken brace or a path separator.
    """
    try:
        placeholders = [(name, width or "", turned) for _, name, width, turned in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise bad("name template", template, "placeholders such as {index:04d} or {prompt:40}", str(error)) from None
    for name, width, turned in placeholders:
        if name not in FIELDS:
            raise bad("name template", template, f"placeholders out of {', '.join(FIELDS)}", f"replace {{{name}}}")
        if turned or not (_NUMBER if name in _COUNTED else _CUT).fullmatch(width):
            raise bad("name template", template, "widths such as {index:04d} or {prompt:40}, up to three digits", f"correct {{{name}}}")
    if "/" in template or "\\" in template or "\0" in template:
        raise bad("name template", template, "a file name without folders", "use --output-dir for the folder")
    return template


def render_name(template: str, values: dict[str, Any]) -> str:
    """A safe name (no ending) for one clip."""
    return safe(template.format(**{k: v if isinstance(v, int) else _Text(v) for k, v in values.items()}))


def distinct(name: str, is_taken: Callable[[str], bool]) -> str:
    """The name, or the name with `-2`, `-3`, ... where it is taken; compared without case, as some disks do."""
    if not is_taken(name.lower()):
        return name
    taken, free, stem = 1, 2, name[: MAX_BYTES - 8]
    while is_taken(f"{stem}-{free}".lower()):  # in doubling steps, then halving: ten thousand clips may ask for one name
        taken, free = free, 2 * free
    while free - taken > 1:
        between = (taken + free) // 2
        taken, free = (between, free) if is_taken(f"{stem}-{between}".lower()) else (taken, between)
    return f"{stem}-{free}"
