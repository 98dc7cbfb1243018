"""What the page's buttons do: plain functions over desk and store, always for the owner who is logged in."""

from collections.abc import Callable
from html import escape
from typing import Any

import gradio as gr

from videogen.errors import RequestError, VideogenError
from videogen.jobs.database import RUNNING, Job
from videogen.jobs.store import NoSuchJob
from videogen.recipes import find_recipe
from videogen.seeds import draw_seed
from videogen.serve import html, queuefile
from videogen.serve.api import Services
from videogen.serve.auth import ANYONE
from videogen.serve.figures import REFERENCE, Figures
from videogen.serve.forms import MAX_LINES, PICTURE_KINDS, form_fields, plain_values, prompts_of, told_count

_KINDS = {each.name: each.kind for each in form_fields()}


def note(text: str, *, is_error: bool = False) -> str:
    return f'<p role="{"alert" if is_error else "status"}">{"Not done: " if is_error else ""}{escape(text)}</p>'


def owner_of(request: gr.Request) -> str:
    """The name that logged in, or everybody's where no key is needed."""
    return str(request.username or ANYONE)


class Handlers:
    """One page for all browsers; nothing about a visitor is kept here."""

    ACTS = {"up": "Up", "down": "Down", "duplicate": "Again, new seed", "stop": "Cancel"}  # noqa: RUF012

    def __init__(self, services: Services, figures: Figures) -> None:
        self.services, self.desk, self.store, self.figures = services, services.desk, services.store, figures
        self.names: list[str] = []

    def _read(self, values: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, list[bytes]], list[str], int]:
        """A filled form: fields, pictures, prompts, clips per prompt."""
        *given, adapters, recipe, is_one_per_line, repeats = values
        named = dict(zip(self.names, given))
        pictures = {name: named.pop(name) for name in [*named] if _KINDS[name] in PICTURE_KINDS}
        uploads = {name: list(data) if isinstance(data, list) else [data] for name, data in pictures.items() if data}
        fields = plain_values(named) | ({"lora": adapters} if adapters else {}) | {"recipe": recipe}
        prompts = prompts_of(str(named.get("prompt") or ""), is_one_per_line=bool(is_one_per_line))
        if len(prompts) * int(repeats or 1) > MAX_LINES:
            raise RequestError(f"prompt: got {len(prompts)} x {int(repeats)} clips, expected at most {MAX_LINES}; submit fewer at once")
        return fields, uploads, prompts, max(1, int(repeats or 1))

    def _submit_all(self, owner: str, values: tuple[Any, ...], recipes: list[str]) -> list[Job]:
        """A job for each prompt, repeat and recipe, all or none; recipes of one prompt and repeat share its seed."""
        fields, uploads, prompts, repeats = self._read(values)
        asked = []
        for prompt in prompts:
            for index in range(repeats):
                seed = fields.get("seed", -1)
                each = fields | {"prompt": prompt, "seed": draw_seed() if seed == -1 else seed + index}
                asked += [_for_recipe(each, recipe, is_only=len(recipes) == 1) for recipe in recipes]
        return self.desk.submit_all(owner, asked, uploads)

    def submit(self, request: gr.Request, *values: Any) -> tuple[Any, Any]:
        """Add to queue."""
        try:
            jobs = self._submit_all(owner_of(request), values, [values[-3]])
        except VideogenError as error:
            return note(str(error), is_error=True), gr.skip()
        notes = "; ".join(jobs[0].summary["notes"])
        return note(f"{len(jobs)} in the queue. {notes}"), jobs[0].id

    def submit_pair(self, request: gr.Request, *values: Any) -> tuple[Any, Any]:
        """The clip of the form and the same by the reference recipe, one seed."""
        try:
            if values[-3] == REFERENCE:
                raise RequestError(f"recipe: got {REFERENCE}, expected another one; choose what to compare with it")
            jobs = self._submit_all(owner_of(request), values, [REFERENCE, values[-3]])
        except VideogenError as error:
            return note(str(error), is_error=True), gr.skip()
        steps = " against ".join(f"{job.summary['steps']} ({job.summary['recipe']})" for job in reversed(jobs[:2]))
        return note(f"{len(jobs)} in the queue, steps {steps}; when they are done, Compare shows the newest pair."), jobs[0].id

    def count(self, *values: Any) -> str:
        """How many clips the form means, how long each, and about when they would be done."""
        try:
            fields, _, prompts, repeats = self._read(values)
            if not prompts or not prompts[0].strip():
                return ""
            summary = self.desk.check(fields | {"prompt": prompts[0]}, {}).summary
        except VideogenError as error:
            return escape(str(error))
        rate = self.desk.seconds_per_tflop()
        told = f"{summary['frames']} frames ({summary['seconds']} s), {summary['steps']} steps at {summary['size']}"
        notes = "".join(f"\n* {escape(note)}" for note in summary["notes"])
        return told_count(prompts, repeats, None if rate is None else rate * summary["tflop"], told) + notes

    def told_recipe(self, recipe: str) -> str:
        """What is known about a recipe, and where from, or that nothing is."""
        lines = [f"* {escape(each.full)} [{escape(each.source)}]" for each in self.figures.known(recipe)]
        return "\n".join(lines) or f"{escape(recipe)}: nothing measured here yet (`videogen eval`)."

    def recipes(self) -> list[tuple[str, str]]:
        """The recipes to choose from, each with the best known figure beside its name."""
        return [(self.figures.label(name), name) for name in self.desk.recipes()]

    def recipes_again(self, chosen: str) -> tuple[Any, str]:
        """The same for a page that has just opened, and what is known of the one chosen."""
        return gr.update(choices=self.recipes()), self.told_recipe(chosen)

    def load(self, request: gr.Request) -> tuple[Any, ...]:
        """A page just opened: find what runs."""
        running = self.store.jobs(owner_of(request), states=(RUNNING,), limit=1)
        return self.tick(running[0].id if running else "", {"note": "Running clip found." if running else ""}, request)

    def tick(self, shown: str, seen: dict[str, Any], request: gr.Request) -> tuple[Any, ...]:
        """Everything that changes by itself; what did not change is not sent."""
        owner = owner_of(request)
        waiting = self.store.waiting(owner)
        job = self._shown(owner, shown, waiting)
        preview = job is not None and (self.services.options.clips / f"{job.id}.preview.webp").is_file()
        clip = None if job is None else [job.id, job.state, job.step if preview else 0]
        fresh: dict[str, Any] = {
            "header": html_header(self, waiting),
            "status": html.progress(job, str(seen.get("note", ""))),
            "clip": clip,
            "cards": html.queue(waiting, self.store.is_paused, self.desk.seconds_per_tflop()),
            "choices": [[html.label(each).partition(": ")[2], each.id] for each in waiting],
        }
        changed = {name: fresh[name] != seen.get(name) for name in fresh}
        return (
            fresh["header"] if changed["header"] else gr.skip(),
            fresh["status"] if changed["status"] else gr.skip(),
            html.player(job, self.services.links, preview) if changed["clip"] else gr.skip(),
            fresh["cards"] if changed["cards"] else gr.skip(),
            gr.update(choices=[tuple(each) for each in fresh["choices"]]) if changed["choices"] else gr.skip(),
            job.id if job is not None else "",
            fresh | {"note": seen.get("note", "")},
        )

    def _shown(self, owner: str, shown: str, waiting: list[Job]) -> Job | None:
        """The clip to show: the chosen one until it is over, then the one that runs, then the newest."""
        job = self.store.get(shown, owner) if shown else None
        if job is not None and not (job.is_over and any(each.state == RUNNING for each in waiting)):
            return job
        running = [each for each in waiting if each.state == RUNNING]
        newest = running or self.store.jobs(owner, limit=1)
        return newest[0] if newest else None

    def cancel(self, job_id: str, request: gr.Request) -> str:
        """Stop the clip shown."""
        try:
            job = self.store.cancel(job_id, owner_of(request))
        except NoSuchJob:
            return note("there is no clip to cancel", is_error=True)
        if job.percent == 100:
            return note("it is already done")
        return note("cancelled" if job.is_over else "stopping at the next step")

    def settings_of(self, names: list[str]) -> Callable[..., list[Any]]:
        """A handler that puts a clip's settings back into the form."""

        def use(job_id: str, request: gr.Request) -> list[Any]:
            kept = [name for name in names if _KINDS[name] not in PICTURE_KINDS]
            job = self.store.get(job_id or "", owner_of(request))
            if job is None:
                return [gr.skip()] * (len(kept) + 2)
            asked = job.summary["request"]
            defaults: dict[str, Any] = {"seconds": job.summary["seconds"], "size": "", "steps": 0, "frames": 0, "round_size": False}
            values = [_typed(name, asked.get(name, defaults.get(name, ""))) for name in kept]
            return [*values, [text.partition(":")[0] for text in asked.get("lora", [])], job.summary["request"]["recipe"]]

        return use

    def seed_of(self, job_id: str, request: gr.Request) -> Any:
        """The seed of the clip shown."""
        job = self.store.get(job_id or "", owner_of(request))
        return gr.skip() if job is None else job.summary["seed"]

    def vary(self, job_id: str, request: gr.Request) -> str:
        """Four clips like the one shown, with new seeds."""
        try:
            jobs = [self.desk.duplicate(owner_of(request), job_id, {"seed": -1}) for _ in range(4)]
        except VideogenError as error:
            return note(str(error), is_error=True)
        return note(f"{len(jobs)} in the queue")

    def act(self, name: str) -> Callable[..., str]:
        """A handler for one button of the Queue tab."""

        def do(job_id: str | None, request: gr.Request) -> str:
            owner = owner_of(request)
            acts: dict[str, Callable[[str], Job]] = {
                "up": lambda i: self.store.move(i, owner, -1),
                "down": lambda i: self.store.move(i, owner, 1),
                "duplicate": lambda i: self.desk.duplicate(owner, i, {"seed": -1}),
                "stop": lambda i: self.store.cancel(i, owner),
            }
            try:
                acts[name](job_id or "")
            except NoSuchJob:
                return note("choose a job first", is_error=True)
            except VideogenError as error:
                return note(str(error), is_error=True)
            return note(f"{self.ACTS[name]}: done")

        return do

    def edit(self, job_id: str | None, prompt: str, seed: float, recipe: str, request: gr.Request) -> str:
        """Save changes to a waiting job."""
        changes: dict[str, Any] = {"prompt": prompt} if prompt.strip() else {}
        changes |= ({"seed": int(seed)} if seed is not None and seed >= -1 else {}) | ({"recipe": recipe} if recipe else {})
        try:
            self.desk.edit(owner_of(request), job_id or "", changes)
        except NoSuchJob:
            return note("choose a job first", is_error=True)
        except VideogenError as error:
            return note(str(error), is_error=True)
        return note("saved")

    def save(self, request: gr.Request) -> str:
        """The waiting jobs as a file to keep; it is made in the page and lies nowhere on the server."""
        jobs = self.store.waiting(owner_of(request))
        text, left_out = queuefile.as_lines(jobs)
        return html.saved(text, len(jobs) - left_out, left_out)

    def load_file(self, data: bytes | None, request: gr.Request) -> str:
        """Queue the jobs of such a file."""
        if not data:
            return note("choose a file first", is_error=True)
        try:
            jobs = queuefile.load(self.desk, owner_of(request), data)
        except VideogenError as error:
            return note(str(error), is_error=True)
        return note(f"{len(jobs)} in the queue")

    def pause(self) -> str:
        """Pause."""
        self.store.pause(True)
        return note("paused; what runs is finished")

    def go_on(self) -> str:
        """Go on."""
        self.store.pause(False)
        return note("going on")


def _for_recipe(fields: dict[str, Any], recipe: str, *, is_only: bool) -> dict[str, Any]:
    """The fields under a recipe. In a pair, a few-step recipe keeps its own steps: those of the form are the reference's."""
    kept = fields if is_only or find_recipe(recipe).steps is None else {name: value for name, value in fields.items() if name != "steps"}
    return kept | {"recipe": recipe}


def html_header(handlers: Handlers, waiting: list[Job]) -> str:
    """Model, workers, queue."""
    running = sum(job.state == RUNNING for job in waiting)
    workers = handlers.services.workers()
    told = f"{workers} worker{'s' * (workers != 1)}" if workers else "no worker yet"
    queue = f"{running} rendering, {len(waiting) - running} waiting"
    return f"<b>videogen</b> · model {escape(handlers.desk.source.name)} · {told} · {queue}"


def _typed(name: str, value: Any) -> Any:
    kind = _KINDS[name]
    if kind == "whole":
        return int(value or 0)
    return float(value or 0) if kind == "number" else value
