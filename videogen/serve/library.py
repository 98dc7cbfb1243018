"""What the Gallery, Compare, Bench and System tabs show: finished clips of the owner, reports, and facts about the server."""

import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import gradio as gr

from videogen.jobs.database import COMPLETED, Job
from videogen.jobs.store import NoSuchJob
from videogen.serve import checkup, comparing, html
from videogen.serve.api import Services
from videogen.serve.figures import REFERENCE, Figures
from videogen.serve.handlers import note, owner_of

PAGE_CLIPS = 24
_SHOWN_PACKAGES = ("videogen", "torch", "diffusers", "transformers", "gradio", "imageio-ffmpeg")


class Library:
    """One for all browsers; nothing about a visitor is kept here."""

    def __init__(self, services: Services, figures: Figures) -> None:
        self.services, self.desk, self.store = services, services.desk, services.store
        self.figures, self.reports = figures, figures.reports

    def gallery(self, words: str, number: float, request: gr.Request) -> tuple[str, Any]:
        """A page of finished clips whose files are there."""
        found = self.store.jobs(owner_of(request), states=(COMPLETED,), limit=2000)
        wanted = words.lower().split()
        clips = self.services.options.clips
        fitting = [job for job in found if all(word in _haystack(job) for word in wanted) and (clips / f"{job.id}.mp4").is_file()]
        first = (max(1, int(number or 1)) - 1) * PAGE_CLIPS
        page = fitting[first : first + PAGE_CLIPS]
        told = note(f"{len(fitting)} clips, page {first // PAGE_CLIPS + 1} of {max(1, -(-len(fitting) // PAGE_CLIPS))}")
        return told + html.gallery(page, self.services.links), _choices(page)

    def delete(self, job_id: str | None, is_sure: bool, request: gr.Request) -> str:
        """Delete one clip."""
        if not is_sure:
            return note("tick the box first", is_error=True)
        try:
            self.desk.remove(owner_of(request), job_id or "")
        except NoSuchJob:
            return note("choose a clip first", is_error=True)
        return note("deleted")

    def newest_pair(self, request: gr.Request) -> tuple[Any, Any]:
        """All finished clips to choose from, the newest two that differ only in the recipe chosen."""
        jobs = self.store.jobs(owner_of(request), states=(COMPLETED,), limit=200)
        left, right = comparing.newest_pair(jobs, REFERENCE)
        return _choices(jobs, left), _choices(jobs, right)

    def compare(self, left: str | None, right: str | None, request: gr.Request) -> tuple[str, str]:
        """Two clips side by side, and their numbers."""
        owner = owner_of(request)
        jobs = [self.store.get(each or "", owner) for each in (left, right)]
        found = [job for job in jobs if job is not None and job.state == COMPLETED]
        if len(found) < 2:
            return note("choose two finished clips", is_error=True), ""
        told = comparing.numbers(found[0], found[1], self.services.options.clips)
        for recipe in dict.fromkeys(job.summary["recipe"] for job in found):
            told += html.figures(recipe, [(each.full, each.source) for each in self.figures.known(recipe)])
        return html.compare(found[0], found[1], self.services.links), told

    def report(self, name: str | None) -> str:
        """One report."""
        return self.reports.text(name or "") or "No report of that name."

    def report_names(self) -> Any:
        """The reports there are now."""
        return gr.update(choices=self.reports.names())

    def ask_doctor(self) -> str:
        """Ask a worker for the doctor's findings."""
        checkup.ask(self.store.database)
        return self.doctor()

    def doctor(self) -> str:
        """The doctor's last findings, or how far they are."""
        return html.checkup(checkup.read(self.store.database))

    def doctor_again(self, seen: str) -> tuple[Any, str]:
        """The same for a page that has it already: nothing is sent while nothing changed."""
        now = self.doctor()
        return (now if now != seen else gr.skip()), now

    def system(self) -> str:
        """What this server runs on; no path, host or user name."""
        usage = shutil.disk_usage(self.services.options.root)
        used, quota = self.store.used_bytes(), self.services.options.limits.quota_bytes
        rows = [("model", self.desk.source.name), ("about the model", self.desk.source.label or "-"), ("workers", self.services.workers())]
        rows += [("clips", f"{used / 1e9:.3f} of {quota / 1e9:g} GB"), ("free disk", f"{usage.free / 1e9:.1f} GB")]
        rows += [(f"jobs {state}", number) for state, number in self.store.counts().items()]
        rows += [(f"{name} version", _version(name)) for name in _SHOWN_PACKAGES]
        last = self.store.jobs(states=(COMPLETED,), limit=1)
        hardware = last[0].record.get("hardware", {}) if last else {}
        rows += [(f"last clip's {name}", value) for name, value in hardware.items()]
        return html.table(("what", "is"), rows)


def _choices(jobs: list[Job], value: str | None = None) -> Any:
    return gr.update(choices=[(html.label(job).partition(": ")[2], job.id) for job in jobs], value=value)


def _haystack(job: Job) -> str:
    summary = job.summary
    return f"{summary['prompt']} {summary['recipe']} {summary['seed']} {summary['size']} {summary['workflow']}".lower()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
