"""The errors a user can meet, in one form; knows nothing about where they are shown."""

import reprlib

_SHORT = reprlib.Repr()  # a value of a few bytes can be endless when it is written out: YAML's aliases
_SHORT.maxlevel = 3
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 12
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 1000


class VideogenError(Exception):
    """Base of every error that carries a complete message for the user."""


class RequestError(VideogenError, ValueError):
    """Bad input: found before any weight loads (exit code 2)."""


class EnvironmentFault(VideogenError, RuntimeError):
    """The machine lacks something: weights, space, a device (exit code 3)."""


class ClipFault(EnvironmentFault):
    """The machine failed at one clip; the next may succeed, and a run goes on unless that one fails so too."""


class DoesNotFit(VideogenError, RuntimeError):
    """A clip needs more memory than there is; others may need less."""


class CancelledRender(VideogenError):
    """The user asked to stop; raised between steps only."""


def say(what: str, got: object, expected: str, do: str) -> str:
    """The project's one error form: `<what>: got <value>, expected <constraint>; <what to do>`."""
    return f"{what}: got {got}, expected {expected}; {do}"


def bad(what: str, got: object, expected: str, do: str) -> RequestError:
    """A `RequestError` in the project's form; `got` is shown as its repr, cut at 120 characters."""
    try:
        shown = _SHORT.repr(got)
    except ValueError:  # a number of more digits than Python writes out
        shown = f"a value of type {type(got).__name__} with too many digits"
    return RequestError(say(what, shown if len(shown) <= 120 else shown[:117] + "...", expected, do))
