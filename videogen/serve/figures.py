"""What is known of a recipe and where from: clips of this queue, report files, the project's pages. It invents nothing."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from videogen.identity import hash_file
from videogen.jobs.database import COMPLETED, Job
from videogen.jobs.store import Store
from videogen.recipes import find_recipe
from videogen.serve.comparing import clip_key, pooled, psnr
from videogen.serve.published import PUBLISHED, Published
from videogen.serve.reports import Reports
from videogen.source import ModelSource

REFERENCE = "exact"
_LAST_JOBS = 300
_MAX_PAIRS = 4  # decoded to say how far a recipe's clips are from the reference's
_MAX_KEPT = 400


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing known: in a few words, in full, and who says so."""

    short: str
    full: str
    source: str


@dataclass(slots=True)
class Figures:
    """Knows one store, one model, one folder of clips and the reports. PSNR of pairs is computed once and kept."""

    store: Store
    source: ModelSource
    clips: Path
    reports: Reports
    _psnr: dict[tuple[str, str], float | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def known(self, recipe: str) -> list[Figure]:
        """Measured on this queue's clips first, then reports, then what the project's pages say."""
        found = [self._here(recipe)] if recipe != REFERENCE else []
        found += [Figure(line, line, f"report {name}") for name, line in self.reports.measured(recipe)]
        found += [Figure(each.short, each.full, f"published in {each.page}") for each in PUBLISHED if self._holds(each, recipe)]
        return [each for each in found if each is not None]

    def label(self, recipe: str) -> str:
        """The recipe's name with the first of them beside it."""
        known = self.known(recipe)
        return f"{recipe}: {known[0].short} [{known[0].source}]" if known else f"{recipe}: not measured"

    def _holds(self, each: Published, recipe: str) -> bool:
        """Whether a published figure is about this recipe of this model, its adapter unchanged."""
        if (each.recipe, each.model) != (recipe, self.source.name):
            return False
        files = [self.source.adapters_folder / f"{use.file.partition(':')[2]}.safetensors" for use in find_recipe(recipe).adapters.uses]
        return [hash_file(path) for path in files if path.is_file()] == ([each.adapter] if each.adapter else [])

    def _here(self, recipe: str) -> Figure | None:
        """From finished clips at the recipes' own steps: how much faster, and how far from the reference's clip of the same seed."""
        jobs = [job for job in self.store.jobs(states=(COMPLETED,), limit=_LAST_JOBS) if _is_plain(job)]
        mine = [job for job in jobs if job.summary["recipe"] == recipe]
        theirs = [job for job in jobs if job.summary["recipe"] == REFERENCE]
        ratios = []
        for job in mine:
            others = [_made_s(each) for each in theirs if _shape(each) == _shape(job)]
            ratios += [median(others) / _made_s(job)] if others else []
        if not ratios:
            return None
        found = (self._distance(job, theirs) for job in mine[: 2 * _MAX_PAIRS])
        distances = [value for value in found if value is not None][:_MAX_PAIRS]
        speed, number = median(ratios), len(ratios)
        full = f"{speed:.2f} times as fast as {REFERENCE} (n={number}, loading left out, whatever else ran)"
        if not distances:
            return Figure(f"{speed:.1f} times, n={number}", full, "measured on this queue")
        near = median(distances)
        told = "identical pictures" if near == float("inf") else f"{near:.1f} dB"
        full += f"; PSNR of the stored files to {REFERENCE}'s clip of the same seed {told} (n={len(distances)})"
        return Figure(f"{speed:.1f} times, {told}, n={number}", full, "measured on this queue")

    def _distance(self, job: Job, theirs: list[Job]) -> float | None:
        """The PSNR of a clip to the newest twin of the reference; None without one, or where it is too large to compare here."""
        twin = next((each for each in theirs if clip_key(each) == clip_key(job)), None)
        if twin is None:
            return None
        key = (twin.id, job.id)
        with self._lock:
            if key not in self._psnr:
                if len(self._psnr) >= _MAX_KEPT:
                    self._psnr.clear()
                width, height = (int(side) for side in job.summary["size"].split("x"))
                curve = psnr(self.clips / f"{twin.id}.mp4", self.clips / f"{job.id}.mp4", 6 * width * height * job.summary["frames"])
                self._psnr[key] = None if curve is None else pooled(curve)
            return self._psnr[key]


def _is_plain(job: Job) -> bool:
    """Whether the recipe ran as it is: its own steps, no adapter of the client's, times known."""
    asked = job.summary.get("request", {})
    return not ({"steps", "lora"} & set(asked)) and _made_s(job) > 0


def _made_s(job: Job) -> float:
    return sum(float(value) for name, value in job.record.get("stages_s", {}).items() if name != "load")


def _shape(job: Job) -> tuple[object, ...]:
    return tuple(job.summary.get(name) for name in ("size", "frames", "workflow"))
