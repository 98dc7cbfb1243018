"""Who may ask and how often: keys compared in constant time, links signed for players, buckets for rates."""

import hashlib
import hmac
import secrets
import threading
import time
from dataclasses import dataclass, field

LINK_S = 6 * 3600.0
ANYONE = "local"  # the owner of everything on a loopback server without keys


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


class Keys:
    """The keys of a server, as digests. Without any, everybody who reaches the server is `ANYONE`."""

    def __init__(self, pairs: tuple[tuple[str, str], ...]) -> None:
        self._digests = tuple((name, _digest(secret)) for name, secret in pairs)

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._digests

    def owner(self, secret: str) -> str | None:
        """Whose key this is. Every key is compared, with equal work whatever the secret and whichever one fits."""
        given, found = _digest(secret), None
        for name, digest in self._digests:
            if hmac.compare_digest(given, digest):
                found = name
        return found

    def login(self, name: str, secret: str) -> bool:
        """Whether this is the key of that name; for the page's login form."""
        return hmac.compare_digest((self.owner(secret) or "").encode(), name.encode()) and bool(name)


class Links:
    """Links to one file of one job that a browser's player can follow without a header, for some hours."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def _sign(self, job_id: str, variant: str, until: int) -> str:
        return hmac.new(self._secret, f"{job_id}\n{variant}\n{until}".encode(), hashlib.sha256).hexdigest()

    def url(self, job_id: str, variant: str) -> str:
        """A link, equal for an hour so that a player is not reloaded by polling."""
        until = int(time.time() // 3600) * 3600 + int(LINK_S)
        return f"/v1/videos/{job_id}/content?variant={variant}&until={until}&sign={self._sign(job_id, variant, until)}"

    def is_good(self, job_id: str, variant: str, until: str, sign: str) -> bool:
        """Whether this server signed it and its time is not over."""
        if not (until.isascii() and until.isdecimal() and len(until) < 12):
            return False
        wanted = self._sign(job_id, variant, int(until))
        return hmac.compare_digest(wanted.encode(), sign.encode("utf-8", "replace")) and int(until) > time.time()


@dataclass(slots=True)
class Bucket:
    """A rate limit per client: `per_minute` requests, a third of them at once."""

    per_minute: int
    _levels: dict[str, tuple[float, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def _level(self, client: str, now: float) -> float:
        most = max(1.0, self.per_minute / 3)
        level, since = self._levels.get(client, (most, now))
        return min(most, level + (now - since) * self.per_minute / 60)

    def wait_s(self, client: str, *, cost: float = 1.0) -> float:
        """Take one; 0 when it may go on, else the seconds after which it might."""
        now = time.monotonic()
        with self._lock:
            if len(self._levels) > 10_000:
                self._levels.clear()
            level = self._level(client, now)
            is_allowed = level >= 1
            self._levels[client] = (level - cost if is_allowed else level, now)
        return 0.0 if is_allowed else (1 - level) * 60 / self.per_minute
