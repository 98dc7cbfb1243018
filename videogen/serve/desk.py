"""The one way in: fields and pictures from the API or the page to a checked job; opens no path and no address a client names."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from videogen.config import SHIPPED, Recipe
from videogen.errors import RequestError, bad, say
from videogen.families.base import Family
from videogen.identity import hash_bytes, hash_settings
from videogen.jobs.database import COMPLETED, Job
from videogen.jobs.files import RawJob
from videogen.jobs.plan import Draft, make_drafts
from videogen.jobs.store import Conflict, NoSuchJob, Store
from videogen.recipes import PLANNED, RECIPES, find_recipe, parse_adapter
from videogen.seeds import draw_seed
from videogen.serve.options import ServeOptions
from videogen.serve.uploads import store_picture
from videogen.source import ModelSource

ALIASES = {"num_frames": "frames", "num_inference_steps": "steps", "input_reference": "image"}
FIELDS = ("prompt", "negative_prompt", "guidance", "size", "seconds", "frames", "steps", "seed", "recipe", "lora", "round_size")
PICTURES = ("image", "last_image", "references")
DEFAULT_RECIPE = "exact"
MAX_PROMPT_CHARACTERS = 20_000
_RATES_FROM = 30  # finished jobs
Uploads = Mapping[str, list[bytes]]


@dataclass(frozen=True, slots=True)
class Checked:
    """A job ready for the store: settings for the worker, a summary for everyone's eyes, bytes it may take."""

    settings: dict[str, Any]
    summary: dict[str, Any]
    disk_bytes: int


@dataclass(slots=True)
class Desk:
    """Checks against one model and hands on to one store. `read_adapters` gives a recipe with its adapter files read.

    adapters: the files a client may name, by name.
    """

    store: Store
    source: ModelSource
    family: Family
    options: ServeOptions
    read_adapters: Callable[[Recipe], Recipe]
    adapters: dict[str, Path] = field(default_factory=dict)

    def check(self, fields: Mapping[str, Any], uploads: Uploads, *, kept: Mapping[str, Any] | None = None) -> Checked:
        """Check everything a clip needs; `kept` are stored pictures of an earlier job. Pictures are stored here.

        Raises RequestError that begins with the field at fault.
        """
        asked = self._known_fields(fields)
        values = {name: value for name, value in asked.items() if name != "model" and value not in (None, "")}
        if "lora" in values:
            values["lora"] = [self._adapter(text) for text in _texts(values["lora"])]
        if "seed" not in values or values["seed"] in (-1, "-1"):
            values["seed"] = draw_seed()
        values.setdefault("recipe", DEFAULT_RECIPE)
        stored: list[Path] = []
        try:
            pictures = dict(kept or {}) | self._store_pictures(uploads, stored)
            draft = self._draft(values | pictures)
        except BaseException:
            for path in stored:
                path.unlink(missing_ok=True)
            raise
        shown = {name: asked[name] for name in FIELDS if asked.get(name) not in (None, "")}
        shown |= {"seed": values["seed"], "recipe": values["recipe"]}
        return Checked(values | pictures, self._summary(draft, shown, pictures), draft.estimate.disk_bytes)

    def _known_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        asked: dict[str, Any] = {}
        for given, value in fields.items():
            name = ALIASES.get(given, given)
            picture = given.partition("[")[0]
            if ALIASES.get(picture, picture) in PICTURES:
                advice = "addresses and paths are not taken; upload the file"
                raise RequestError(say(picture, "no file", "an uploaded picture (multipart/form-data)", advice))
            if name not in (*FIELDS, "model"):
                expected = f"one of {', '.join((*FIELDS, 'model', *PICTURES))}"
                raise RequestError(say(given[:60], "a field that does not exist", expected, "remove it"))
            if name in asked:
                raise RequestError(say(given, "two spellings", f"{name} once", "remove one of them"))
            asked[name] = value
        _check_types(asked)
        if asked.get("model") not in (None, "", self.source.name):
            raise bad("model", asked["model"], self.source.name, "leave it out, or ask another server")
        recipe = asked.get("recipe")
        if recipe not in (None, "", *self.recipes()):
            raise bad("recipe", recipe, f"one of {', '.join(self.recipes())}", "change recipe")
        return asked

    def recipes(self) -> list[str]:
        """The recipes this model can really run: those that are built and whose adapters it ships."""
        return [name for name in (*RECIPES, *PLANNED) if self._is_there(name)]

    def _is_there(self, name: str) -> bool:
        try:
            return all(self._is_shipped(use.file) for use in find_recipe(name).adapters.uses)
        except RequestError:
            return False

    def _is_shipped(self, name: str) -> bool:
        return (self.source.adapters_folder / f"{name.removeprefix(SHIPPED)}.safetensors").is_file()

    def _adapter(self, text: str) -> dict[str, Any]:
        use = parse_adapter(text)
        path = self.adapters.get(use.file)
        if path is None:
            expected = f"one of {', '.join(sorted(self.adapters)) or 'none (start the server with --adapters DIR)'}"
            raise bad("lora", use.file, expected, "choose one that the server lists")
        return {"file": str(path), "strength": use.strength} | ({"expert": use.expert} if use.expert else {})

    def _store_pictures(self, uploads: Uploads, stored: list[Path]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for given, files in uploads.items():
            name = ALIASES.get(given, given)
            if name not in PICTURES:
                raise bad(given[:60], "a file", f"a file for one of {', '.join(PICTURES)}", "rename the field")
            if name != "references" and len(files) != 1:
                raise bad(given, f"{len(files)} files", "one picture", "use references for several")
            names = []
            for data in files:
                path = store_picture(data, self.options.uploads, field=given, max_pixels=self.options.max_upload_pixels)
                stored.append(path)
                names.append(f"{self.options.uploads.name}/{path.name}")
            found[name] = names if name == "references" else names[0]
        return found

    def _draft(self, values: dict[str, Any]) -> Draft:
        raw = RawJob(values, "request", self.options.root)
        try:
            return make_drafts([raw], self.family, Recipe(), self.read_adapters)[0]
        except RequestError as error:
            raise RequestError(_without_paths(str(error).removeprefix("request: "), self.options.root)) from None

    def _summary(self, draft: Draft, asked: dict[str, Any], pictures: Mapping[str, Any]) -> dict[str, Any]:
        resolved = draft.resolved
        return {
            "request": asked,
            "pictures": {name: len(value) if isinstance(value, list) else 1 for name, value in pictures.items()},
            "model": self.source.name,
            "label": self.source.label,
            "prompt": resolved.prompt,
            "workflow": resolved.workflow,
            "size": f"{resolved.width}x{resolved.height}",
            "frames": resolved.frames,
            "seconds": round(resolved.seconds, 3),
            "fps": resolved.fps,
            "steps": resolved.steps,
            "seed": resolved.seed,
            "recipe": resolved.recipe,
            "notes": list(resolved.notes),
            "tflop": round(draft.estimate.tflop, 4),
        }

    def submit(self, owner: str, fields: Mapping[str, Any], uploads: Uploads | None = None, *, key: str = "") -> tuple[Job, bool]:
        """Check and accept. The flag says whether the job is new; an idempotency key gives back the first one."""
        digest = ""
        if key:
            hashes = {name: [hash_bytes(data) for data in files] for name, files in (uploads or {}).items()}
            digest = hash_settings([{name: str(value) for name, value in fields.items()}, hashes])
            if known := self.store.known(owner, key, digest):
                return known, False
        checked = self.check(fields, uploads or {})
        try:
            job, is_new = self.store.submit(owner, checked.settings, checked.summary, size_bytes=checked.disk_bytes, key=key, digest=digest)
        except BaseException:
            self._drop_pictures(checked.settings)
            raise
        if not is_new:
            self._drop_pictures(checked.settings)
        return job, is_new

    def submit_all(self, owner: str, asked: Sequence[Mapping[str, Any]], uploads: Uploads | None = None) -> list[Job]:
        """Check every one, then accept all or none. Pictures are stored once for each, so that each job owns its own."""
        checked: list[Checked] = []
        try:
            for fields in asked:
                checked.append(self.check(fields, uploads or {}))
            return self.accept_all(owner, checked)
        except BaseException:
            for each in checked:
                self._drop_pictures(each.settings)
            raise

    def accept_all(self, owner: str, checked: Sequence[Checked]) -> list[Job]:
        """Accept all of them or none. Raises QueueFull at a limit."""
        return self.store.submit_all(owner, [(each.settings, each.summary, each.disk_bytes) for each in checked])

    def edit(self, owner: str | None, job_id: str, changes: Mapping[str, Any]) -> Job:
        """Change fields of a queued job; its pictures stay."""
        job = self._own(owner, job_id)
        kept = {name: job.settings[name] for name in PICTURES if name in job.settings}
        checked = self.check(_overlaid(job, changes), {}, kept=kept)
        return self.store.edit(job_id, owner, checked.settings, checked.summary)

    def duplicate(self, owner: str, job_id: str, changes: Mapping[str, Any]) -> Job:
        """The same job again with some fields changed. Pictures are stored a second time, so that each job owns its own."""
        job = self._own(owner, job_id)
        uploads = {name: [(self.options.root / item).read_bytes() for item in _texts(job.settings[name])] for name in self._kept(job)}
        return self.submit(owner, _overlaid(job, changes), uploads)[0]

    def _kept(self, job: Job) -> list[str]:
        return [name for name in PICTURES if name in job.settings]

    def _own(self, owner: str | None, job_id: str) -> Job:
        job = self.store.get(job_id, owner)
        if job is None:
            raise NoSuchJob(job_id)
        return job

    def remove(self, owner: str | None, job_id: str) -> Job:
        """Forget a finished job and delete its clip and pictures. Raises Conflict while it is not over."""
        job = self.store.remove(job_id, owner)
        self._drop_files(job)
        return job

    def sweep(self, now: float) -> int:
        """Remove the jobs whose time is over; returns how many."""
        gone = self.store.expired(now)
        for job in gone:
            try:
                self.remove(None, job.id)
            except (NoSuchJob, Conflict):  # somebody else removed it
                continue
        return len(gone)

    def _drop_files(self, job: Job) -> None:
        for path in self.options.clips.glob(f"{job.id}.*"):
            path.unlink(missing_ok=True)
        self._drop_pictures(job.settings)

    def _drop_pictures(self, settings: Mapping[str, Any]) -> None:
        for name in PICTURES:
            for item in _texts(settings.get(name, [])):
                (self.options.root / item).unlink(missing_ok=True)

    def seconds_per_tflop(self) -> float | None:
        """The median cost of the last finished jobs, or None before the first."""
        jobs = self.store.jobs(states=(COMPLETED,), limit=_RATES_FROM)
        spent = [(j.finished - j.started) / j.summary["tflop"] for j in jobs if j.finished and j.started and j.summary.get("tflop")]
        spent = sorted(spent)
        return spent[len(spent) // 2] if spent else None


def _texts(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def _overlaid(job: Job, changes: Mapping[str, Any]) -> dict[str, Any]:
    asked = dict(job.summary["request"])
    if "seconds" in changes or "frames" in changes:
        asked = {name: value for name, value in asked.items() if name not in ("seconds", "frames")}
    return asked | dict(changes)


def _check_types(asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        listed = name == "lora" and isinstance(value, list) and len(value) <= 16 and all(isinstance(item, str) for item in value)
        if not listed and not (value is None or isinstance(value, str | int | float | bool)):
            raise bad(name, json.dumps(value)[:60], "a text or a number", f"correct {name}")
    prompt = asked.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise bad("prompt", prompt, "a text with at least one visible character", "say what the clip should show")
    for name in ("prompt", "negative_prompt"):
        if len(text := str(asked.get(name) or "")) > MAX_PROMPT_CHARACTERS:
            raise bad(name, f"{len(text)} characters", f"at most {MAX_PROMPT_CHARACTERS}", "shorten it")


def _without_paths(message: str, root: Path) -> str:
    return message.replace(str(root), "")
