"""Numbers of two finished clips: time, steps, and how far their pictures are apart as stored."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from videogen.errors import VideogenError
from videogen.ffmpeg import read_frames
from videogen.jobs.database import Job
from videogen.serve.html import table

MAX_VALUES = 250_000_000  # of both clips together, so that the page cannot fill the memory
PEAK = 255.0


def newest_pair(jobs: Sequence[Job], reference: str) -> tuple[str | None, str | None]:
    """The newest clip of another recipe whose twin by the reference is there too: (reference, other), or nothing."""
    twins = {clip_key(job): job.id for job in jobs if job.summary["recipe"] == reference}
    for job in jobs:
        if job.summary["recipe"] != reference and clip_key(job) in twins:
            return twins[clip_key(job)], job.id
    return None, None


def clip_key(job: Job) -> tuple[Any, ...]:
    """What two clips must share to be compared: everything but the recipe."""
    summary = job.summary
    return tuple(summary[name] for name in ("prompt", "seed", "size", "frames", "workflow"))


def psnr(left: Path, right: Path, values: int) -> list[float] | None:
    """PSNR of each pair of frames in dB, infinite for equal ones; None when they cannot be compared here."""
    if values > MAX_VALUES:
        return None
    try:
        a, b = read_frames(left), read_frames(right)
    except VideogenError:
        return None
    if a.shape != b.shape:
        return None
    errors = [float(np.mean((x.astype(np.float32) - y) ** 2)) for x, y in zip(a, b)]
    return [10 * float(np.log10(PEAK**2 / error)) if error else float("inf") for error in errors]


def pooled(curve: Sequence[float]) -> float:
    """The PSNR of a whole clip from those of its frames: of the mean squared error."""
    share = float(np.mean([10 ** (-value / 10) for value in curve]))
    return -10 * float(np.log10(share)) if share else float("inf")


def numbers(left: Job, right: Job, clips: Path) -> str:
    """The table below a comparison."""
    rows: list[tuple[Any, ...]] = []
    for job in (left, right):
        cache, stages = job.record.get("cache", {}), job.record.get("stages_s", {})
        spent = (job.finished or 0) - (job.started or 0)
        counted = stages.get("denoise", "n/a"), job.record.get("forwards", "n/a"), cache.get("reused", 0)
        rows.append((job.summary["recipe"], f"{spent:.1f}", *counted))
    first, second = (row[2] for row in rows)
    both = isinstance(first, int | float) and isinstance(second, int | float) and second > 0
    speed = f"{first / second:.2f} times" if both else "n/a"
    width, height = (int(side) for side in left.summary["size"].split("x"))
    curve = psnr(clips / f"{left.id}.mp4", clips / f"{right.id}.mp4", 6 * width * height * left.summary["frames"])
    head = ("recipe", "seconds in all", "seconds denoising", "forwards", "steps reused")
    told = f"<p>Denoising: B against A {speed} as fast (one clip each; videogen bench measures speed).</p>"
    return table(head, rows) + told + _told_psnr(curve)


def _told_psnr(curve: list[float] | None) -> str:
    if curve is None:
        return "<p>Difference in numbers: not computed here (other sizes, or too large); videogen eval does.</p>"
    if all(value == float("inf") for value in curve):
        return "<p>The stored pictures are identical.</p>"
    finite = [min(value, 60.0) for value in curve]
    points = " ".join(f"{index * 400 / max(1, len(finite) - 1):.1f},{62 - value:.1f}" for index, value in enumerate(finite))
    worst = min(range(len(curve)), key=lambda index: curve[index])
    told = f"PSNR of the stored files: {pooled(curve):.2f} dB over the clip, worst {curve[worst]:.2f} dB at frame {worst}"
    line = f'<svg role="img" aria-label="{told}" viewBox="0 0 400 64" width="100%" height="64"><polyline points="{points}" '
    return f'<p>{told} (60 dB and more is drawn as 60).</p>{line}fill="none" stroke="#1d4ed8" stroke-width="1.5"/></svg>'
