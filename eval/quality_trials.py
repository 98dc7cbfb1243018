"""Renders both arms and the two anchors of every case; measures nothing. Clips under test are kept beside their sidecars."""

from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from eval.metrics.pair import Clip
from eval.quality_cases import Case, other_seed
from eval.report_folder import make_folder
from videogen.config import Request
from videogen.errors import EnvironmentFault, VideogenError, say
from videogen.identity import canonical_json
from videogen.jobs.faults import CLIP_ERRORS
from videogen.jobs.run import write_json, write_result
from videogen.media import Encoding, encode_files
from videogen.pocket.captions import Scene
from videogen.pocket.world import Layout
from videogen.result import Result

NOT_RENDERING = ("load", "encode")


class Renderer(Protocol):
    """The part of `videogen.pipeline.Pipeline` that an evaluation needs."""

    def render(self, request: Request) -> Result:
        """Render one clip."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one arm's clip lies, and its record."""

    path: Path
    record: dict[str, Any]

    @property
    def seconds(self) -> float:
        """What rendering took; loading weights and encoding the file are not counted."""
        return float(sum(took for name, took in self.record["stages_s"].items() if name not in NOT_RENDERING))


@dataclass(frozen=True, slots=True)
class Shown:
    """One arm's clip as rendered, and as stored."""

    clip: Clip
    stored: Stored


@dataclass(frozen=True, slots=True)
class Trial:
    """One request in both arms. Anchors are the reference against itself: by another attention kernel, and with another seed."""

    name: str
    prompt: str
    seed: int
    new: Shown
    reference: Shown
    floor: Clip | None = None
    ceiling: Clip | None = None
    scene: Scene | None = None
    layout: Layout | None = None


def other_kernel(device: torch.device) -> tuple[str, SDPBackend]:
    """The attention kernel of the floor: plain matrix products on a CPU; on a GPU the memory-efficient one, for S^2 would not fit."""
    return ("math", SDPBackend.MATH) if device.type == "cpu" else ("efficient", SDPBackend.EFFICIENT_ATTENTION)


def as_clip(result: Result, name: str) -> Clip:
    """A rendered clip for the metrics. Raises RequestError when it holds NaN."""
    audio = np.empty((0, 0), np.float32) if result.audio is None else result.audio
    return Clip(result.frames, audio, result.sampling_rate, result.fps, name)


@dataclass(frozen=True, slots=True)
class Bench:
    """Both arms, opened. `num_anchors` is how many cases also get the two anchors, from the first on."""

    new: Renderer
    reference: Renderer
    device: torch.device
    folder: Path
    num_anchors: int
    encoding: Encoding

    def run(self, cases: Sequence[Case], wanted: Container[str] | None = None) -> Iterator[Trial]:
        """One trial of each wanted case (None: all) after another; which arm renders first alternates. A case's seed is its request's."""
        for arm in ("new", "reference"):
            make_folder(self.folder / arm)
        for index, case in enumerate(cases):
            if wanted is not None and case.name not in wanted:
                continue
            order = ("new", "reference") if index % 2 else ("reference", "new")
            results = {arm: self._render(case, arm) for arm in order}
            shown = {arm: self._keep(case, arm, result) for arm, result in results.items()}
            floor = ceiling = None
            if index < self.num_anchors:
                _, backend = other_kernel(self.device)
                floor = as_clip(self._render(case, "reference", sdpa_kernel(backend)), f"{case.name} (floor)")
                far = replace(case, seed=other_seed(case.seed))
                ceiling = as_clip(self._render(far, "reference"), f"{case.name} (ceiling)")
            new, reference = shown["new"], shown["reference"]
            yield Trial(case.name, case.request.prompt, case.seed, new, reference, floor, ceiling, case.scene, case.layout)

    def _render(self, case: Case, arm: str, kernel: AbstractContextManager[Any] | None = None) -> Result:
        renderer = self.new if arm == "new" else self.reference
        try:
            with kernel or nullcontext():
                return renderer.render(replace(case.request, seed=case.seed))
        except VideogenError:
            raise
        except CLIP_ERRORS as error:
            got = f"{type(error).__name__}: {error}".strip()[:300]
            told = say(
                f"case {case.name}, arm {arm}", got, "a finished clip in both arms", "no report was written; render it alone with -v"
            )
            raise EnvironmentFault(told) from error

    def _keep(self, case: Case, arm: str, result: Result) -> Shown:
        """Write the clip as a run folder would, so that two arms stored losslessly can be evaluated again."""
        clip = as_clip(result, f"{case.name} ({arm})")
        path = self.folder / arm / f"{case.name}.mp4"
        write_result(path, result, self.encoding, canonical_json(result.record))
        files = {"file": path.name, "companions": [file.name for file in encode_files(path, self.encoding)[1:]]}
        record = result.record | {"output": result.record["output"] | files | {"sampling_rate": result.sampling_rate}}
        write_json(path.with_suffix(".json"), record)
        return Shown(clip, Stored(path, record))
