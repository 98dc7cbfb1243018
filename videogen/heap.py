"""Host memory that was freed, handed back to the system between clips; changes no value."""

import ctypes


def hand_back() -> None:
    """Ask the C library for its free pages: clips of changing shapes leave glibc's heap in pieces, which it keeps. Else nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
