"""Paths as users write them: a home folder by `~`, names too long for any disk; touches nothing."""

from pathlib import Path

from videogen.errors import bad


def user_path(what: str, text: object) -> Path:
    """The path a user means by a text; `what` names it in errors.

    Raises RequestError for another type, an empty text, a NUL, and a `~name` that nobody has.
    """
    if not isinstance(text, str | Path) or not str(text) or "\0" in str(text):
        raise bad(what, text, "a path as text", "correct it")
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
