"""What an error at one clip says about the clips that follow; renders and writes nothing."""

import struct
import zlib

from videogen.errors import ClipFault, EnvironmentFault, VideogenError, say

# What one clip can raise without saying anything about the next one. EnvironmentFault ends the run: the next would fail too.
CLIP_ERRORS = (
    *(RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError, AssertionError),
    *(OSError, EOFError, ImportError, BufferError, struct.error, zlib.error),
)
_OF_MACHINE = (ClipFault, OSError, ImportError)
_DEAD_DEVICE = "CUDA error:"  # after one the process computes nothing any more


def describe(error: BaseException) -> str:
    """An error as the journal and the user get it: our own as they are, others with their kind."""
    return str(error) if isinstance(error, VideogenError) else f"{type(error).__name__}: {error}".strip()


def ends_the_run(error: BaseException) -> bool:
    """Whether the next clip would fail as well: a lacking environment, but not one that failed at a clip."""
    return isinstance(error, EnvironmentFault) and not isinstance(error, ClipFault)


def is_of_machine(error: BaseException) -> bool:
    """Whether it says something about the machine: a run bears one such clip, two in a row are no accident."""
    return isinstance(error, _OF_MACHINE)


def refuse_to_go_on(error: BaseException, *, is_second: bool) -> None:
    """Raise EnvironmentFault where the clips that follow would fail for the same reason, so that a night is not spent on failing."""
    advice = "run the same command to go on; this clip is tried again"
    if _DEAD_DEVICE in str(error):
        raise EnvironmentFault(say("device", describe(error)[:300], "one that still computes", advice)) from error
    if is_second and is_of_machine(error):
        got = f"two clips in a row that it failed at ({describe(error)[:1000]})"
        raise EnvironmentFault(say("machine", got, "one at most", f"mend it, then {advice}")) from error
