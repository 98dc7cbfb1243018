"""Renders a job of the queue with the project's own plan, run and pipeline; imports torch."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from videogen.adapters import settle as settle_adapters
from videogen.config import Recipe
from videogen.errors import CancelledRender
from videogen.ffmpeg import file_url, run_ffmpeg
from videogen.jobs.database import Job
from videogen.jobs.files import RawJob
from videogen.jobs.journal import locked, read_journal
from videogen.jobs.plan import SeedBook, make_drafts, settle
from videogen.jobs.run import Renderer, SilentScreen, run_clips
from videogen.media import Encoding
from videogen.parallel.weights import WHOLE, Placement
from videogen.pipeline import Pipeline, open_pipeline
from videogen.progress import Event, OnEvent, StopFlag
from videogen.recipes import find_recipe
from videogen.seeds import draw_seed
from videogen.serve.examining import examine
from videogen.serve.worker import ClipFailed, Made
from videogen.source import find_model, open_family, open_h3_family

logger = logging.getLogger(__name__)

Around = Callable[[Pipeline, Job, Path], Renderer]


def as_it_is(pipeline: Pipeline, _job: Job, _root: Path) -> Renderer:
    """The do-nothing `Around`."""
    return pipeline


class _Screen(SilentScreen):
    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event

    def event(self, event: Event) -> None:
        self._on_event(event)


class PipelineMaker:
    """One model on one device, opened at the first job and kept. `around` may wrap the pipeline of a job (previews); `placement` says
    where its weights live."""

    def __init__(
        self, model: str, device: str, root: Path, *, offline: bool, around: Around = as_it_is, placement: Placement = WHOLE
    ) -> None:
        self.source, self.device, self.root, self.around = find_model(model, offline=offline), device, root, around
        self.family = open_family(self.source)
        self.placement = placement
        self._opened: dict[str, Pipeline] = {}

    def _open(self, recipe: Recipe) -> Pipeline:
        first = self._opened.get(recipe.dtype)
        if first is not None:
            return first.sharing(recipe)
        self._opened[recipe.dtype] = pipeline = open_pipeline(self.source, recipe, device=self.device, placement=self.placement)
        return pipeline

    def make(self, job: Job, folder: Path, on_event: OnEvent, stop: StopFlag) -> Made:
        """As the `Maker` protocol says."""
        drafts = make_drafts([RawJob(job.settings, "job", self.root)], self.family, Recipe(), self._settled)
        with locked(folder):
            journal = read_journal(folder)
            (clip,) = settle(
                drafts,
                journal,
                SeedBook({}, lambda _key, _seed: None, draw_seed),
                model=(self.source.name, self.source.identity),
                encoding=Encoding(),
                template="clip",
                is_resumed=False,
                is_taken=lambda _name: False,
            )
            opener = lambda recipe: self.around(self._open(recipe), job, self.root)  # noqa: E731
            summary = run_clips([clip], journal, opener, encoding=Encoding(), screen=_Screen(on_event), stop=stop)
        if summary.is_stopped:
            raise CancelledRender("stopped between steps")
        (row,) = summary.rows
        if row["state"] != "done":
            raise ClipFailed(row["error"])
        clip_file, sidecar = folder / f"{clip.name}.mp4", folder / f"{clip.name}.json"
        record: dict[str, Any] = json.loads(sidecar.read_text(encoding="utf-8"))
        return Made((clip_file, sidecar, poster(clip_file)), record)

    def examine(self) -> dict[str, Any]:
        """What the doctor finds here, under the default recipe. Raises RequestError for a Wan model, which it does not know."""
        open_h3_family(self.source, "the doctor")
        return examine(self._open(find_recipe("exact")))

    def _settled(self, recipe: Recipe) -> Recipe:
        return settle_adapters(recipe, self.source)


def poster(clip: Path) -> Path:
    """A clip's first frame as a JPEG of at most 320 pixels beside it."""
    path = clip.with_suffix(".jpg")
    fitted = "scale=w='min(320,iw)':h=-2"
    run_ffmpeg("-i", file_url(clip), "-frames:v", "1", "-vf", fitted, "-q:v", "4", "-f", "image2", "-update", "1", file_url(path))
    return path
