"""Anchors, verdicts, gates and reports on drawn clips; run folders that do not pair are refused before anything is written."""

import json
import math
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend

from eval import prompts
from eval.metrics.pair import Clip, Pair
from eval.metrics.registry import METRICS, Measured
from eval.quality import gate, make_report, measured_class, retained, score, score_all, summarize_metric, worst
from eval.quality_cases import Case, Shape, fixed_cases
from eval.quality_folders import differing_recipe_fields, pair_folders, read_trials
from eval.quality_html import contact_sheet
from eval.quality_oracle import accuracies, judge, paired_difference, prompts_needed, verdict
from eval.quality_report import FILES, markdown, write_report
from eval.quality_run import Output, evaluate_folders
from eval.quality_trials import Bench, other_kernel
from eval.report_folder import check_free
from tests.eval.quality_fakes import DrawingModel, drawn, grain, trials
from videogen.config import Recipe, Request
from videogen.errors import EnvironmentFault, RequestError
from videogen.media import Encoding
from videogen.pocket import world
from videogen.source import find_model, open_family

FAST = tuple(metric for metric in METRICS if metric.name in ("psnr", "motion_ratio", "luma_shift", "audio_snr", "level_shift"))
FACTS: dict[str, Any] = {
    "mode": "render",
    "recipes": {"new": {"name": "fast"}, "reference": {"name": "exact"}},
    "model": {"source": "pocket", "card": {}, "label": "untrained weights"},
    "settings": {},
    "settings_text": "96x64",
    "anchors": {"floor": "another kernel", "ceiling": "another seed"},
}


def black(clip: Clip) -> Clip:
    return Clip(np.zeros_like(clip.frames), clip.audio, clip.sampling_rate, clip.fps)


def scored(number: int, damage: Any = lambda clip: clip, *, anchors: bool = True, has_oracle: bool = False) -> list[Any]:
    made = trials(number, damage, anchors=anchors)
    return score_all(made, FAST, total=number, has_oracle=has_oracle, draw=lambda pair: b"", tell=lambda text: None)


def test_retained_is_one_for_the_reference_and_zero_for_another_seed() -> None:
    same, half, far = (retained(new, [0.0] * 4, [2.0, 4.0, 2.0, 4.0]) for new in ([0.0] * 4, [1.0, 2.0, 1.0, 2.0], [2.0, 4.0, 2.0, 4.0]))
    assert same and half and far
    assert (same.value, half.value, far.value) == (1, 0.5, 0)
    mixed = retained([1.0, 0.0, 2.0, 0.0], [0.0] * 4, [2.0, 4.0, 2.0, 4.0])
    assert mixed and mixed.value == 0.75 and mixed.low is not None and mixed.low < 0.75 < (mixed.high or 0)
    few = retained([1.0], [0.0], [4.0])
    assert few and few.value == 0.75 and few.low is None
    assert retained([0.1], [1.0], [1.5]) is None and retained([], [], []) is None  # no room between the anchors


def test_anchors_stand_beside_every_number() -> None:
    rows = scored(3, grain)
    found = summarize_metric(FAST[0], rows)
    values = {arm: found[arm]["mean"]["value"] for arm in ("new", "floor", "ceiling")}
    assert values["floor"] > values["new"] > values["ceiling"]
    assert found["floor"]["clips"] == 3 and 0.5 < found["retained"]["value"] < 1
    assert summarize_metric(FAST[1], rows)["retained"] is None  # motion need not differ between seeds
    assert summarize_metric(FAST[0], scored(1, grain, anchors=False))["floor"] is None


def test_identical_values_are_counted_and_not_averaged() -> None:
    rows = scored(2)
    found = summarize_metric(FAST[0], rows)["new"]
    assert found["identical"] == 2 and found["mean"] is None and found["distance"]["value"] == 0
    rows[1] = replace(rows[1], new=rows[1].new | {"psnr": Measured(30.0)})
    mixed = summarize_metric(FAST[0], rows)["new"]
    assert mixed["identical"] == 1 and mixed["mean"]["value"] == 30 and mixed["mean"]["low"] is None


def test_the_measured_class_needs_the_floor() -> None:
    assert measured_class(scored(1)) == "exact"
    assert measured_class(scored(1, grain)) == "approximate"
    (near,) = trials(1)
    assert near.floor is not None
    as_far = replace(near, new=replace(near.new, clip=near.floor))
    row = score(as_far, FAST, has_oracle=False, draw=lambda pair: b"")
    assert measured_class([row]) == "close" and measured_class([replace(row, floor=None)]).startswith("not exact")
    softer = replace(near, new=replace(near.new, clip=replace(near.new.clip, audio=near.new.clip.audio * np.float32(0.999))))
    assert measured_class([score(softer, FAST, has_oracle=False, draw=lambda pair: b"")]) == "approximate"


def test_the_oracle_reads_drawn_clips_right_and_black_ones_wrong() -> None:
    rows = scored(3, black, has_oracle=True)
    for row in rows:
        assert row.judged and all(entry["is_right"] for entry in row.judged["reference"].values()) and row.oracle_change < 0
    report = make_report(rows, FAST, FACTS)
    assert report["oracle"]["attributes"]["all"]["reference"]["value"] == 1 and report["oracle"]["attributes"]["colour"]["new"]["value"] < 1
    assert report["oracle"]["state"] == "inferior" and not report["gate"]["passed"]


def test_the_badge_is_judged_where_a_reference_picture_was_given() -> None:
    item = prompts.load("ref2va", 1)[0]
    layout = world.plan([item.scene], [item.world_seed], badge=True)
    frames, _ = world.render(layout, world.frame_times(39), 96, 160)
    sound = world.sound(layout, 65, 8000)[0].numpy()
    clip = Clip((frames[0] * 255).round().byte().numpy(), sound, 8000, 24.0)
    judged = judge(clip, item.scene, layout)
    assert set(judged) == {"motion", "background", "pitch", "pan", "badge"} and all(entry["is_right"] for entry in judged.values())
    other = layout.replaced(bits=1 - layout.bits)
    assert not judge(clip, item.scene, other)["badge"]["is_right"]


SPREAD = [0.125, -0.125, 0.0, 0.0] * 10


@pytest.mark.parametrize(
    ("differences", "is_identical", "state", "told"),
    [
        ([0.0] * 8, True, "identical", "bit-identical on all 8 prompts"),
        ([0.0] * 8, False, "not shown", "8 prompts cannot show it; about 368 prompts"),
        ([0.0] * 400, False, "shown", "above the margin"),
        ([0.0, 0.125], False, "not shown", "2 prompts cannot show it"),
        (SPREAD, False, "not shown", "40 prompts cannot show it; about 3"),
        ([-0.25, -0.125] * 20, False, "inferior", "below the margin"),
        ([0.25, 0.125] * 20, False, "shown", "above the margin"),
        ([-0.125, 0.0, 0.0, 0.0] * 2, False, "not shown", "at this loss no number"),
    ],
)
def test_non_inferiority_is_said_only_when_it_is_shown(differences: list[float], is_identical: bool, state: str, told: str) -> None:
    found = verdict(differences, is_identical=is_identical)
    assert found["state"] == state and told in found["text"] and "margin 1" in found["text"]


def test_no_change_in_few_prompts_is_no_certainty() -> None:
    found = paired_difference([0.0] * 8)
    assert found.low == pytest.approx(-(1 - 0.025 ** (1 / 8))) and (found.low or 0) < -0.3
    spread = float(np.std(SPREAD, ddof=1))
    assert prompts_needed(SPREAD) == math.ceil((1.96 * spread / 0.01) ** 2)


def test_accuracies_use_wilson_and_count_whole_clips() -> None:
    right, wrong = {"is_right": True}, {"is_right": False}
    found = accuracies([{"colour": right, "shape": right}, {"colour": right, "shape": wrong}])
    assert (found["colour"].value, found["shape"].value, found["all"].value) == (1, 0.5, 0.5)
    assert found["colour"].low == pytest.approx(1 / (1 + 1.959964**2 / 2), abs=1e-6)


def test_the_worst_clips_come_first_and_identical_ones_not_at_all() -> None:
    (row,) = scored(1, grain)
    rows = [replace(row, name=f"clip {index}", alarms=[], curve=[40.0]) for index in range(7)]
    rows[4] = replace(rows[4], alarms=["a", "b"])
    rows[2] = replace(rows[2], curve=[20.0] * 39)
    rows[0] = replace(rows[0], is_identical=True)
    found = worst(rows)
    assert (
        len(found) == 5 and [row.name for row in found[:2]] == [rows[4].name, rows[2].name] and rows[0].name not in [r.name for r in found]
    )


def test_the_gate_fails_on_an_alarm_and_on_what_was_not_shown() -> None:
    rows = scored(1)
    assert gate(rows, {"skipped": "no scene"}) == {"passed": True, "reasons": [], "scope": "alarms only; the oracle did not look: no scene"}
    assert gate(rows, {"state": "not shown", "text": "t"})["reasons"] == ["oracle: t"]
    assert not gate(scored(1, black), {"state": "shown", "text": ""})["passed"]


class Page(HTMLParser):
    """Keeps tags with their attributes, and fails on a tag closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_strict_json_a_table_and_a_page_that_opens_its_clips_only(tmp_path: Path) -> None:
    rows = [replace(row, sheet=contact_sheet(Pair(t.new.clip, t.reference.clip))) for row, t in zip(scored(3, grain), trials(3, grain))]
    steps = [{"action": "compute", "reason": "first", "risk": 0.0}, {"action": "reuse", "reason": "<drift>", "risk": 0.02}]
    rows[0].stored["new"].record["cache"] = {"lambda": 0.1, "reused": 1, "computed": 1, "steps": steps}
    hostile = replace(rows[1], prompt='a <b> & "c"', is_identical=True, curve=[math.inf] * 39, alarms=["luma_shift: got <9>"])
    for row in rows:
        row.stored["new"].record["stages_s"] = {"load": 9.0, "denoise": 0.5, "decode": 0.5, "encode": 9.0}
    report = make_report([rows[0], hostile, rows[2]], FAST, FACTS)
    paths = write_report(tmp_path / "e", report, [rows[0], hostile, rows[2]], overwrite=False)
    read = json.loads(paths[0].read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read["schema"] == "videogen.eval/1" and read["clips"][1]["psnr_per_frame"] == ["identical"] * 39
    assert read["clips"][0]["values"]["audio_snr"] == "identical" and read["speed_up"]["value"] == 2
    assert [read["seconds_per_clip"][arm]["value"] for arm in ("new", "reference")] == [1, 2]  # neither loading nor encoding
    table = paths[1].read_text()
    assert "| fast (new) |" in table and "below 20 a bootstrap interval is too narrow" in table and "skipped: vbench" in table
    html = paths[2].read_text()
    tags = Page(html).tags
    assert all(attrs.get("alt") for tag, attrs in tags if tag == "img") and sum(tag == "img" for tag, _ in tags) == 3
    sources = [value for _, attrs in tags for name, value in attrs.items() if name in ("src", "href") and value]
    clips = [value for value in sources if not value.startswith(("data:image/jpeg;base64,", "#"))]
    played = [(tmp_path / "e" / unquote(value)).resolve() for value in clips]
    assert played == [row.stored[arm].path.resolve() for row in (rows[0], rows[2], rows[1]) for arm in ("reference", "new")]
    assert "http" not in html
    assert sum(tag == "button" for tag, _ in tags) == 3 and sum(tag == "video" and "muted" in attrs for tag, attrs in tags) == 3
    assert "Metrics and anchors" in html and "Recipe by metric" in html
    assert "lambda 0.1, 1 of 2 steps reused" in html and read["clips"][0]["cache"]["new"]["reused"] == 1
    assert "<b>" not in html and "&lt;drift&gt;" in html and "untrained weights" in html
    assert not list(tmp_path.rglob("*.part"))


def test_a_report_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text("{}")
    with pytest.raises(RequestError, match="a folder without"):
        check_free(tmp_path, FILES[0], overwrite=False)
    check_free(tmp_path, FILES[0], overwrite=True)
    with pytest.raises(RequestError, match="expected a folder"):
        check_free(tmp_path / "eval.json", FILES[0], overwrite=True)


def cases(number: int) -> list[Case]:
    return [Case(t.name, Request(prompt=t.prompt), t.seed) for t in trials(number, anchors=False)]


def bench(folder: Path, new: DrawingModel, reference: DrawingModel, num_anchors: int = 0) -> Bench:
    return Bench(new, reference, torch.device("cpu"), folder, num_anchors, Encoding(lossless=True))


def test_both_arms_get_the_same_seed_and_only_the_ceiling_another(tmp_path: Path) -> None:
    order: list[str] = []

    def noting(arm: str) -> Any:
        return lambda clip: order.append(arm) or clip

    new, reference = DrawingModel(noting("new")), DrawingModel(noting("reference"))
    made = list(bench(tmp_path, new, reference, num_anchors=1).run(cases(2)))
    assert new.seeds == [1000, 1001] and reference.seeds == [1000, 1000, 1_001_003, 1001]
    assert order == ["reference", "new", "reference", "reference", "new", "reference"]  # with two anchors after the first pair
    assert made[0].floor is not None and made[0].ceiling is not None and made[1].floor is None
    assert made[0].reference.stored.path.is_file() and made[1].new.stored.path.with_name("t2va-0001.lossless.mkv").is_file()
    assert other_kernel(torch.device("cpu")) == ("math", SDPBackend.MATH)
    assert other_kernel(torch.device("cuda"))[0] == "efficient"


def test_the_fixed_set_draws_the_pictures_its_requests_need() -> None:
    family = open_family(find_model("pocket"))
    shape = Shape(size=(160, 96), steps=3)
    made = fixed_cases(4, "fl2va", shape, family, Recipe())
    assert [(c.request.image is not None, c.request.last_image is not None) for c in made] == [(1, 0), (1, 0), (0, 1), (1, 1)]
    both = made[3].request
    assert isinstance(both.image, Image.Image) and both.image.size == (160, 96) and both.steps == 3
    layout = world.plan([item.scene for item in prompts.load("fl2va", 4)[3:]], [prompts.load("fl2va", 4)[3].world_seed], aspect=160 / 96)
    last, _ = world.render(layout, torch.tensor([123 / 24]), 96, 160)
    assert np.array_equal(np.asarray(both.last_image), (last[0, 0] * 255).round().byte().numpy())
    badge = fixed_cases(1, "ref2va", shape, family, Recipe())[0]
    assert badge.layout is not None and len(badge.request.references) == 1


def test_a_folder_that_cannot_be_made_is_known_before_the_first_clip(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = DrawingModel()
    with pytest.raises(EnvironmentFault, match="a folder that can be written"):
        list(bench(tmp_path / "file" / "x", model, model).run(cases(1)))
    assert model.seeds == []


def test_a_clip_that_fails_in_one_arm_ends_the_evaluation_by_name(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"case t2va-0000, arm new: got RuntimeError: boom"):
        list(bench(tmp_path, DrawingModel(broken=RuntimeError("boom")), DrawingModel()).run(cases(1)))
    with pytest.raises(RequestError, match="NaN"):
        list(bench(tmp_path, DrawingModel(broken=RequestError("NaN frames")), DrawingModel()).run(cases(1)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two run folders of two clips, `new` with grain; the same names and settings."""
    folder = tmp_path_factory.mktemp("runs")
    list(bench(folder, DrawingModel(grain), DrawingModel()).run(cases(2)))
    return folder


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs"))


def edit(sidecar: Path, **values: Any) -> None:
    found = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(found | values | {"resolved": found["resolved"] | values.pop("resolved", {})}))


def test_run_folders_pair_by_what_was_asked_whatever_the_recipe(runs: Path) -> None:
    for name in ("t2va-0000", "t2va-0001"):
        edit(runs / "new" / f"{name}.json", resolved={"steps": 2, "recipe": "turbo"})
    pairs = pair_folders(runs / "new", runs / "reference")
    assert differing_recipe_fields(pairs) == ["recipe", "steps"]
    first = next(read_trials(pairs))
    assert first.name == "t2va-0000" and first.scene is not None
    assert np.array_equal(first.reference.clip.frames, drawn(first.scene, 1000).frames)
    assert np.array_equal(first.reference.clip.audio[:, :1000], drawn(first.scene, 1000).audio[:, :1000])


def drop_lossless(runs: Path) -> None:
    (runs / "new" / "t2va-0001.lossless.mkv").unlink()


def drop_clip(runs: Path) -> None:
    (runs / "new" / "t2va-0001.json").unlink()


def other_schema(runs: Path) -> None:
    edit(runs / "new" / "t2va-0001.json", schema="videogen.clip/2")


def no_json(runs: Path) -> None:
    (runs / "new" / "t2va-0001.json").write_text("{")


def other_seed(runs: Path) -> None:
    edit(runs / "reference" / "t2va-0001.json", resolved={"seed": 5})


def other_model(runs: Path) -> None:
    edit(runs / "reference" / "t2va-0001.json", model={"identity": "other"})


def twice(runs: Path) -> None:
    for file in (runs / "new").glob("t2va-0001*"):
        shutil.copy(file, file.with_name(file.name.replace("0001", "0002")))


def two_recipes(runs: Path) -> None:
    edit(runs / "new" / "t2va-0001.json", recipe={"name": "turbo"})


def unfinished(runs: Path) -> None:
    (runs / "new" / "run.jsonl").write_text('{"event": "start", "job": "j", "name": "t2va-0007"}\n')


def swapped_frames(runs: Path) -> None:
    shutil.copy(runs / "new" / "t2va-0000.lossless.mkv", runs / "new" / "t2va-0001.lossless.mkv")


def emptied(runs: Path) -> None:
    shutil.rmtree(runs / "new")
    (runs / "new").mkdir()


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (drop_lossless, "render it again with --lossless"),
        (drop_clip, r"1 clips without a partner \(t2va-0001\)"),
        (other_schema, "got 'videogen.clip/2', expected videogen.clip/1"),
        (no_json, "expected readable JSON"),
        (other_seed, "without a partner"),
        (other_model, "without a partner"),
        (twice, "each request once"),
        (two_recipes, "one recipe in a folder"),
        (unfinished, r"\['t2va-0007'\], expected every clip finished"),
        (swapped_frames, "the frames its sidecar was written for"),
        (emptied, "sidecars of videogen.clip/1"),
        (lambda runs: shutil.rmtree(runs / "new"), "an existing folder"),
    ],
)
def test_run_folders_that_do_not_pair_are_refused_and_nothing_is_written(runs: Path, break_it: Any, told: str) -> None:
    break_it(runs)
    output = runs / "out"
    with pytest.raises(RequestError, match=told):
        evaluate_folders(runs / "new", runs / "reference", Output(output), lambda text: None)
    assert not output.exists()


def test_two_run_folders_give_a_report_without_anchors(runs: Path) -> None:
    said: list[str] = []
    report, paths = evaluate_folders(runs / "new", runs / "reference", Output(runs / "out"), said.append)
    assert len(said) == 2 and report["mode"] == "folders" and report["summary"]["psnr"]["floor"] is None
    assert 35 < report["summary"]["psnr"]["new"]["mean"]["value"] < 50 and report["summary"]["audio_snr"]["new"]["identical"] == 2
    assert "n/a (no anchors)" in paths[1].read_text() and markdown(report) == paths[1].read_text()
    with pytest.raises(RequestError, match="another folder than the two runs"):
        evaluate_folders(runs / "new", runs / "reference", Output(runs / "new"), said.append)
