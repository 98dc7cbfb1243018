"""Whether a promise P(loss > 1) <= alpha still holds where it is used: a test that may be read after every clip. Pure.

An e-process: wealth that the promise keeps from growing on average, so that it reaches 1/level with probability at most `level`,
however long one looks (Ville's inequality). Sources: Ramdas et al., arXiv 2210.01948; Waudby-Smith and Ramdas, arXiv 2010.09686;
the sum over moments at which the promise may have broken: Shin, Ramdas and Rinaldo, arXiv 2203.03532.
"""

import hashlib
import math
from dataclasses import dataclass, replace

from caches.calibrate import is_violation

LEVEL = 0.05
_MAX = 1e300


@dataclass(frozen=True, slots=True)
class Audit:
    """The test so far. It bets on a rate of twice alpha, from some clip on; that any clip was the first has the weight 1/(k(k+1)).

    running: wealth of the bets that have begun; peak: the most it was worth.
    """

    alpha: float
    clips: int = 0
    violations: int = 0
    running: float = 0.0
    peak: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ValueError(f"audit alpha: got {self.alpha}, expected a number between 0 and 1; use the certificate's")

    @property
    def alternative(self) -> float:
        """The rate of violations that is bet on."""
        return min(2 * self.alpha, (1 + self.alpha) / 2)

    @property
    def e_value(self) -> float:
        """The evidence against the promise now: 1 at the beginning, at most 1 on average while it holds."""
        return self.running + 1 / (self.clips + 1)

    def after(self, loss: float) -> "Audit":
        """The audit once one more clip was rendered both ways and its loss, in units of the tolerance, is known."""
        is_bad, clips = is_violation(loss), self.clips + 1
        factor = self.alternative / self.alpha if is_bad else (1 - self.alternative) / (1 - self.alpha)
        running = min((self.running + 1 / (clips * (clips + 1))) * factor, _MAX)
        now = replace(self, clips=clips, violations=self.violations + is_bad, running=running)
        return replace(now, peak=max(self.peak, now.e_value))

    def is_alarm(self, level: float = LEVEL) -> bool:
        """Whether the promise was refuted at this level, now or at an earlier clip.

        Raises ValueError for a level that is no probability.
        """
        if not 0 < level < 1:
            raise ValueError(f"audit level: got {level}, expected a number between 0 and 1; change it")
        return self.peak >= 1 / level


def is_drawn(identity: str, share: float) -> bool:
    """Whether the clip of this identity is of the share that is audited; the same at every asking, and in any larger share.

    Raises ValueError for a share that is not above 0 and at most 1.
    """
    if not (math.isfinite(share) and 0 < share <= 1):
        raise ValueError(f"audit share: got {share}, expected a number above 0, up to 1; change it")
    return int(hashlib.sha256(f"audit {identity}".encode()).hexdigest()[:13], 16) < share * 16**13
