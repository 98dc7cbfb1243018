"""From an evaluation's options to its report: settles both arms, scores the trials, writes; the one place that opens models for it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from eval.arms import open_arms
from eval.fingerprint import fingerprint
from eval.metrics.registry import Metric, find_metric, too_small, usable
from eval.quality import Scored, make_report, score_all
from eval.quality_cases import Case, Shape, read_cases, shard_of
from eval.quality_folders import differing_recipe_fields, pair_folders, read_trials
from eval.quality_html import contact_sheet
from eval.quality_journal import NAME, TrialJournal
from eval.quality_report import FILES, write_report
from eval.quality_trials import Bench, Trial, other_kernel
from eval.report_folder import check_free
from videogen.adapters import settle
from videogen.config import Adapters, Recipe, as_plain, read_environment, recipe_record
from videogen.device_profile import read_profile
from videogen.errors import EnvironmentFault, bad, say
from videogen.identity import hash_file, hash_settings
from videogen.load import pick_device
from videogen.media import Encoding
from videogen.priors import open_prior
from videogen.recipes import find_recipe, with_cache, with_sparse
from videogen.source import find_model, open_family
from videogen.transforms.cpu_bfloat16 import has_fast_bfloat16

SHARD_SCHEMA = "videogen.eval-shard/1"


@dataclass(frozen=True, slots=True)
class Rendering:
    """What both arms render. `anchors` is how many prompts also get floor and ceiling; None is all of them."""

    recipe: str = "exact"
    vs: str = "plain"
    cache_lambda: float = 0.0
    cache_prior: str | None = None
    sparse_budget: float | None = None
    sparse_small: bool = False
    prompts: str = "8"
    workflow: str | None = None
    model: str = "pocket"
    shape: Shape = field(default_factory=Shape)
    dtype: str | None = None
    device: str = "auto"
    anchors: int | None = None
    lossless: bool = False

    @property
    def arms(self) -> tuple[Recipe, Recipe]:
        """The recipe under test and the reference. Raises RequestError for a name that is none, or a wrong number."""
        if self.cache_prior and not self.cache_lambda:
            raise bad("--cache-prior", self.cache_prior, "--cache-lambda beside it", "add the error that may be expected of a reuse")
        prior = open_prior(Path(self.cache_prior).expanduser(), what="--cache-prior") if self.cache_prior else None
        new, reference = with_cache(find_recipe(self.recipe), self.cache_lambda, prior), find_recipe(self.vs)
        new = new if self.sparse_budget is None else with_sparse(new, self.sparse_budget)
        if self.sparse_small:
            new = replace(new, sparse=replace(new.sparse, min_rows=0, tile=(8, 2, 2), block=(32, 16)))
        if self.dtype:
            new, reference = replace(new, dtype=self.dtype), replace(reference, dtype=self.dtype)
        return new, reference


@dataclass(frozen=True, slots=True)
class Output:
    """Where the report goes, and which metrics it must hold."""

    folder: Path
    overwrite: bool = False
    required: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Planned:
    """Trials that wait to be made, and the facts of the report they belong to; `journal` has those of `names` that are made."""

    trials: Iterator[Trial]
    total: int
    facts: dict[str, Any]
    journal: TrialJournal | None = None
    names: tuple[str, ...] = ()


def evaluate_rendering(
    rendering: Rendering, output: Output, tell: Callable[[str], None], shard: str | None = None
) -> tuple[dict[str, Any], list[Path]]:
    """Render both arms and evaluate; returns the report and its files. What a stopped run of the same question measured is taken over.

    With a shard `I/N` only that share is measured and kept, for the run that makes the report.
    Raises RequestError or EnvironmentFault before a weight loads for whatever can be known by then.
    """
    metrics = _metrics(output)
    if shard is not None and output.overwrite:
        raise bad("--overwrite with --shard", shard, "one of the two", "remove the folder: other shards may be at work in it")
    planned = _plan_rendering(rendering, output, metrics, tell, shard)
    if shard is None:
        return _finish(planned, metrics, output, tell)
    _scored(planned, metrics, tell)
    return {"schema": SHARD_SCHEMA, "shard": shard, "prompts": planned.total}, [output.folder / NAME]


def evaluate_folders(new: Path, reference: Path, output: Output, tell: Callable[[str], None]) -> tuple[dict[str, Any], list[Path]]:
    """Evaluate two finished run folders; returns the report and its files. Raises RequestError when they do not pair."""
    metrics = _metrics(output)
    if output.folder.resolve() in (new.resolve(), reference.resolve()):
        raise bad("--output-dir", str(output.folder), "another folder than the two runs", "choose another")
    pairs = pair_folders(new, reference)
    first = pairs[0][1].record
    _check_sides(output.required, first["resolved"]["height"], first["resolved"]["width"])
    differing = differing_recipe_fields(pairs)
    facts = {
        "mode": "folders",
        "recipes": {"new": pairs[0][0].record["recipe"], "reference": first["recipe"]},
        "model": first["model"],
        "settings": {"folders": [str(new), str(reference)], "differing": differing},
        "settings_text": f"run folders {new} and {reference}, differing in {', '.join(differing) or 'nothing'}",
        "anchors": {"floor": "none, finished folders hold no anchors", "ceiling": "none, likewise"},
    }
    return _finish(Planned(read_trials(pairs), len(pairs), facts), metrics, output, tell)


def _metrics(output: Output) -> tuple[Metric, ...]:
    check_free(output.folder, FILES[0], overwrite=output.overwrite)
    for name in output.required:
        if reason := find_metric(name).lacks():
            raise EnvironmentFault(say(f"metric {name}", reason, "everything it needs", "provide it, or drop --require"))
    return usable()


def _check_sides(required: Sequence[str], height: int, width: int) -> None:
    for name in required:
        if reason := too_small(find_metric(name), height, width):
            raise bad(f"--require {name}", reason, "a canvas it can measure", "use a larger --size, or drop --require")


def _plan_rendering(
    rendering: Rendering, output: Output, metrics: Sequence[Metric], tell: Callable[[str], None], shard: str | None
) -> Planned:
    source = find_model(rendering.model, offline=read_environment().offline)
    new, reference = (settle(recipe, source) for recipe in rendering.arms)
    family = open_family(source)
    cases = read_cases(rendering.prompts, rendering.workflow, rendering.shape, family, reference)
    for case in cases:
        family.resolve(case.request, new)
    num_anchors = len(cases) if rendering.anchors is None else rendering.anchors
    if not 0 <= num_anchors <= len(cases):
        raise bad("--anchors", num_anchors, f"from 0 to the number of prompts ({len(cases)})", "change it")
    settled = family.resolve(cases[0].request, reference)
    _check_sides(output.required, settled.height, settled.width)
    device = pick_device(rendering.device)
    told = f"{settled.width}x{settled.height}, {settled.frames} frames, {settled.steps} forwards, {settled.workflow}"
    kernel, _ = other_kernel(device)
    names = tuple(case.name for case in (cases if shard is None else shard_of(cases, shard)))
    asked: dict[str, Any] = {"model": source.identity, "device": _device(device), "metrics": [each.name for each in metrics]}
    asked |= {"lossless": rendering.lossless, "code": _code()}
    questions = {
        case.name: hash_settings(asked | {"has_anchors": index < num_anchors} | _asked(case, family, (new, reference)))
        for index, case in enumerate(cases)
    }
    journal = TrialJournal(output.folder, questions)
    journal.prepare()
    if not output.overwrite:
        journal.read()
    left = {name for name in names if name not in journal.rows}
    anchored = sum(case.name in left for case in cases[:num_anchors])
    tell(f"{2 * (len(left) + anchored)} clips to render: {len(left)} prompts in two arms, {anchored} with two anchors; {told}")
    if len(left) < len(names):
        tell(f"{len(names) - len(left)} of {len(names)} prompts were measured here before: taken over")

    def trials() -> Iterator[Trial]:
        if left:
            arms = open_arms(source, {"reference": reference, "new": new}, rendering.device)
            if output.overwrite:  # the report too, so that a stopped run can go on without --overwrite
                journal.forget()
                (output.folder / FILES[0]).unlink(missing_ok=True)
            encoding = Encoding(lossless=rendering.lossless)
            yield from Bench(arms["new"], arms["reference"], device, output.folder, num_anchors, encoding).run(cases, left)

    facts = {
        "mode": "render",
        "recipes": {"new": recipe_record(new), "reference": recipe_record(reference)},
        "model": source.record(),
        "settings": as_plain(rendering),
        "settings_text": f"{told} (first prompt), {device.type}",
        "anchors": {
            "floor": f"the reference with attention kernel '{kernel}' ({num_anchors} prompts)",
            "ceiling": f"the reference with another seed ({num_anchors} prompts)",
        },
    }
    return Planned(trials(), len(names), facts, journal, names)


def _code() -> dict[str, Any]:
    """What renders and measures, by content: a line of other code answers another question."""
    root = Path(__file__).parents[1]
    files = (path for name in ("caches", "eval", "lora", "videogen") for path in (root / name).rglob("*"))
    found = {path.relative_to(root).as_posix(): hash_file(path) for path in files if path.suffix in (".py", ".jsonl")}
    return {"software": fingerprint()["software"], "files": hash_settings(found)}


def _device(device: torch.device) -> list[Any]:
    """What `auto` depends on: the kind of device, and what doctor saved of this one. Which of several, and its threads, decide nothing."""
    profile = read_profile(device, read_environment())
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"bfloat16: {has_fast_bfloat16()}"
    return [device.type, kind, profile and [[each.dtype, each.rows, each.attention, each.matmul] for each in profile.entries]]


def _asked(case: Case, family: Any, recipes: tuple[Recipe, Recipe]) -> dict[str, Any]:
    """Everything that decides a case's two clips."""
    arms = []
    for recipe in recipes:
        resolved = family.resolve(case.request, recipe)
        settled = as_plain(replace(resolved, inputs=(), notes=(), expand=None))  # adapters are in it, by content
        seen = [[each.role, each.sha256] for each in resolved.inputs]
        expand = resolved.expand and resolved.expand.identity
        arms.append([settled, as_plain(replace(recipe, adapters=Adapters())), seen, expand])
    return {"name": case.name, "seed": case.seed, "arms": arms}


def _scored(planned: Planned, metrics: Sequence[Metric], tell: Callable[[str], None]) -> tuple[list[Scored], bool]:
    """Every row, those of the journal included, and whether the oracle read them."""
    is_pocket = str(planned.facts["model"]["card"].get("name", "")).startswith("pocket")
    journal = planned.journal
    known, keep = (0, None) if journal is None else (len(journal.ordered(planned.names)), journal.add)
    rows = score_all(
        planned.trials, metrics, total=planned.total, has_oracle=is_pocket, draw=contact_sheet, tell=tell, keep=keep, known=known
    )
    return (rows if journal is None else journal.ordered(planned.names)), is_pocket


def _finish(planned: Planned, metrics: Sequence[Metric], output: Output, tell: Callable[[str], None]) -> tuple[dict[str, Any], list[Path]]:
    rows, is_pocket = _scored(planned, metrics, tell)
    skipped = "" if is_pocket else "the model is not pocket-h3, the only one whose clips the oracle can read"
    report = make_report(rows, metrics, planned.facts | {"fingerprint": fingerprint()}, oracle_skipped=skipped)
    return report, write_report(output.folder, report, rows, overwrite=output.overwrite)
