"""From measured exchanges between ranks to findings: which transport, how fast, and which setting to keep; measures nothing."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from videogen.doctor.report import Row

SCHEMA = "videogen.link/1"
WORTH = 1.05  # a setting is kept where it is so much faster
_VIA = re.compile(r"via ((?:P2P|SHM|NET|NVLS|C2C|COLLNET)[\w/]*)")


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting: gigabytes a second that a rank sends in an all-to-all, by workload, and the transports that were used."""

    setting: str
    changes: dict[str, str]
    ranks: int
    gbs: dict[str, float]
    transports: tuple[str, ...]

    @property
    def least(self) -> float:
        """At the size where it is slowest."""
        return min(self.gbs.values())


def transports(log: str) -> tuple[str, ...]:
    """The transports that NCCL's own log names for its channels, most used first; `unknown` where it names none."""
    found = Counter(match.group(1) for match in _VIA.finditer(log))
    return tuple(name for name, _ in found.most_common()) or ("unknown",)


def best(measured: Sequence[Measured], in_force: str) -> Measured:
    """The setting to keep: the one in force unless another is faster by more than noise."""
    own = next((each for each in measured if each.setting == in_force), measured[0])
    fastest = max(measured, key=lambda each: each.least)
    return fastest if fastest.least > WORTH * own.least else own


def check(measured: Sequence[Measured], in_force: str) -> Row:
    """One row: what is in force, what ran, at what speed, and what would be faster."""
    own = next((each for each in measured if each.setting == in_force), measured[0])
    chosen = best(measured, in_force)
    speeds = "; ".join(f"{each.setting}: {_speeds(each)}" for each in measured)
    is_slow = chosen is not own
    reason = f"{chosen.setting} is {chosen.least / own.least:.2f}x as fast here" if is_slow else ""
    fix = " ".join(f"export {name}={value}" for name, value in chosen.changes.items()) if is_slow else ""
    plan = f"videogen plan --link {chosen.least:.3g}"
    executed = f"{own.setting} over {', '.join(own.transports)}, {own.ranks} ranks"
    return Row("link", in_force, executed, reason, speeds, f"{fix}; {plan}" if fix else plan, is_slow)


def _speeds(each: Measured) -> str:
    return ", ".join(f"{name.removeprefix('h3-t2va-')} {value:.3g} GB/s" for name, value in each.gbs.items())


def as_text(measured: Sequence[Measured], in_force: str) -> str:
    """What `--save` keeps: every setting's speeds and the one to use."""
    chosen = best(measured, in_force)
    rows: list[dict[str, Any]] = [
        {"setting": each.setting, "changes": each.changes, "gbs": each.gbs, "transports": list(each.transports)} for each in measured
    ]
    record = {"schema": SCHEMA, "ranks": chosen.ranks, "use": chosen.changes, "gbs": chosen.least, "measured": rows}
    return json.dumps(record, indent=1, sort_keys=True) + "\n"
