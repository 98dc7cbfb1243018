"""Clips per hour: runs two arms A B B A on the same requests and sums up what they took. Plain data in and out."""

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from eval.stats import Interval, bootstrap_mean, paired_ratio, percentile_text
from eval.timing import Clock
from videogen.errors import bad

MAX_CLIPS = 10_000
_RESAMPLE_SEED = 0


@dataclass(frozen=True, slots=True)
class ClipRow:
    """One measured clip. Times in seconds on one clock; `broken` says why it does not count."""

    arm: str
    pair: int
    seed: int
    began_s: float
    ended_s: float
    stages_s: dict[str, float]
    forwards: int
    reused: int = 0
    broken: str = ""
    peak_mb: float | None = None
    energy_wh: float | None = None
    cpu_s: float | None = None

    @property
    def seconds(self) -> float:
        """Begin to end, encode and mux included."""
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class Made:
    """What an arm says of the clip it made: device memory in megabytes and device energy while it rendered, where there is a device.

    cpu_s is the processor time of this process, encoding (another process) apart; it means something with one clip in flight.
    """

    stages_s: dict[str, float]
    forwards: int
    reused: int = 0
    broken: str = ""
    peak_mb: float | None = None
    energy_wh: float | None = None
    cpu_s: float | None = None


Finish = Callable[[], Made]
# Called with the pair's number: renders, and returns what is left to do (encode, write, check).
Arm = Callable[[int], Finish]


@dataclass(slots=True)
class Cold:
    """What a short batch pays once, per arm, in seconds."""

    load_s: dict[str, float] = field(default_factory=dict)
    warmup_s: dict[str, list[float]] = field(default_factory=dict)


def arm_order(names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(pair, arm) without end: A B, B A, A B, ... so that a drift of the machine meets both arms alike."""
    pair = 0
    while True:
        for name in names if pair % 2 == 0 else reversed(names):
            yield pair, name
        pair += 1


def warm_up(arms: dict[str, Arm], count: int, clock: Clock, ready: Callable[[str], object] = lambda _: None) -> dict[str, list[float]]:
    """Render `count` clips of the measured shape per arm; their seconds are reported apart, getting an arm `ready` in none."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for name, arm in arms.items():
        ready(name)
        for index in range(count):
            began = clock.now()
            arm(-1 - index)()
            taken[name].append(clock.now() - began)
    return taken


def measure(
    arms: dict[str, Arm],
    *,
    min_clips: int,
    min_seconds: float,
    clock: Clock,
    in_flight: int = 1,
    ready: Callable[[str], object] = lambda _: None,
) -> list[ClipRow]:
    """Render pairs until every arm has `min_clips` clips and the whole took `min_seconds`; both arms get each request.

    `ready` is called with an arm's name before each of its clips, on nobody's clock: what it costs to take turns on shared
    weights (other adapters put on) is no part of a clip. With `in_flight` above 1 a clip is encoded in a thread while the
    next is rendered; that is for one arm only, since two arms would then measure each other.
    """
    if in_flight > 1 and len(arms) > 1:
        raise bad("--in-flight with --vs", in_flight, "1 when two recipes are compared", "measure them one at a time")
    rows: list[ClipRow] = []
    names, began = list(arms), clock.now()
    with ThreadPoolExecutor(max(1, in_flight - 1)) as pool:
        pending: deque[Future[ClipRow]] = deque()
        for number, (pair, name) in enumerate(arm_order(names)):
            if number % len(names) == 0:
                enough = number >= min_clips * len(names) and clock.now() - began >= min_seconds
                if enough or number >= MAX_CLIPS:
                    break
            ready(name)
            start = clock.now()
            finish = arms[name](pair)
            if in_flight == 1:
                rows.append(_row(name, pair, start, finish, clock))
                continue
            pending.append(pool.submit(_row, name, pair, start, finish, clock))
            while len(pending) >= in_flight:
                rows.append(pending.popleft().result())
        rows += [future.result() for future in pending]
    return rows


def _row(arm: str, pair: int, began_s: float, finish: Finish, clock: Clock) -> ClipRow:
    made = finish()
    return ClipRow(arm, pair, pair, began_s, clock.now(), **{field.name: getattr(made, field.name) for field in fields(Made)})


def window_s(rows: Sequence[ClipRow]) -> float:
    """The seconds an arm was at work: overlapping clips count once, the other arm's turns not at all."""
    total, end = 0.0, float("-inf")
    for row in sorted(rows, key=lambda r: r.began_s):
        total += max(0.0, row.ended_s - max(row.began_s, end))
        end = max(end, row.ended_s)
    return total


def summarize(rows: Sequence[ClipRow], arm: str, cold: Cold, *, gpus: int) -> dict[str, Any]:
    """One arm's figures: clips per hour warm and cold, latency, stages. Broken clips count zero but take their time."""
    own = [row for row in rows if row.arm == arm]
    good = [row for row in own if not row.broken]
    seconds = [row.seconds for row in own]
    busy = window_s(own)
    paid = busy + cold.load_s.get(arm, 0.0) + sum(cold.warmup_s.get(arm, []))
    per_hour, machines = 3600 * len(good) / busy if busy else 0.0, max(gpus, 1)
    return {
        "arm": arm,
        "clips": len(own),
        "broken": len(own) - len(good),
        "clips_per_hour_machine": per_hour,
        "clips_per_hour_per_gpu": per_hour / machines if gpus else None,
        "clips_per_hour_cold": 3600 * len(good) / paid if paid else 0.0,
        "gpu_seconds_per_clip": busy * gpus / len(good) if gpus and good else None,
        "seconds_per_clip": asdict(bootstrap_mean(seconds, seed=_RESAMPLE_SEED)),
        "latency_s": {f"P{q}": percentile_text(seconds, q) for q in (50, 90, 95)},
        "stages_s": _stage_means(own),
        "forwards": statistics.mean(row.forwards for row in own) if own else 0,
        "reused": statistics.mean(row.reused for row in own) if own else 0,
        "ms_per_forward": _ms_per_forward(own),
        "peak_device_mb": max((row.peak_mb for row in own if row.peak_mb is not None), default=None),
        "energy_wh_per_clip": _energy_per_clip(own, len(good)),
        "cpu_s_per_clip": statistics.mean(row.cpu_s for row in own if row.cpu_s is not None) if _has_cpu(own) else None,
        "load_s": cold.load_s.get(arm, 0.0),
        "warmup_s": cold.warmup_s.get(arm, []),
    }


def _energy_per_clip(rows: Sequence[ClipRow], good: int) -> float | None:
    """Of a whole clip: broken ones spend and count zero. None where one was not counted."""
    spent = [row.energy_wh for row in rows if row.energy_wh is not None]
    return sum(spent) / good if good and len(spent) == len(rows) else None


def _stage_means(rows: Sequence[ClipRow]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row.stages_s})
    return {name: statistics.mean(row.stages_s.get(name, 0.0) for row in rows) for name in names}


def _ms_per_forward(rows: Sequence[ClipRow]) -> float | None:
    """Denoising time over computed forwards, in milliseconds; reused steps are not free, so their time is in it."""
    computed = sum(row.forwards - row.reused for row in rows)
    return 1e3 * sum(row.stages_s.get("denoise", 0.0) for row in rows) / computed if computed else None


def _has_cpu(rows: Sequence[ClipRow]) -> bool:
    return bool(rows) and all(row.cpu_s is not None for row in rows)


def speed_up(rows: Sequence[ClipRow], base: str, other: str) -> dict[str, Any]:
    """How many times faster `other` is than `base`: geometric mean over pairs in which both clips are whole, with interval.

    The same of processor time, where that was counted.
    """
    whole = {name: {row.pair: row for row in rows if row.arm == name and not row.broken} for name in (base, other)}
    pairs = sorted(whole[base].keys() & whole[other].keys())
    if not pairs:
        return {"base": base, "other": other, "pairs": 0, "ratio": None}

    def compared(of: Callable[[ClipRow], float]) -> Interval:
        first, second = ([of(whole[name][pair]) for pair in pairs] for name in (base, other))
        return paired_ratio(first, second, seed=_RESAMPLE_SEED)

    ratio = compared(lambda row: row.seconds)
    cpu = compared(lambda row: row.cpu_s or 0.0) if _has_cpu([*whole[base].values(), *whole[other].values()]) else None
    found = {"base": base, "other": other, "pairs": len(pairs), "ratio": asdict(ratio), "text": ratio.text(3)}
    return found | ({"cpu_ratio": asdict(cpu), "cpu_text": cpu.text(3)} if cpu else {})
