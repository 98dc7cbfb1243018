"""The package's one error form and how lists of keys are shown; knows nothing about adapters."""

from collections.abc import Iterable

_SHOWN = 5
_LONGEST = 160


def bad(what: str, got: object, expected: str, do: str) -> ValueError:
    """A `ValueError` in the project's form: `<what>: got <value>, expected <constraint>; <what to do>`."""
    shown = got if isinstance(got, str) else repr(got)
    return ValueError(f"{what}: got {shown}, expected {expected}; {do}")


def listed(keys: Iterable[str]) -> str:
    """Up to five keys in sorted order, each cut at 160 characters, and how many there are in all."""
    ordered = sorted(keys)
    shown = ", ".join(key if len(key) <= _LONGEST else key[: _LONGEST - 3] + "..." for key in ordered[:_SHOWN])
    return shown if len(ordered) <= _SHOWN else f"{shown}, ... ({len(ordered)} in all)"
