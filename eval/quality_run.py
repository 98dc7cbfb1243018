"""From an evaluation's options to its report: settles both arms, scores the trials, writes; the one place that opens models for it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eval.arms import open_arms
from eval.fingerprint import fingerprint
from eval.metrics.registry import Metric, find_metric, too_small, usable
from eval.quality import make_report, score_all
from eval.quality_cases import Shape, read_cases
from eval.quality_folders import differing_recipe_fields, pair_folders, read_trials
from eval.quality_html import contact_sheet
from eval.quality_report import FILES, write_report
from eval.quality_trials import Bench, Trial, other_kernel
from eval.report_folder import check_free
from videogen.adapters import settle
from videogen.config import Recipe, as_plain, read_environment, recipe_record
from videogen.errors import EnvironmentFault, bad, say
from videogen.media import Encoding
from videogen.recipes import find_recipe, with_cache, with_sparse
from videogen.source import find_model, open_family


@dataclass(frozen=True, slots=True)
class Rendering:
    """What both arms render. `anchors` is how many prompts also get floor and ceiling; None is all of them."""

    recipe: str = "exact"
    vs: str = "plain"
    cache_lambda: float = 0.0
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
        new, reference = with_cache(find_recipe(self.recipe), self.cache_lambda), find_recipe(self.vs)
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
    """Trials that wait to be made, and the facts of the report they belong to."""

    trials: Iterator[Trial]
    total: int
    facts: dict[str, Any]


def evaluate_rendering(rendering: Rendering, output: Output, tell: Callable[[str], None]) -> tuple[dict[str, Any], list[Path]]:
    """Render both arms and evaluate; returns the report and its files.

    Raises RequestError or EnvironmentFault before a weight loads for whatever can be known by then.
    """
    metrics = _metrics(output)
    return _finish(_plan_rendering(rendering, output, tell), metrics, output, tell)


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


def _plan_rendering(rendering: Rendering, output: Output, tell: Callable[[str], None]) -> Planned:
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
    arms = open_arms(source, {"reference": reference, "new": new}, rendering.device)
    pipeline = arms["reference"]
    bench = Bench(arms["new"], pipeline, pipeline.device, output.folder, num_anchors, Encoding(lossless=rendering.lossless))
    told = f"{settled.width}x{settled.height}, {settled.frames} frames, {settled.steps} forwards, {settled.workflow}"
    kernel, _ = other_kernel(pipeline.device)
    tell(f"{2 * (len(cases) + num_anchors)} clips to render: {len(cases)} prompts in two arms, {num_anchors} with two anchors; {told}")
    facts = {
        "mode": "render",
        "recipes": {"new": recipe_record(new), "reference": recipe_record(reference)},
        "model": source.record(),
        "settings": as_plain(rendering),
        "settings_text": f"{told} (first prompt), {pipeline.device.type}",
        "anchors": {
            "floor": f"the reference with attention kernel '{kernel}' ({num_anchors} prompts)",
            "ceiling": f"the reference with another seed ({num_anchors} prompts)",
        },
    }
    return Planned(bench.run(cases), len(cases), facts)


def _finish(planned: Planned, metrics: Sequence[Metric], output: Output, tell: Callable[[str], None]) -> tuple[dict[str, Any], list[Path]]:
    is_pocket = str(planned.facts["model"]["card"].get("name", "")).startswith("pocket")
    skipped = "" if is_pocket else "the model is not pocket-h3, the only one whose clips the oracle can read"
    rows = score_all(planned.trials, metrics, total=planned.total, has_oracle=is_pocket, draw=contact_sheet, tell=tell)
    report = make_report(rows, metrics, planned.facts | {"fingerprint": fingerprint()}, oracle_skipped=skipped)
    return report, write_report(output.folder, report, rows, overwrite=output.overwrite)
