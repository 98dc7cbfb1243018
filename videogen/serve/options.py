"""What a server is started with, checked when it is made; the page and the API read the same values."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from videogen.errors import bad
from videogen.jobs.store import Limits

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")
MIN_KEY_CHARACTERS = 16
DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One server. Sizes in bytes, times in seconds; rates are requests a minute of one client.

    Raises RequestError for an address other machines can reach while there is no key.
    """

    root: Path
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[tuple[str, str], ...] = ()
    limits: Limits = DEFAULT_LIMITS
    max_body_bytes: int = 64_000_000
    max_upload_pixels: int = 40_000_000
    max_submits_per_minute: int = 600
    max_requests_per_minute: int = 12_000
    max_bad_keys_per_minute: int = 20
    max_listeners: int = 64
    abort_wait_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise bad("--port", self.port, "0 to 65535", "choose another port")
        if not self.is_loopback and not self.keys:
            raise bad("--host", self.host, "a loopback address while there is no key", "set VIDEOGEN_API_KEY, or use --host 127.0.0.1")
        for name, secret in self.keys:
            if len(secret) < MIN_KEY_CHARACTERS:
                raise bad(f"key of {name}", f"{len(secret)} characters", f"at least {MIN_KEY_CHARACTERS}", "make a longer one")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host in LOOPBACK_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def clips(self) -> Path:
        """Finished clips: the only folder anything is served from."""
        return self.root / "clips"

    @property
    def uploads(self) -> Path:
        """Pictures as the server stored them."""
        return self.root / "uploads"


def parse_keys(text: str) -> tuple[tuple[str, str], ...]:
    """`SECRET` or `NAME:SECRET,NAME:SECRET` as (name, secret) pairs; a name owns the jobs of its key.

    Raises RequestError for a name given twice or an empty part.
    """
    found: list[tuple[str, str]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, separator, secret = part.partition(":")
        pair = (name, secret) if separator else ("user", part)
        if not all(pair) or pair[0] in dict(found):
            raise bad(
                "VIDEOGEN_API_KEY", "a part that is empty or a name twice", "SECRET, or NAME:SECRET separated by commas", "correct it"
            )
        found.append(pair)
    return tuple(found)
