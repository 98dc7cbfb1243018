"""Priors of the step cache as files: what was measured of a schedule, on what, and the cache that it makes; loads no torch."""

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from caches.certificate import Fingerprint
from caches.policy import WARM_UP
from caches.prior import Prior, read_prior
from videogen.config import StepCache
from videogen.errors import RequestError, bad
from videogen.families.base import Resolved
from videogen.sampling import told_shifts

ORDER, STREAK = 3, 6  # with a prior: computed steps combined, less one; most reused in a row
CAREFUL_START = 0.16  # of the steps, computed first where no certificate says otherwise: what an early error costs is not in the prior
_ELSEWHERE = ("weights", "adapters", "workflow", "canvas", "dtype", "device")  # there the probe looks unusual, and more is computed


@dataclass(frozen=True, slots=True)
class MeasuredPrior:
    """A prior, the name of its file, and the stratum it was measured in (None where the file does not say)."""

    prior: Prior
    file: str
    of: Fingerprint | None = None

    def check(self, resolved: Resolved) -> None:
        """Raise RequestError for a request of another schedule."""
        steps, shifts = steps_of(self.prior), told_shifts(resolved.shifts, resolved.sigmas)
        if resolved.steps != steps:
            raise bad(
                "forwards with a cache prior", resolved.steps, f"{steps}, as {self.file} has", "change --steps, or measure a prior for them"
            )
        if self.of is not None and self.of.shifts != shifts:
            raise bad("shifts with a cache prior", shifts, f"{self.of.shifts}, as {self.file} has", "measure a prior for them")

    def told(self, stratum: Fingerprint) -> str:
        """What else differs between where it was measured and here; empty where nothing does, or the file does not say."""
        differing = [] if self.of is None else [n for n in _ELSEWHERE if getattr(self.of, n) != getattr(stratum, n)]
        if not differing:
            return ""
        return f"cache prior {self.file}: measured with another {', another '.join(differing)}; what looks unusual is computed"


def steps_of(prior: Prior) -> int:
    """The forwards of the schedule that it is of."""
    return len(next(iter(prior.sigmas.values())))


def uncertified_prior(cache: StepCache) -> MeasuredPrior | None:
    """The prior that acts without a certificate, if any."""
    if cache.prior is None or not cache.lam or cache.certificates:
        return None
    return MeasuredPrior(cache.prior, cache.prior_file or "it", cache.prior_of)


def with_prior(prior: Prior, warm_up: float = WARM_UP) -> StepCache:
    """The step cache that a prior makes: what is calibrated, and compared with others."""
    return StepCache(max_streak=STREAK, video_order=ORDER, audio_order=ORDER, warm_up=warm_up, prior=prior)


def prior_text(prior: Prior, of: Fingerprint) -> str:
    """A prior file: the prior, and beside it what it was measured on."""
    return json.dumps(json.loads(prior.to_json()) | {"of": asdict(of)}, separators=(",", ":"), sort_keys=True) + "\n"


def open_prior(path: Path, expected: str = "a file that can be read", what: str = "--prior") -> MeasuredPrior:
    """A prior file; `expected` says in the message what else there may be.

    Raises RequestError when it is missing or not one.
    """
    try:
        return _parsed(path.read_text(encoding="utf-8"), path.name)
    except UnicodeDecodeError as error:
        raise bad(what, str(path), "UTF-8 text", f"byte {error.start} is not; measure again") from None
    except OSError as error:
        raise bad(what, str(path), expected, error.strerror or "check the path") from None
    except ValueError as error:
        raise RequestError(str(error)) from None


@lru_cache(maxsize=8)  # every line of a job file may name it
def _parsed(text: str, name: str) -> MeasuredPrior:
    prior, of = read_prior(text, name), json.loads(text).get("of")
    try:
        return MeasuredPrior(prior, name, None if of is None else Fingerprint(**of))
    except TypeError as error:
        raise ValueError(f"cache prior {name}: got {error}, expected the stratum it was measured in; measure again") from None
