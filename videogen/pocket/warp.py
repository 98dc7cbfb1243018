"""Where on the teacher's path a student's few steps lie: one factor on both shifts, tried on the undistilled model."""

from dataclasses import replace

from lora.distil import levels_at, student_points
from videogen.pocket.bank import Shape, Teaching, build_bank
from videogen.pocket.looks import ends, judge
from videogen.pocket.training import Log

WARPS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
KINDS = "tfr"
VIDEO_SHARE = 0.75  # of a warp's score; the rest is sound


def choose_warp(shapes: list[Shape], how: Teaching, forwards: int, seed: int, log: Log) -> float:
    """The warp at which the undistilled model in `forwards` steps ends nearest to its own long path, on one batch of each kind.

    It was the better start in a toy study and the better student too; other factors can be asked for by name.
    """
    some = [next(s for s in sorted(shapes, key=lambda s: -s.share) if s.bucket.kind == kind) for kind in KINDS if _has(shapes, kind)]
    parts = build_bank(some, replace(how, keep=[1.0, 0.0]), seed, held=0, least=len(some), is_over=lambda: True)
    parts = [replace(part, held=part.states[0].shape[1]) for part in parts]
    look = judge(parts)
    scores = {}
    for warp in WARPS:
        levels = levels_at(student_points(forwards, warp), how.shifts, parts[0].states[0])
        seen = look(ends(how.call, parts, levels, batch=64))
        scores[warp] = VIDEO_SHARE * seen.video_db + (1 - VIDEO_SHARE) * seen.audio_db
        log(event="warp", warp=warp, score=scores[warp], video_db=seen.video_db, audio_db=seen.audio_db)
    best = max(scores, key=lambda warp: scores[warp])
    log(event="warp chosen", warp=best)
    return best


def _has(shapes: list[Shape], kind: str) -> bool:
    return any(s.bucket.kind == kind for s in shapes)
