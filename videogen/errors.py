"""The errors a user can meet, in one form; knows nothing about where they are shown."""


class VideogenError(Exception):
    """Base of every error that carries a complete message for the user."""


class RequestError(VideogenError, ValueError):
    """Bad input: found before any weight loads (exit code 2)."""


class EnvironmentFault(VideogenError, RuntimeError):
    """The machine lacks something: weights, space, a device (exit code 3)."""


class CancelledRender(VideogenError):
    """The user asked to stop; raised between steps only."""


def say(what: str, got: object, expected: str, do: str) -> str:
    """The project's one error form: `<what>: got <value>, expected <constraint>; <what to do>`."""
    return f"{what}: got {got}, expected {expected}; {do}"


def bad(what: str, got: object, expected: str, do: str) -> RequestError:
    """A `RequestError` in the project's form; `got` is shown as its repr, cut at 120 characters."""
    shown = repr(got)
    return RequestError(say(what, shown if len(shown) <= 120 else shown[:117] + "...", expected, do))
