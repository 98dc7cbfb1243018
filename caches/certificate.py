"""A calibrated promise and the stratum it holds for, as a file; pure, standard library only.

The promise: with probability at least 1 - delta over the calibration draw, a new request of the stratum loses more than
its tolerances with probability at most alpha. Anything different from the fingerprint is another stratum: no promise.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from caches.calibrate import binomial_cdf
from caches.prior import Prior, prior_of

SCHEMA = "videogen.certificate/1"
_COUNTS = ("max_streak", "video_order", "audio_order", "drift_order", "n", "violations")
PARTS = ("video", "motion", "spectrum", "level")  # of the loss
_MOST, _ROUNDING = 100_000, 1e-9  # clips, so that a foreign file costs no time; of the binomial sum
_NUMBERS = ("lam", "alpha", "delta", "mean_reused", "warm_up")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a certificate holds for; equality is the only test."""

    weights: str
    adapters: str
    workflow: str
    canvas: str
    steps: int
    shifts: str
    dtype: str
    device: str
    parallel: str
    code: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), int if field.name == "steps" else str
            if type(value) is not kind:
                raise ValueError(f"certificate {field.name}: got {_short(value)}, expected type {kind.__name__}; calibrate again")

    def differences(self, other: "Fingerprint") -> list[str]:
        """`key: theirs instead of ours` for every key that differs, this certificate's value last."""
        found = []
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                found.append(f"{field.name} {_apart(theirs, ours)} instead of {_apart(ours, theirs)}")
        return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:12] + "..."


def _apart(value: object, other: object) -> str:
    """What of a list in words the other has not, shortened; the whole where that is nothing."""
    parts, known = str(value).split(", "), str(other).split(", ")
    return ", ".join(map(_short, [part for part in parts if part not in known] or parts))


@dataclass(frozen=True, slots=True)
class Certificate:
    """A lambda with what was promised and measured; `tolerances` are the epsilons of the loss, by part."""

    fingerprint: Fingerprint
    lam: float
    max_streak: int
    video_order: int
    audio_order: int
    alpha: float
    delta: float
    tolerances: Mapping[str, float]
    n: int
    violations: int
    mean_reused: float
    clips_sha256: str
    method: str = "learn-then-test"
    warm_up: float = 0.08
    drift_order: int = 1
    prior: Prior | None = None

    def __post_init__(self) -> None:
        for name in (*_COUNTS, *_NUMBERS):
            value = getattr(self, name)
            if not _is_number(value) or (name in _COUNTS and not (isinstance(value, int) and value >= 0)):
                raise ValueError(f"certificate {name}: got {_short(value)}, expected a plain number; calibrate again")
        if not isinstance(self.clips_sha256, str) or not isinstance(self.method, str):
            raise ValueError("certificate clips_sha256 or method: got no text, expected one; calibrate again")
        if not isinstance(self.tolerances, Mapping) or not all(_is_number(each) for each in self.tolerances.values()):
            raise ValueError(f"certificate tolerances: got {_short(self.tolerances)}, expected numbers by part; calibrate again")
        for name in ("alpha", "delta"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"certificate {name}: got {getattr(self, name)}, expected a number between 0 and 1; calibrate again")
        if not (math.isfinite(self.lam) and self.lam > 0):
            raise ValueError(f"certificate lambda: got {self.lam}, expected a positive number; lambda 0 needs no certificate")
        self._check_promise()

    def _check_promise(self) -> None:
        """What the counts do not support is no promise."""
        if odd := sorted(set(self.tolerances) - set(PARTS)):
            raise ValueError(f"certificate tolerances: got {_short(odd[0])}, expected some of {', '.join(PARTS)}; calibrate again")
        if not self.tolerances or not all(value > 0 for value in self.tolerances.values()):
            told = _short(dict(self.tolerances))
            raise ValueError(f"certificate tolerances: got {told}, expected at least one, all positive; calibrate again")
        if not 1 <= self.n <= _MOST or self.violations > self.n:
            got = f"{_short(self.violations)} of {_short(self.n)}"
            raise ValueError(f"certificate violations: got {got}, expected at most all of 1 to {_MOST:,} clips; calibrate again")
        chance = binomial_cdf(self.violations, self.n, self.alpha)
        if not chance <= self.delta + _ROUNDING:
            got = f"{self.violations} of {self.n} at alpha {self.alpha:g}, which has probability {chance:.4g}"
            raise ValueError(f"certificate violations: got {got}, expected at most delta {self.delta:g}; calibrate on more clips")

    @property
    def promise(self) -> str:
        """The certificate in one sentence."""
        parts = ", ".join(f"{name} {value:g}" for name, value in sorted(self.tolerances.items()))
        return (
            f"P(loss > {parts}) <= {self.alpha:g} with confidence {1 - self.delta:g} "
            f"({self.violations} of {self.n} calibration clips violated)"
        )

    def to_plain(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(replace(self, prior=None)) | {"prior": self.prior and self.prior.to_plain()}

    def to_json(self) -> str:
        """The certificate file's text."""
        return json.dumps({"schema": SCHEMA} | self.to_plain(), indent=1, sort_keys=True) + "\n"


def read_certificate(text: str, what: str) -> Certificate:
    """A certificate from its file's text; `what` names the file in messages.

    Raises ValueError when it is not one, or lacks or adds a key.
    """
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"certificate {what}: got {error}, expected JSON; calibrate again") from None
    if not isinstance(value, dict) or value.pop("schema", None) != SCHEMA:
        raise ValueError(f"certificate {what}: got another schema, expected {SCHEMA}; calibrate again with this version")
    wanted = {field.name for field in fields(Certificate)}
    if set(value) != wanted or not isinstance(value["fingerprint"], dict):
        odd = ", ".join(sorted(set(value) ^ wanted)[:5])
        raise ValueError(f"certificate {what}: got missing or left-over keys ({odd}), expected exactly its fields; calibrate again")
    if set(value["fingerprint"]) != {field.name for field in fields(Fingerprint)}:
        raise ValueError(f"certificate {what}: got another fingerprint, expected exactly its fields; calibrate again")
    prior = None if value["prior"] is None else prior_of(value["prior"])
    return Certificate(**(value | {"fingerprint": Fingerprint(**value["fingerprint"]), "prior": prior}))
