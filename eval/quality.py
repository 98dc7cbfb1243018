"""Scores trials metric by metric, sets the anchors beside them and says what may be concluded; renders and writes nothing."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from eval.metrics.pair import Clip, Pair
from eval.metrics.picture import psnr_curve
from eval.metrics.registry import Measured, Metric, alarms, availability, measure
from eval.quality_oracle import accuracies, judge, share_right, verdict
from eval.quality_trials import Stored, Trial
from eval.stats import CONFIDENCE, Interval, bootstrap_mean, paired_ratio

SCHEMA = "videogen.eval/1"
IDENTICAL = "identical"
ARMS = ("new", "reference")
NUM_WORST = 5
_CLOSE = ("psnr", "audio_snr")  # in dB: twice the error is 6 dB less
_CACHE = ("lambda", "reused", "computed")  # of a record; the steps stay in the sidecar
_RESAMPLES = 10_000
NO_SCENE = "no prompt says what its clip should show in the oracle's terms"

Measures = dict[str, Measured]
Judged = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Scored:
    """One trial in numbers, without its frames; `sheet` is its contact sheet as JPEG, `judged` the oracle's answers by arm."""

    name: str
    prompt: str
    seed: int
    stored: dict[str, Stored]
    new: Measures
    floor: Measures | None
    ceiling: Measures | None
    is_identical: bool
    curve: list[float]
    alarms: list[str]
    judged: dict[str, Judged] | None
    sheet: bytes

    @property
    def oracle_change(self) -> float:
        """Share of attributes right, new minus reference; 0 without an oracle."""
        return 0.0 if self.judged is None else share_right(self.judged["new"]) - share_right(self.judged["reference"])


def score(trial: Trial, metrics: Sequence[Metric], *, has_oracle: bool, draw: Callable[[Pair], bytes]) -> Scored:
    """Measure one trial. The oracle looks only where the trial knows its scene."""
    reference = trial.reference.clip
    pair = Pair(trial.new.clip, reference, trial.prompt)
    new = measure(pair, metrics)
    judged = None
    if has_oracle and trial.scene is not None:
        scene, layout = trial.scene, trial.layout
        judged = {arm: judge(clip, scene, layout) for arm, clip in (("new", pair.new), ("reference", reference))}

    def anchor(clip: Clip | None) -> Measures | None:
        return None if clip is None else measure(Pair(clip, reference, trial.prompt), metrics)

    return Scored(
        name=trial.name,
        prompt=trial.prompt,
        seed=trial.seed,
        stored={"new": trial.new.stored, "reference": trial.reference.stored},
        new=new,
        floor=anchor(trial.floor),
        ceiling=anchor(trial.ceiling),
        is_identical=pair.is_identical,
        curve=psnr_curve(pair),
        alarms=alarms(new, metrics),
        judged=judged,
        sheet=draw(pair),
    )


def score_all(
    trials: Iterable[Trial],
    metrics: Sequence[Metric],
    *,
    total: int,
    has_oracle: bool,
    draw: Callable[[Pair], bytes],
    tell: Callable[[str], None],
    keep: Callable[[Scored], None] | None = None,
    known: int = 0,
) -> list[Scored]:
    """Score every trial, one in memory at a time; `keep` gets each as it is done, `known` were done before."""
    rows: list[Scored] = []
    for number, trial in enumerate(trials, known + 1):
        scored = score(trial, metrics, has_oracle=has_oracle, draw=draw)
        state = IDENTICAL if scored.is_identical else f"{len(scored.alarms)} alarms"
        seconds = ", ".join(f"{arm} {stored.seconds:.1f} s" for arm, stored in scored.stored.items())
        tell(f"[{number}/{total}] {scored.name}: {seconds}, {state}")
        rows.append(scored)
        if keep is not None:
            keep(scored)
    return rows


def plain_interval(interval: Interval | None) -> dict[str, Any] | None:
    """JSON form; a value that is no number becomes null."""
    if interval is None:
        return None
    return {key: value if value is None or math.isfinite(value) else None for key, value in asdict(interval).items()}


def _plain_value(measured: Measured) -> float | str | None:
    if measured.value is None:
        return None
    return IDENTICAL if math.isinf(measured.value) else round(measured.value, 6)


def retained(new: Sequence[float], floor: Sequence[float], ceiling: Sequence[float]) -> Interval | None:
    """`1 - sum(new) / sum(ceiling)` over paired distances: 1 is the reference itself, 0 as far off as another seed.

    None when another seed is not at least twice as far as another kernel: the two anchors then leave no room to judge in.
    The interval is a BCa bootstrap over prompts, from three prompts on.
    """
    far = float(np.sum(ceiling))
    if far <= 2 * float(np.sum(floor)):
        return None
    value = 1 - float(np.sum(new)) / far
    if len(new) < 3:
        return Interval(value, None, None, len(new))
    if np.ptp(np.asarray(new) - (1 - value) * np.asarray(ceiling)) <= 1e-9 * far:  # every prompt says the same
        return Interval(value, value, value, len(new))

    def ratio(a: Any, b: Any, axis: int = -1) -> Any:
        return 1 - np.sum(a, axis=axis) / np.sum(b, axis=axis)

    settings: dict[str, Any] = {"paired": True, "n_resamples": _RESAMPLES, "confidence_level": CONFIDENCE, "method": "BCa"}
    found = stats.bootstrap((np.asarray(new), np.asarray(ceiling)), ratio, **settings, rng=np.random.default_rng(0)).confidence_interval
    low, high = float(found.low), float(found.high)
    return Interval(value, low, high, len(new)) if math.isfinite(low) and math.isfinite(high) else Interval(value, None, None, len(new))


def summarize_values(metric: Metric, measured: Sequence[Measured]) -> dict[str, Any]:
    """One metric over clips: mean of the finite values, mean distance over all measured, and how many had none or were identical."""
    known = [m.value for m in measured if m.value is not None]
    reasons = sorted({m.reason for m in measured if m.value is None})
    distances = [metric.distance(value) for value in known]
    finite = [value for value in known if math.isfinite(value)]
    return {
        "clips": len(measured),
        "identical": sum(math.isinf(value) for value in known),
        "not_measured": len(measured) - len(known),
        "reasons": reasons,
        "mean": plain_interval(bootstrap_mean(finite)) if finite else None,
        "distance": plain_interval(bootstrap_mean(distances)) if distances else None,
    }


def summarize_metric(metric: Metric, rows: Sequence[Scored]) -> dict[str, Any]:
    """One metric of the new arm with its anchors: floor (same seed, other kernel), ceiling (other seed), and what is retained."""
    anchored = [(r.new[metric.name], r.floor[metric.name], r.ceiling[metric.name]) for r in rows if r.floor and r.ceiling]
    far = [
        [metric.distance(m.value) for m in measured if m.value is not None]
        for measured in anchored
        if metric.has_anchors and all(m.value is not None for m in measured)
    ]
    kept = retained(*([row[arm] for row in far] for arm in range(3)))
    return {
        "new": summarize_values(metric, [row.new[metric.name] for row in rows]),
        "floor": summarize_values(metric, [floor for _, floor, _ in anchored]) if anchored else None,
        "ceiling": summarize_values(metric, [ceiling for _, _, ceiling in anchored]) if anchored else None,
        "retained": plain_interval(kept),
    }


def summarize_oracle(rows: Sequence[Scored], skipped: str) -> dict[str, Any]:
    """Accuracies of both arms and the verdict, or why there are none (`skipped`)."""
    judged = [row for row in rows if row.judged is not None]
    if not judged:
        return {"skipped": skipped or NO_SCENE}
    by_arm = {arm: accuracies([row.judged[arm] for row in judged if row.judged]) for arm in ARMS}
    found = verdict([row.oracle_change for row in judged], is_identical=all(row.is_identical for row in judged))
    attributes = {name: {arm: plain_interval(by_arm[arm][name]) for arm in by_arm} for name in by_arm["new"]}
    return found | {"difference": plain_interval(found["difference"]), "attributes": attributes}


def measured_class(rows: Sequence[Scored]) -> str:
    """What these clips allow to claim: exact (bit-identical), close (at most twice the floor's error), else approximate.

    Error is that of pixels and of samples; a silent reference leaves the pixels.
    """
    if all(row.is_identical for row in rows):
        return "exact"
    if any(row.floor is None for row in rows):
        return "not exact (without a floor nothing more can be said)"
    pairs = [(row.new[name].value, row.floor[name].value) for row in rows for name in _CLOSE if row.floor and name in row.new]
    known = [(new, floor) for new, floor in pairs if new is not None and floor is not None]
    return "close" if known and all(new >= floor - 20 * math.log10(2) for new, floor in known) else "approximate"


def worst(rows: Sequence[Scored]) -> list[Scored]:
    """Up to five clips that differ, worst first: attributes lost, then alarms, then squared error pooled over the clip."""

    def badness(row: Scored) -> tuple[float, int, float]:
        errors = [10 ** (-value / 10) for value in row.curve]
        return row.oracle_change, -len(row.alarms), -float(np.mean(errors))

    return sorted((row for row in rows if not row.is_identical), key=badness)[:NUM_WORST]


def gate(rows: Sequence[Scored], oracle: Mapping[str, Any]) -> dict[str, Any]:
    """Passed when no clip raised an alarm and the oracle, where it looked, found both arms identical or non-inferiority shown."""
    reasons = [f"{row.name}: {alarm}" for row in rows for alarm in row.alarms]
    if "skipped" not in oracle and oracle["state"] not in (IDENTICAL, "shown"):
        reasons.append(f"oracle: {oracle['text']}")
    scope = "alarms only; the oracle did not look: " + oracle["skipped"] if "skipped" in oracle else "alarms and the oracle"
    return {"passed": not reasons, "reasons": reasons, "scope": scope}


def make_report(rows: Sequence[Scored], metrics: Sequence[Metric], facts: Mapping[str, Any], *, oracle_skipped: str = "") -> dict[str, Any]:
    """The content of `eval.json`: `facts` (recipes, model, settings) and everything concluded from the rows."""
    seconds = {arm: [row.stored[arm].seconds for row in rows] for arm in ARMS}
    is_timed = all(value > 0 for arm in seconds.values() for value in arm)
    oracle = summarize_oracle(rows, oracle_skipped)
    return {
        "schema": SCHEMA,
        **facts,
        "metrics": [{key: getattr(m, key) for key in ("name", "unit", "better", "about", "sane")} for m in metrics],
        "skipped": [{"name": row["name"], "reason": row["reason"]} for row in availability() if not row["is_available"]],
        "summary": {metric.name: summarize_metric(metric, rows) for metric in metrics},
        "class": measured_class(rows),
        "identical_clips": sum(row.is_identical for row in rows),
        "oracle": oracle,
        "seconds_per_clip": {arm: plain_interval(bootstrap_mean(values)) for arm, values in seconds.items()},
        "speed_up": plain_interval(paired_ratio(seconds["reference"], seconds["new"])) if is_timed else None,
        "worst": [{"name": row.name, "alarms": row.alarms, "files": _files(row)} for row in worst(rows)],
        "gate": gate(rows, oracle),
        "clips": [_plain_row(row) for row in rows],
    }


def _files(row: Scored) -> dict[str, str]:
    return {arm: str(stored.path) for arm, stored in row.stored.items()}


def _plain_row(row: Scored) -> dict[str, Any]:
    def values(measured: Measures | None) -> dict[str, Any] | None:
        return None if measured is None else {name: _plain_value(value) for name, value in measured.items()}

    return {
        "name": row.name,
        "prompt": row.prompt,
        "seed": row.seed,
        "files": _files(row),
        "seconds": {arm: round(stored.seconds, 3) for arm, stored in row.stored.items()},
        "cache": {arm: {key: stored.record.get("cache", {}).get(key) for key in _CACHE} for arm, stored in row.stored.items()},
        "is_identical": row.is_identical,
        "values": values(row.new),
        "not_measured": {name: value.reason for name, value in row.new.items() if value.value is None},
        "floor": values(row.floor),
        "ceiling": values(row.ceiling),
        "psnr_per_frame": [_plain_value(Measured(value)) for value in row.curve],
        "alarms": row.alarms,
        "oracle": row.judged,
    }
