"""Every kind of input, and one trial: made from a seed, tried under watch, judged accepted, refused, or a violation."""

import random
import shutil
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fuzz import adapters, api, command, jobfiles, options, pictures, records
from tests.fuzz.box import Box, Broken
from tests.fuzz.command import FORM
from tests.fuzz.watch import DEADLINE_S, MAX_GROWTH_MB, Hang, strays, watched
from videogen.errors import EnvironmentFault, RequestError

ACCEPTED, REFUSED, VIOLATION = "accepted", "refused", "violation"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of input. `share` is how many of a thousand it gets; `writes` whether it may write to the output folder."""

    share: int
    make: Callable[[random.Random, Box], Any]
    check: Callable[[Any, Box], None]
    writes: bool = False
    calls: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one input."""

    kind: str
    verdict: str
    seconds: float = 0.0
    growth_mb: float = 0.0
    told: str = ""


def _jobfile(ending: str) -> Kind:
    return Kind(90, lambda rng, _: jobfiles.make(rng, ending), lambda data, box: jobfiles.check(data, ending, box))


def _record(kind: str, share: int, check: Callable[[bytes, Box], None], *, writes: bool = False) -> Kind:
    return Kind(share, lambda rng, _: records.make(rng, kind), check, writes)


KINDS: dict[str, Kind] = {
    **{f"job file {ending}": _jobfile(ending) for ending in command.ENDINGS},
    "request": Kind(100, lambda rng, _: options.make_request(rng), options.check_request),
    "recipe": Kind(100, lambda rng, _: options.make_recipe(rng), options.check_recipe),
    "certificate": _record("certificate", 80, records.check_certificate),
    "sidecar": _record("sidecar", 30, records.check_sidecar),
    "journal": _record("journal", 30, records.check_journal, writes=True),
    "losses": _record("losses", 25, records.check_losses),
    "device profile": _record("profile", 15, records.check_profile),
    "adapter": Kind(95, adapters.make, adapters.check),
    "API request": Kind(90, lambda rng, _: api.make(rng), api.check),
    "picture": Kind(70, lambda rng, _: pictures.make(rng), pictures.check),
    "command line": Kind(25, lambda rng, _: command.make(rng), command.check),
    "process": Kind(1, lambda rng, _: command.make_process(rng), command.check_process, calls=True),
    "run": Kind(3, lambda rng, _: command.make_run(rng), command.check_run, writes=True, calls=True),
}


SHARES = {name: kind.share for name, kind in KINDS.items()}
_SLOW = ("adapter", "sidecar", "journal", "device profile", "command line", "process", "run")
QUICK = {name: share // 5 if name in _SLOW else share for name, share in SHARES.items()}  # for CI: a fifth of what takes longest


def draw(seed: int, index: int, shares: Mapping[str, int] = SHARES) -> tuple[str, random.Random]:
    """The kind of an input and the generator that makes it; the same for a seed, an index and these shares, always."""
    rng = random.Random(f"{seed} {index}")
    return rng.choices(list(shares), list(shares.values()))[0], rng


def try_case(name: str, case: Any, box: Box) -> Outcome:
    """Try one input; the folders are empty before it."""
    kind = KINDS[name]
    for folder in (box.work, box.out):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    verdict, told = ACCEPTED, ""
    with watched() as seen:
        try:
            kind.check(case, box)
        except (RequestError, EnvironmentFault) as error:
            verdict = REFUSED
            if not FORM.search(str(error)):
                verdict, told = VIOLATION, f"refused in another form: {error}"
        except Hang:
            verdict, told = VIOLATION, f"a hang: not over after {DEADLINE_S:g} s\n{traceback.format_exc()}"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            verdict, told = VIOLATION, f"{'broken: ' if isinstance(error, Broken) else ''}{traceback.format_exc()}"
    allowed = (box.work, *((box.out,) if kind.writes else ()), *(server.root for server in box.lent.values()))
    found = strays(seen, allowed)
    if found:
        verdict, told = VIOLATION, f"wrote {found[:5]}\n{told}"
    elif seen.calls and not kind.calls:
        verdict, told = VIOLATION, f"called {seen.calls[:3]}\n{told}"
    elif seen.growth_mb > MAX_GROWTH_MB:
        verdict, told = VIOLATION, f"took {seen.growth_mb:.0f} MB\n{told}"
    return Outcome(name, verdict, seen.seconds, seen.growth_mb, told)
