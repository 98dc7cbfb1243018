"""The table of metrics: unit, direction, sane range, and why one cannot run here; the only place that calls them."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from eval.metrics import learned, motion, picture, sound
from eval.metrics.pair import NotMeasurable, Pair
from videogen.errors import bad, say


def _nothing() -> str:
    return ""


def _package(name: str) -> str:
    return "" if importlib.util.find_spec(name) else f"package {name} is not installed (videogen[eval] has it)"


def _relative_error(decibels: float) -> float:
    return float(10 ** (-decibels / 20))


def _below(best: float, value: float) -> float:
    return max(0.0, best - value)


def _log_ratio(value: float) -> float:
    return abs(math.log(max(value, 1e-6)))


@dataclass(frozen=True, slots=True)
class Metric:
    """One number about a pair. `better` is higher, lower, or the value of a perfect match ("0", "1").

    `distance` turns a value into how far from identical it is (0 for identical); a value outside `sane` raises an
    alarm; `is_picture` says whether equal pictures (otherwise equal sounds) settle it without measuring.
    """

    name: str
    unit: str
    better: str
    measure: Callable[[Pair], float]
    distance: Callable[[float], float]
    about: str
    sane: tuple[float, float] | None = None
    is_picture: bool = True
    min_side_px: int = 1
    lacks: Callable[[], str] = _nothing

    @property
    def has_anchors(self) -> bool:
        """Whether another seed is far off in it; a clip's mean light or loudness need not differ between seeds."""
        return self.better in ("higher", "lower")

    @property
    def perfect(self) -> float:
        """The value of two equal clips; infinite for ratios of error, whose report says "identical"."""
        return {"higher": math.inf, "lower": 0.0, "0": 0.0, "1": 1.0}[self.better]


@dataclass(frozen=True, slots=True)
class Measured:
    """A metric's value (None: not measurable, and why; infinite: identical)."""

    value: float | None
    reason: str = ""


_TORCHMETRICS = partial(_package, "torchmetrics")
METRICS: tuple[Metric, ...] = (
    Metric("psnr", "dB", "higher", picture.psnr, _relative_error, "pixel error of the whole clip", lacks=_TORCHMETRICS),
    Metric("ssim", "", "higher", picture.ssim, partial(_below, 1.0), "structure, 11-pixel windows", min_side_px=11, lacks=_TORCHMETRICS),
    Metric(
        *("ms_ssim", "", "higher", picture.ms_ssim, partial(_below, 1.0), "structure over five scales"),
        min_side_px=picture.MS_SSIM_MIN_SIDE,
        lacks=_TORCHMETRICS,
    ),
    Metric("vmaf", "of 100", "higher", picture.vmaf, partial(_below, 100.0), "VMAF v0.6.1", min_side_px=picture.VMAF_MIN_SIDE),
    Metric("xpsnr", "dB", "higher", picture.xpsnr, _relative_error, "visibility-weighted luma error", min_side_px=picture.VMAF_MIN_SIDE),
    Metric("motion_ratio", "x", "1", motion.motion_ratio, _log_ratio, "temporal information kept", (0.8, 1.25)),
    Metric("frozen_excess", "share", "0", motion.frozen_excess, abs, "frames that stand still, beyond the reference", (-1.0, 0.1)),
    Metric("flicker", "dB", "higher", motion.flicker, _relative_error, "PSNR of frame differences"),
    Metric("time_shift", "frames", "0", motion.time_shift, abs, "late (+) or early (-)", (-0.5, 0.5)),
    Metric("luma_shift", "levels", "0", motion.luma_shift, abs, "brighter (+) or darker (-)", (-5.0, 5.0)),
    Metric("chroma_shift", "levels", "0", motion.chroma_shift, abs, "mean colour moved", (0.0, 4.0)),
    Metric("contrast_ratio", "x", "1", motion.contrast_ratio, _log_ratio, "spatial deviation of luma kept", (0.7, 1.4)),
    Metric("sharpness_ratio", "x", "1", motion.sharpness_ratio, _log_ratio, "luma gradient kept", (0.6, 1.6)),
    Metric("audio_snr", "dB", "higher", sound.audio_snr, _relative_error, "sample error of the sound", is_picture=False),
    Metric("log_spectral_distance", "dB", "lower", sound.log_spectral_distance, float, "difference of spectra", is_picture=False),
    Metric("level_shift", "dB", "0", sound.level_shift, abs, "louder (+) or softer (-)", (-6.0, 6.0), is_picture=False),
    Metric("peak_shift", "dB", "0", sound.peak_shift, abs, "peak higher (+) or lower (-)", (-9.0, 9.0), is_picture=False),
    Metric("silence_excess", "share", "0", sound.silence_excess, abs, "silence beyond the reference", (-0.2, 0.2), is_picture=False),
    Metric("lpips", "", "lower", learned.lpips, float, "learned distance, AlexNet", lacks=learned.lpips_lacks),
    Metric(
        *("clip_similarity", "", "higher", learned.clip_similarity, partial(_below, 1.0), "CLIP's view of both clips"),
        lacks=learned.clip_lacks,
    ),
    Metric("clip_score", "of 100", "0", learned.clip_score, abs, "follows the prompt better (+) or worse (-)", lacks=learned.clip_lacks),
    Metric("vbench", "of 100", "0", learned.vbench, abs, "VBench's motion smoothness changed", lacks=learned.vbench_lacks),
)


def find_metric(name: str) -> Metric:
    """The metric of this name. Raises RequestError for an unknown one."""
    found = next((metric for metric in METRICS if metric.name == name), None)
    if found is None:
        known = ", ".join(metric.name for metric in METRICS)
        raise bad("metric", name, f"one of {known}", "see `videogen eval list`")
    return found


def availability() -> list[dict[str, Any]]:
    """Every metric by name, whether it can run here, and if not, why."""
    rows: list[dict[str, Any]] = []
    for metric in METRICS:
        row = {key: getattr(metric, key) for key in ("name", "unit", "better", "about", "sane")}
        rows.append(row | {"is_available": not metric.lacks(), "reason": metric.lacks()})
    return rows


def usable() -> tuple[Metric, ...]:
    """The metrics that can run here."""
    return tuple(metric for metric in METRICS if not metric.lacks())


def too_small(metric: Metric, height: int, width: int) -> str:
    """Why the canvas is too small for the metric, or an empty string."""
    if min(height, width) >= metric.min_side_px:
        return ""
    return f"sides of {width}x{height}, at least {metric.min_side_px} pixels needed"


def measure(pair: Pair, metrics: Sequence[Metric]) -> dict[str, Measured]:
    """Every metric of the pair by name. Equal pictures or sounds are settled without measuring: VMAF of equal clips is not 100."""
    return {metric.name: _measure(pair, metric) for metric in metrics}


def _measure(pair: Pair, metric: Metric) -> Measured:
    if reason := metric.lacks() or too_small(metric, *pair.sides):
        return Measured(None, reason)
    if not metric.is_picture and pair.new.audio.size == 0:
        return Measured(None, "the clips have no sound")
    if pair.is_same_picture if metric.is_picture else pair.is_same_sound:
        return Measured(metric.perfect)
    try:
        value = metric.measure(pair)
    except NotMeasurable as error:
        return Measured(None, str(error))
    return Measured(None, "the measure gave NaN") if math.isnan(value) else Measured(value)


def alarms(measured: dict[str, Measured], metrics: Sequence[Metric]) -> list[str]:
    """A sentence for every value outside its sane range; it names the metric first."""
    out = []
    for metric in metrics:
        value = measured[metric.name].value
        if metric.sane and value is not None and not metric.sane[0] <= value <= metric.sane[1]:
            expected = f"from {metric.sane[0]:g} to {metric.sane[1]:g} {metric.unit}".strip()
            out.append(say(metric.name, f"{value:.3g}", expected, metric.about))
    return out
