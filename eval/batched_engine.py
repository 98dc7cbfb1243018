"""Losses of the step cache on many requests at once: dense clips, then every setting, decoded and compared on the device.

A batch rounds otherwise than one clip, so this engine is a stratum of its own (`parallel`): what it certifies holds for it. It chooses
lambdas and checks promises on hundreds of clips; what ships is certified by the pipeline itself, in the stratum it serves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from caches.policy import Budget
from caches.trace import Trace
from eval.batched_cache import batched_cache
from eval.batched_loop import Group, decode, denoise, grouped, prepare
from eval.batched_loss import parts_of
from eval.losses import Losses
from eval.quality_cases import Case
from videogen.config import StepCache
from videogen.pipeline import Pipeline

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Batch:
    """clips: the most that share a loop; width: how many of them share a pass through the blocks."""

    clips: int = 64
    width: int = 8

    @property
    def parallel(self) -> str:
        """The fingerprint's entry."""
        return f"batched {self.width}"


def rendered(group: Group, options: StepCache, width: int) -> tuple[torch.Tensor, torch.Tensor, list[Trace]]:
    """Frames, sound and traces of a group under a step cache; with lambda 0 its dense clips."""
    budget = Budget(lam=options.lam, max_streak=options.max_streak, warm_up=options.warm_up)
    channels = group.channels(options)
    with batched_cache(group.transformer, "transformer_blocks", channels, budget, clips=len(group), width=width) as traces:
        rows = denoise(group)
    return *decode(group, *rows), traces


def measure(pipeline: Pipeline, cases: Sequence[Case], plans: Sequence[tuple[StepCache, Losses]], batch: Batch, tell: Told) -> None:
    """Fill every plan's losses for every case that lacks one; cases must share a workflow and a schedule."""
    lacking = [case for case in cases if any((options.lam, case.name) not in losses.rows for options, losses in plans)]
    if not lacking:
        return
    tell(f"preparing {len(lacking)} requests")
    prepared = [prepare(pipeline, case) for case in lacking]
    done = 0
    for group in grouped(pipeline.load(lacking[0].request.workflow), prepared, batch.clips):
        frames, sound, _ = rendered(group, StepCache(), batch.width)
        for options, losses in plans:
            if all((options.lam, case.name) in losses.rows for case in group.cases):
                continue
            new_frames, new_sound, traces = rendered(group, options, batch.width)
            found = parts_of(new_frames, new_sound, frames, sound)
            for case, trace, parts in zip(group.cases, traces, found):
                losses.add({"lam": options.lam, "case": case.name, "parts": parts, "reused": trace.reused / trace.total})
        done += len(group)
        tell(f"{done} of {len(lacking)} requests measured at {len(plans)} settings")
