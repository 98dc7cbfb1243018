"""What was measured about recipes: report files of `videogen bench` and `eval`, and this queue's own finished jobs; invents nothing."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from videogen.jobs.database import COMPLETED
from videogen.jobs.store import Store

_KINDS = ("eval", "bench")
_LAST_JOBS = 300
_SHOWN_METRICS = ("psnr", "ssim", "vmaf")


@dataclass(slots=True)
class Reports:
    """The reports in a folder and in the folders right below it; an empty one without a folder."""

    folder: Path | None
    _found: dict[str, Path] = field(default_factory=dict)

    def names(self) -> list[str]:
        """The reports there are, by the name of their folder and their kind."""
        self._found = {}
        if self.folder is not None and self.folder.is_dir():
            for place in (self.folder, *sorted(path for path in self.folder.iterdir() if path.is_dir())):
                for kind in _KINDS:
                    if (place / f"{kind}.md").is_file():
                        self._found[f"{place.name} ({kind})"] = place / f"{kind}.md"
        return list(self._found)

    def text(self, name: str) -> str:
        """A report as Markdown; a name that is not listed gives none."""
        path = self._found.get(name)
        return path.read_text(encoding="utf-8") if path is not None else ""

    def measured(self, recipe: str) -> list[str]:
        """One line per quality report whose new arm is this recipe."""
        lines = []
        for name in self.names():
            path = self._found[name].with_suffix(".json")
            if path.stem == "eval" and path.is_file():
                try:
                    line = _line(json.loads(path.read_text(encoding="utf-8")), recipe)
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue
                lines += [f"{line} [{name}]"] if line else []
        return lines


def _line(report: dict[str, Any], recipe: str) -> str:
    if report["recipes"]["new"]["name"] != recipe:
        return ""
    speed, clips = report["speed_up"]["value"], report["clips"]
    told = [f"{speed:.2f} times as fast as {report['recipes']['reference']['name']}"]
    for name in _SHOWN_METRICS:
        found = report["summary"].get(name, {}).get("new", {})
        if found.get("mean"):
            told.append(f"{name} {found['mean']['value']:.3g}")
        elif found.get("identical") and found["identical"] == found["clips"]:
            told.append(f"{name} identical")
    return f"{', '.join(told)} (n={clips})"


def own_speed(store: Store, recipe: str, reference: str) -> str:
    """How much faster this queue's own clips of a recipe were than the reference's of equal canvas and length, or nothing."""
    spent: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for job in store.jobs(states=(COMPLETED,), limit=_LAST_JOBS):
        if job.finished and job.started:
            key = (job.summary.get("size"), job.summary.get("frames"), job.summary.get("workflow"))
            spent.setdefault(key, {}).setdefault(str(job.summary.get("recipe")), []).append(job.finished - job.started)
    ratios = [median(each[reference]) / median(each[recipe]) for each in spent.values() if recipe in each and reference in each]
    count = sum(len(each[recipe]) for each in spent.values() if recipe in each and reference in each)
    return f"{median(ratios):.2f} times as fast as {reference} in this queue, loading included (n={count})" if ratios else ""
