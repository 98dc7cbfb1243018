"""What pocket clips show against what was asked, and whether a recipe shows it no worse; knows nothing of pixel metrics."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from eval import oracle
from eval.metrics.pair import Clip
from eval.stats import CONFIDENCE, Interval, bootstrap_mean, is_non_inferior, wilson
from videogen.pocket import world
from videogen.pocket.captions import Scene

MARGIN = 0.01  # a share: one percentage point
_BADGE_RIGHT = 8 / 9 - 1e-6  # of the nine cells
_BADGE_ATTRIBUTES = ("motion", "background", "pitch", "pan")  # a badge has no single colour, shape, size or count


def judge(clip: Clip, scene: Scene, layout: world.Layout | None) -> dict[str, dict[str, Any]]:
    """Per attribute: what was asked, what the oracle reads, its confidence, and whether the two agree.

    With `layout` the clip should show that badge: attributes a badge has not are left out, `badge` is added.
    """
    frames = torch.from_numpy(clip.frames.astype(np.float32) / 255)[None]
    readings = [oracle.read_video(frames, clip.fps), oracle.read_audio(torch.from_numpy(clip.audio)[None], clip.sampling_rate)]
    out: dict[str, dict[str, Any]] = {}
    for reading in readings:
        right = oracle.agrees(reading, [scene])
        for name, value in reading.value.items():
            if layout is None or name in _BADGE_ATTRIBUTES:
                sure = round(float(reading.confidence[name][0]), 4)
                entry = {"asked": int(getattr(scene, name)), "read": int(value[0]), "confidence": sure, "is_right": bool(right[name][0])}
                out[name] = entry
    if layout is not None:
        match = float(oracle.badge_match(frames, layout)[0])
        out["badge"] = {"asked": 1.0, "read": round(match, 4), "confidence": 1.0, "is_right": match >= _BADGE_RIGHT}
    return out


def share_right(judged: dict[str, dict[str, Any]]) -> float:
    """The share of attributes that are right in one clip."""
    return float(np.mean([entry["is_right"] for entry in judged.values()]))


def accuracies(judged: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Interval]:
    """Per attribute the share of clips that are right, with Wilson's interval; `all` means every attribute of a clip."""
    names = list(dict.fromkeys(name for clip in judged for name in clip))
    out = {}
    for name in names:
        seen = [clip[name]["is_right"] for clip in judged if name in clip]
        out[name] = wilson(sum(seen), len(seen))
    out["all"] = wilson(sum(all(entry["is_right"] for entry in clip.values()) for clip in judged), len(judged))
    return out


def paired_difference(differences: Sequence[float]) -> Interval:
    """The mean of `new - reference` over prompts, with its bootstrap interval.

    Where no prompt changed the bootstrap has no spread and would claim certainty; then the interval is the exact
    binomial bound on the share of prompts that could change, each taken to lose (or gain) everything.
    """
    found = bootstrap_mean(differences)
    if len(differences) < 3 or any(differences):
        return found
    bound = 1 - ((1 - CONFIDENCE) / 2) ** (1 / len(differences))
    return Interval(0.0, -bound, bound, len(differences))


def prompts_needed(differences: Sequence[float], margin: float = MARGIN) -> int | None:
    """About how many prompts would show non-inferiority if the mean and spread stayed as seen; None: at this loss no number would."""
    spread = float(np.std(differences, ddof=1)) if len(differences) > 1 else 0.0
    if not any(differences):
        return math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(1 - margin))
    room = margin + float(np.mean(differences))
    return math.ceil((1.96 * spread / room) ** 2) if room > 0 and spread > 0 else None


def verdict(differences: Sequence[float], *, is_identical: bool, margin: float = MARGIN) -> dict[str, Any]:
    """Whether the new arm follows the prompts no worse than the reference, less `margin`: identical, shown, not shown or inferior."""
    found = paired_difference(differences)
    if is_identical:
        state, told = "identical", f"both arms are bit-identical on all {len(differences)} prompts; the interval says what that leaves open"
    elif is_non_inferior(found, margin):
        state, told = "shown", "the whole interval lies above the margin"
    elif found.high is not None and found.high < -margin:
        state, told = "inferior", "the whole interval lies below the margin"
    else:
        needed = prompts_needed(differences, margin)
        more = f"about {needed} prompts would be needed" if needed else "at this loss no number of prompts would show it"
        state, told = "not shown", f"{len(differences)} prompts cannot show it; {more}"
    low, high = (None if bound is None else 100 * bound for bound in (found.low, found.high))
    points = Interval(100 * found.value, low, high, found.n)
    text = f"{state}: new - reference = {points.text(2)} points, margin {100 * margin:g}; {told}"
    return {"state": state, "difference": found, "margin": margin, "prompts": len(differences), "text": text}
