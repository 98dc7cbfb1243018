"""Checks of single values that options share: text, whole numbers, flags, tuples; each raises RequestError naming the value."""

from videogen.errors import bad

MAX_GUIDANCE = 100
MAX_SIDE_PX = 16_384


def check_prompt(prompt: object, what: str = "prompt") -> None:
    """One text with something to see in it, in valid Unicode."""
    if not isinstance(prompt, str):
        raise bad(what, prompt, "one text per clip", "pass a single string; use one request per prompt")
    if not prompt.strip():
        raise bad(what, prompt, "at least one visible character", "say what the clip should show")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise bad(what, prompt, "valid Unicode", "remove the broken characters (check the file's encoding)") from None


def check_whole(what: str, value: object, low: int, high: int) -> None:
    """A whole number in a range, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad(what, value, f"a whole number from {low} to {high}", f"change {what}")


def is_number(value: object) -> bool:
    """Whether it is a number that arithmetic can go on with: neither NaN nor infinite nor wider than a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def check_flag(what: str, value: object) -> None:
    """True or False, and nothing that only looks like one."""
    if not isinstance(value, bool):
        raise bad(what, value, "True or False", f"change {what}")


def check_tuple(what: str, values: object, kind: type) -> None:
    """A tuple of values of one type."""
    if not isinstance(values, tuple) or not all(isinstance(each, kind) for each in values):
        raise bad(what, values, f"a tuple of {kind.__name__}", f"change {what}")


def check_size(size: object) -> None:
    """(width, height) in pixels, or None."""
    if size is None:
        return
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise bad("size", size, "(width, height)", "pass two numbers")
    for what, side in zip(("width", "height"), size):
        if side is None:
            raise bad(what, side, f"a whole number from 1 to {MAX_SIDE_PX}", f"change {what}")
        check_whole(what, side, 1, MAX_SIDE_PX)


def check_guidance(scales: object) -> None:
    """One guidance scale or two, or None."""
    if scales is None:
        return
    is_list = isinstance(scales, tuple | list) and len(scales) in (1, 2)
    if not is_list or not all(is_number(each) and 0 <= each <= MAX_GUIDANCE for each in scales):  # type: ignore[attr-defined]
        raise bad("guidance", scales, f"one or two scales from 0 to {MAX_GUIDANCE}", "change guidance")
