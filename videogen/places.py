"""Paths as users write them: a home folder by `~`, names that no disk takes."""

import os
from pathlib import Path

from videogen.errors import bad

MAX_NAME_BYTES = 255  # of every common file system


def user_path(what: str, text: object) -> Path:
    """The path a user means by a text; `what` names it in errors.

    Raises RequestError for another type, an empty text, a NUL, a name too long for a disk, and a `~name` that nobody has.
    """
    if not isinstance(text, str | Path) or not str(text) or "\0" in str(text):
        raise bad(what, text, "a path as text", "correct it")
    try:
        longest = max((len(os.fsencode(part)) for part in Path(text).parts), default=0)
    except UnicodeEncodeError:
        raise bad(what, str(text), "valid Unicode", "remove the broken characters") from None
    if longest > MAX_NAME_BYTES:
        raise bad(what, f"a name of {longest} bytes", f"at most {MAX_NAME_BYTES} bytes for a file or folder", "shorten it")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise bad(what, str(text), "a home folder that exists", "write the path in full, or ./~NAME for a file") from None


def is_there(path: Path) -> bool:
    """Whether something is there; no for a name that no file could have (too long, or not of this disk's characters)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
