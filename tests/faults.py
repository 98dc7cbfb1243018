"""The long trials of what goes wrong in a night of rendering, as counts; a small seeded part of each runs in CI (`test_faults.py`).

`python -m tests.faults --kills 200 --signals 100 --enospc 100 --oom 100 --corrupt 50 --out DIR` prints one JSON line a kind: clips
lost, made twice, half-written, silently different, and messages that lack something, each 0 where all is well.
"""

import argparse
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.injectors import FULL, JOBS, At, Batch, at_lines, at_writes, clips_in, faults_of, half_written, is_torn, kill, made, spoil
from videogen import ffmpeg, media

DISK = frozenset({"open", "write", "fsync", "replace", "mkdir", "write_bytes"})
LIMIT_S = 2.0
Trial = Callable[["Bench", random.Random, Path], Counter[str]]


class Bench:
    """What trials share: how many moments a run has, and what undisturbed runs with each draw of seeds look like."""

    def __init__(self, place: Path, jobs: list[dict[str, Any]] = JOBS) -> None:
        self.place, self.jobs = place, jobs
        self._wanted: dict[int, dict[str, str]] = {}
        self._moments: dict[Any, int] = {}

    def batch(self, place: Path, **options: Any) -> Batch:
        """A batch in a folder of its own."""
        return Batch(made(place), jobs=self.jobs, **options)

    def wanted(self, runs: int) -> list[dict[str, str]]:
        """The clips of undisturbed runs that draw their seeds as the first, second, ... run of a folder does."""
        for run in range(1, runs + 1):
            if run not in self._wanted:
                batch = self.batch(self.place / f"wanted-{run}", runs=run - 1)
                assert batch.run() == 0, batch.said
                self._wanted[run] = clips_in(batch.folder)
        return [self._wanted[run] for run in range(1, runs + 1)]

    def moments(self, hits: Any, only: frozenset[str] = frozenset()) -> int:
        """How many of them an undisturbed run has."""
        if (hits, only) not in self._moments:
            self._moments[hits, only] = self.batch(self.place / f"moments-{len(self._moments)}").count(hits, only)
        return self._moments[hits, only]


def said_badly(batch: Batch, code: int, *words: str) -> Counter[str]:
    """Whether a run that went wrong showed a trace, or lacks one of these words."""
    text = batch.said
    told = Counter({"traces shown": int("Traceback" in text or code == 70)})
    told["bad messages"] = int(not all(word in text for word in words))
    return told


def ended(bench: Bench, batch: Batch, seen: dict[str, str], told: Counter[str], **options: Any) -> Counter[str]:
    """The last, undisturbed run, and what is wrong after it."""
    code = batch.run()
    told["not ended well"] += code != 0
    return told + faults_of(batch.folder, batch.names, bench.wanted(batch.runs), seen, **options)


def a_kill(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """Killed one to three times: at a write or in the middle of a journal's line, at any line, or at any time."""
    batch, seen, told = bench.batch(place), dict[str, str](), Counter[str]()
    for _ in range(rng.randint(1, 3)):
        hits = rng.choice([at_writes, at_lines, None])
        if hits is None:
            code = batch.run(lambda: alarm(rng.uniform(0.02, 0.6)))
        else:
            code = batch.run(_at(hits, rng.randint(1, bench.moments(hits)), kill))
        told["kills"] += code < 0
        told["half-written"] += len(half_written(batch.folder))
        seen |= clips_in(batch.folder)
    return ended(bench, batch, seen, told)


def _at(hits: Any, number: int, act: Callable[[], None], only: frozenset[str] = frozenset()) -> Callable[[], Any]:
    return lambda: hits(At(number, act, only))


@contextmanager
def alarm(after_s: float) -> Iterator[None]:
    signal.signal(signal.SIGALRM, lambda *_: kill())
    signal.setitimer(signal.ITIMER_REAL, after_s)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def a_signal(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """SIGINT or SIGTERM at any line, once or twice."""
    batch, number, second = bench.batch(place), rng.randint(1, bench.moments(at_lines)), rng.choice([0, 1, 20, 400])
    which = rng.choice([signal.SIGINT, signal.SIGTERM])

    def around() -> Any:
        first = At(number, lambda: os.kill(os.getpid(), which))
        again = At(number + second if second else 0, lambda: os.kill(os.getpid(), which))
        return at_lines(lambda what: (first(what), again(what)))

    code = batch.run(around)
    told = said_badly(batch, code) + Counter({"stopped": int(code != 0), "half-written": len(half_written(batch.folder))})
    told["bad exit codes"] = int(code not in (0, 130, 143, -signal.SIGTERM))  # the last before anything has begun
    return ended(bench, batch, clips_in(batch.folder), told)


def _raise_full() -> None:
    raise FULL


def a_full_disk(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """No space left at one write, at all from there on, or for real on a disk of a random size."""
    batch, kind = bench.batch(place), rng.choice(["once", "on", "real"] if os.geteuid() == 0 else ["once", "on"])
    if kind == "real":
        batch.folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={rng.randint(1, 40) * 4}k", "none", str(batch.folder)]
        if subprocess.run(command, capture_output=True).returncode:
            kind = "on"  # not allowed here
    try:
        if kind == "real":
            code = batch.run()
        else:
            number = rng.randint(1, bench.moments(at_writes, DISK))
            code = batch.run(lambda: at_writes(full_from(number, is_once=kind == "once")))
        told = said_badly(batch, code, *(("No space left", "run the same command") if code else ()))
        told += Counter({"runs that hit it": int(code != 0), "half-written": len(half_written(batch.folder)), f"kind {kind}": 1})
        told["bad exit codes"] = int(code not in (0, 3))
        told["damaged journals"] = is_torn(batch.folder)
        if kind == "real":
            subprocess.run(["mount", "-o", "remount,size=64m", str(batch.folder)], check=True)
        return ended(bench, batch, clips_in(batch.folder), told)
    finally:
        if kind == "real":
            subprocess.run(["umount", str(batch.folder)], check=True)


def full_from(number: int, *, is_once: bool) -> Callable[[str], None]:
    seen = 0

    def hit(what: str) -> None:
        nonlocal seen
        seen += what in DISK
        if what in DISK and (seen == number or (seen > number and not is_once)):
            raise FULL

    return hit


def a_bad_journal(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """A killed or finished run's journal cut, with bytes changed, zeroed, lines lost or twice, or gone."""
    batch = bench.batch(place)
    batch.run(_at(at_writes, rng.randint(1, bench.moments(at_writes) * 2), kill))
    path, seen = batch.folder / "run.jsonl", clips_in(batch.folder)
    if path.is_file():
        spoil(path, rng, may_vanish=True)
    told = ended(bench, batch, seen, Counter(), is_journal_whole=False)
    return told + said_badly(batch, 0)


def a_hung_ffmpeg(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """ffmpeg never ends at one of its runs: that clip fails, the others are made."""
    binary = place / "ffmpeg"
    binary.write_text("#!/bin/sh\nexec sleep 600\n")
    binary.chmod(0o755)
    batch, stock, number = bench.batch(place), ffmpeg._binary, rng.randint(1, 15)

    @contextmanager
    def hanging() -> Iterator[None]:
        calls = iter(range(1, 10_000))
        media._BASE_LIMIT_S, ffmpeg.READ_LIMIT_S = LIMIT_S, LIMIT_S
        ffmpeg.run_ffmpeg.__kwdefaults__["limit_s"] = LIMIT_S
        ffmpeg._binary = lambda: str(binary) if next(calls) == number else stock()
        yield

    code = batch.run(hanging)
    told = said_badly(batch, code, "no end after", "run the same command", "jobs.jsonl:")
    told["clips that it cost"] = 5 - len(clips_in(batch.folder))
    told["cost to others"] = told["clips that it cost"] - 1
    told["bad exit codes"] = int(code != 1)
    return ended(bench, batch, clips_in(batch.folder), told)


def a_jumping_clock(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """The wall clock leaps by up to ten years at every look."""
    batch, seed = bench.batch(place), rng.random()

    @contextmanager
    def jumping() -> Iterator[None]:
        stock, jumps = time.time, random.Random(seed)
        time.time = lambda: stock() + jumps.uniform(-3e8, 3e8)
        yield

    code = batch.run(jumping)
    return ended(bench, batch, clips_in(batch.folder), said_badly(batch, code) + Counter({"not done": int(code != 0)}))


def a_locked_folder(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """The folder becomes read-only at any moment."""
    batch, number = bench.batch(place), rng.randint(1, bench.moments(at_writes, DISK))

    def refuse(what: str) -> None:
        if what in DISK:
            moments(what)
            if moments.seen >= number:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    moments = At(0, lambda: None)
    code = batch.run(lambda: at_writes(refuse))
    told = said_badly(batch, code, "Read-only file system") + Counter({"bad exit codes": int(code != 3)})
    return ended(bench, batch, clips_in(batch.folder), told)


def two_runs(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """A second run in the folder of a running one is refused and disturbs nothing."""
    other = bench.batch(place)
    first = subprocess.Popen([sys.executable, "-c", _SLOW.format(place=str(place))], stdout=subprocess.DEVNULL)
    while not (place / "out" / "run.jsonl").is_file():
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.2))
    code = other.run()
    told = said_badly(other, code, "no other run in it") + Counter({"bad exit codes": int(code != 3)})
    told["not ended well"] = first.wait()
    return ended(bench, other, clips_in(place / "out"), told)


_SLOW = """
from pathlib import Path
from tests.injectors import Batch
from tests.videogen.jobs.fakes import FakeRenderer
raise SystemExit(Batch(Path({place!r}), renderer=lambda: FakeRenderer(step_s=0.3), log='first').run())
"""

TRIALS: dict[str, Trial] = {
    "kills": a_kill,
    "signals": a_signal,
    "enospc": a_full_disk,
    "journals": a_bad_journal,
    "hung": a_hung_ffmpeg,
    "clock": a_jumping_clock,
    "readonly": a_locked_folder,
    "two": two_runs,
}


def trials(kind: str, number: int, seed: int, out: Path) -> Counter[str]:
    """So many trials of a kind, each in a folder of its own that goes again where nothing was wrong."""
    place, told = made(out / kind), Counter[str]()
    bench = Bench(place)
    for index in range(number):
        folder = made(place / str(index))
        found = TRIALS[kind](bench, random.Random(f"{kind} {seed} {index}"), folder)
        told += found
        if not wrong(found):
            shutil.rmtree(folder)
    return told


GOOD = ("trials", "kills", "stopped", "runs that hit it", "clips that it cost", "refused", "another identity", "once more")


def wrong(told: Counter[str]) -> dict[str, int]:
    """What should not be there."""
    return {name: count for name, count in told.items() if count and name not in GOOD and not name.startswith("kind ")}


def main() -> None:
    """The counts that are asked for."""
    from tests.model_faults import MODEL_TRIALS

    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    TRIALS.update(MODEL_TRIALS)
    for kind in TRIALS:
        parser.add_argument(f"--{kind}", type=int, default=0, metavar="N")
    parser.add_argument("--corrupt", type=int, default=0, metavar="N", help="so many of each: weights, adapters, pictures, journals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "videogen-faults", help="what went wrong is kept here")
    asked = vars(parser.parse_args())
    asked |= {kind: asked["corrupt"] for kind in ("weights", "adapters", "pictures", "journals") if asked["corrupt"]}
    for kind in TRIALS:
        if asked[kind]:
            began = time.monotonic()
            told = trials(kind, asked[kind], asked["seed"], asked["out"])
            row = {"kind": kind, "wrong": wrong(told), "counts": {k: v for k, v in sorted(told.items()) if v}}
            sys.stdout.write(json.dumps(row | {"seconds": round(time.monotonic() - began)}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
