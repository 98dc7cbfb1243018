"""Random seeds, drawn from the operating system and never from a GPU."""

import secrets

MAX_DRAWN_SEED = 2**32


def draw_seed() -> int:
    """A seed from 0 to 2^32 - 1."""
    return secrets.randbelow(MAX_DRAWN_SEED)
