"""From job values to clips that can be rendered: typed, checked, with seeds, identities and names; loads no weight."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from videogen.config import MAX_SEED, Adapters, Recipe, Request, as_plain
from videogen.errors import RequestError, bad
from videogen.families.base import Estimate, Family, Resolved
from videogen.identity import hash_settings
from videogen.jobs.files import MEDIA_KEYS, RawJob
from videogen.jobs.journal import Journal
from videogen.jobs.names import check_template, distinct, render_name
from videogen.jobs.values import adapter_use, cache_prior, flag, listed, media_path, number, scales, text_source, whole
from videogen.priors import uncertified_prior
from videogen.recipes import find_recipe, with_adapters, with_cache, with_sparse

MAX_REPEAT = 10_000
MAX_CLIPS = 100_000
_SHOWN_ERRORS = 20


@dataclass(frozen=True, slots=True)
class Draft:
    """One clip before its seed is settled."""

    request: Request
    resolved: Resolved
    recipe: Recipe
    estimate: Estimate
    place: str
    user_id: str = ""
    tags: tuple[str, ...] = ()
    output: str = ""


@dataclass(frozen=True, slots=True)
class Clip:
    """One clip to render: its draft, seed, identity (hash of everything that decides it) and name without ending.

    drawn: what a drawn seed is known by, empty where the job names one.
    """

    draft: Draft
    seed: int
    job_id: str
    name: str
    is_done: bool = False
    drawn: str = ""


def parse_size(place: str, value: Any) -> tuple[int, int]:
    """`160x96`, `[160, 96]` or `(160, 96)` as (width, height).

    Raises RequestError naming the place.
    """
    parts = value.lower().replace("×", "x").split("x") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise bad(f"{place}: size", value, "WIDTHxHEIGHT, such as 160x96", "correct size")
    return whole(place, "width", parts[0]), whole(place, "height", parts[1])


def make_request(raw: RawJob) -> Request:
    """A typed request from one job's values; relative pictures start at the job file's folder.

    Raises RequestError naming file and line.
    """
    place, given = raw.place, raw.values
    values: dict[str, Any] = {"prompt": given.get("prompt", ""), "negative_prompt": given.get("negative_prompt", "")}
    for key in ("frames", "steps", "seed"):
        if key in given:
            values[key] = whole(place, key, given[key])
    if values.get("seed") == -1:
        values["seed"] = None
    if "seconds" in given:
        values["seconds"] = number(place, "seconds", given["seconds"], "a number of seconds")
    if "size" in given and ("width" in given or "height" in given):
        raise bad(f"{place}: size", given["size"], "either size or width and height", "drop one of them")
    if "size" in given or "width" in given or "height" in given:
        values["size"] = parse_size(place, given.get("size", [given.get("width"), given.get("height")]))
    if "guidance" in given:
        values["guidance"] = scales(place, given["guidance"])
    for key in MEDIA_KEYS[:2]:
        if key in given:
            values[key] = media_path(place, key, given[key], raw.folder)
    references = given.get("references", [])
    values["references"] = tuple(media_path(place, "references", item, raw.folder) for item in listed(references))
    if "round_size" in given:
        values["round_size"] = flag(place, "round_size", given["round_size"])
    try:
        return Request(**values, expand=text_source(given.get("expand", False), raw.folder))
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from None


def _with_options(recipe: Recipe, raw: RawJob) -> Recipe:
    """The recipe with the job's own step cache, sparse attention and adapters."""
    place, given = raw.place, raw.values
    if "cache_lambda" in given:
        prior = cache_prior(place, given["cache_prior"], raw.folder) if "cache_prior" in given else None
        recipe = with_cache(recipe, number(place, "cache_lambda", given["cache_lambda"], "a number"), prior)
    elif "cache_prior" in given:
        raise bad(
            "cache_prior", given["cache_prior"], "cache_lambda beside it", "add --cache-lambda, the error that may be expected of a reuse"
        )
    if "sparse_budget" in given:
        recipe = with_sparse(recipe, number(place, "sparse_budget", given["sparse_budget"], "a number"))
    uses = [adapter_use(place, value, raw.folder) for value in listed(given.get("lora", []))]
    words = given.get("lora_contract", [])
    words = [f"{name}={value}" for name, value in words.items()] if isinstance(words, Mapping) else [str(w) for w in listed(words)]
    return with_adapters(recipe, uses, words, fuse=flag(place, "lora_fuse", given.get("lora_fuse", False)))


def _drafts_of(raw: RawJob, family: Family, recipe: Recipe, read_adapters: Callable[[Recipe], Recipe]) -> list[Draft]:
    request = make_request(raw)
    chosen = find_recipe(str(raw.values["recipe"])) if "recipe" in raw.values else recipe
    repeat = whole(raw.place, "repeat", raw.values.get("repeat", 1))
    if not 1 <= repeat <= MAX_REPEAT:
        raise bad(f"{raw.place}: repeat", repeat, f"from 1 to {MAX_REPEAT}", "correct repeat")
    try:
        chosen = read_adapters(_with_options(chosen, raw))
        resolved = family.resolve(request, chosen)
        if (prior := uncertified_prior(chosen.cache)) is not None:
            prior.check(resolved)
        output = check_template(str(raw.values.get("output", "")))
        if resolved.seed is not None and resolved.seed + repeat - 1 > MAX_SEED:
            raise bad("seed", resolved.seed, f"at most {MAX_SEED} with {repeat} repeats, each one higher", "lower seed")
    except RequestError as error:
        raise RequestError(str(error) if str(error).startswith(f"{raw.place}: ") else f"{raw.place}: {error}") from None
    tags = raw.values.get("tags", [])
    extras: dict[str, Any] = {
        "user_id": str(raw.values.get("id", "")),
        "output": output,
        "tags": tuple(str(tag) for tag in listed(tags)),
    }
    estimate = family.estimate(resolved)
    seeds = [None if resolved.seed is None else resolved.seed + k for k in range(repeat)]
    return [Draft(request, replace(resolved, seed=seed), chosen, estimate, raw.place, **extras) for seed in seeds]


def make_drafts(
    raws: Sequence[RawJob], family: Family, recipe: Recipe, read_adapters: Callable[[Recipe], Recipe] = lambda recipe: recipe
) -> list[Draft]:
    """Check every job and expand repeats; `read_adapters` gives a recipe with the files of its adapters read.

    Raises one RequestError that lists every wrong job (up to 20), each with its place.
    """
    drafts: list[Draft] = []
    errors: list[str] = []
    for raw in raws:
        try:
            drafts += _drafts_of(raw, family, recipe, read_adapters)
        except RequestError as error:
            errors.append(str(error))
        if len(drafts) > MAX_CLIPS:
            raise bad("jobs", f"more than {MAX_CLIPS} clips with their repeats", f"at most {MAX_CLIPS}", "split the files, or lower repeat")
    if len(errors) == 1 and len(raws) == 1:
        raise RequestError(errors[0])
    if errors:
        more = [f"... and {len(errors) - _SHOWN_ERRORS} more"] if len(errors) > _SHOWN_ERRORS else []
        raise RequestError("\n".join([f"{len(errors)} of {len(raws)} jobs are wrong:", *errors[:_SHOWN_ERRORS], *more]))
    return drafts


def identity_settings(draft: Draft, model_identity: str, encoding: Any) -> dict[str, Any]:
    """Everything that decides a clip's bytes, without its seed: the input of its identity."""
    settled = as_plain(draft.resolved)
    kept = {key: value for key, value in settled.items() if key not in ("inputs", "notes", "seed", "expand")}
    kept |= {"expand": draft.resolved.expand.identity} if draft.resolved.expand else {}
    inputs = [[item.role, item.sha256] for item in draft.resolved.inputs]
    unnamed = replace(draft.recipe.cache, prior_file="")  # a prior counts by content, as adapters do in the resolved values
    recipe = as_plain(replace(draft.recipe, adapters=Adapters(), cache=unnamed))
    return kept | {"inputs": inputs, "model": model_identity, "encoding": as_plain(encoding), "recipe": recipe}


@dataclass(slots=True)
class SeedBook:
    """Seeds for drafts that name none. A seed this folder drew before for the same settings is used again when
    resuming, so that an interrupted batch is completed and not begun anew. `remember` keeps a new one."""

    known: Mapping[str, int]
    remember: Callable[[str, int], None]
    draw: Callable[[], int]
    shared_key: str = ""
    _drawn: dict[str, int] = field(default_factory=dict)
    _occurrence: Counter[str] = field(default_factory=Counter)

    def seed(self, settings_hash: str) -> tuple[int, str]:
        """The seed of the next draft with these settings, and what it is known by; one for all drafts when there is a shared key."""
        key = self.shared_key or f"{settings_hash}:{self._occurrence[settings_hash]}"
        self._occurrence[settings_hash] += 1
        if key in self.known:
            return self.known[key], key
        if key not in self._drawn:
            self._drawn[key] = self.draw()
            self.remember(key, self._drawn[key])
        return self._drawn[key], key


def settle(
    drafts: Sequence[Draft],
    journal: Journal,
    seeds: SeedBook,
    *,
    model: tuple[str, str],
    encoding: Any,
    template: str,
    is_resumed: bool,
    is_taken: Callable[[str], bool],
) -> list[Clip]:
    """Give every draft its seed, identity and name; `model` is (name, identity).

    A clip keeps the name the journal knows it by. Clips equal in everything, seed included, are made once.
    """
    clips: dict[str, Clip] = {}
    owners = {known.name.lower(): job_id for job_id, known in journal.jobs.items() if known.name}
    for index, draft in enumerate(drafts, 1):
        settings = identity_settings(draft, model[1], encoding)
        asked = draft.resolved.seed
        seed, drawn = seeds.seed(hash_settings(settings)) if asked is None else (asked, "")
        job_id = hash_settings(settings | {"seed": seed})
        if job_id in clips:
            continue
        known = journal.jobs.get(job_id)
        name = known.name if known and is_resumed else ""
        if not name:
            wanted = render_name(draft.output or template, _name_values(draft, index, seed, model[0]))
            name = distinct(wanted, lambda lowered: lowered in owners or is_taken(lowered))
        owners[name.lower()] = job_id
        clips[job_id] = Clip(draft, seed, job_id, name, is_resumed and journal.is_done(job_id), drawn)
    return list(clips.values())


def _name_values(draft: Draft, index: int, seed: int, model: str) -> dict[str, Any]:
    r = draft.resolved
    first = next((Path(item.name).stem for item in r.inputs), "")
    return {
        "index": index,
        "id": draft.user_id or str(index),
        "seed": seed,
        "prompt": r.prompt,
        "model": model,
        "recipe": r.recipe,
        "size": f"{r.width}x{r.height}",
        "frames": r.frames,
        "steps": r.steps,
        "stem": first,
    }
