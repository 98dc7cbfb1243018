"""`videogen eval` as a user meets it: on a toy, what it prints and writes, and every bad input."""

import argparse
import json
import logging
from pathlib import Path

import pytest
from PIL import Image

from eval.eval_command import add_eval
from eval.metrics.registry import METRICS
from videogen.config import Environment, Recipe
from videogen.errors import EnvironmentFault, RequestError
from videogen.pipeline import Pipeline

SHORT = ("--size", "96x64", "--frames", "22", "--steps", "1")


def call(*argv: str) -> tuple[int, str]:
    """Exit code and output; errors become codes as `videogen.cli.main` makes them."""
    said: list[str] = []
    parser = argparse.ArgumentParser()
    add_eval(parser.add_subparsers(), Environment())
    args = parser.parse_args(["eval", *argv], argparse.Namespace(say=said.append))
    try:
        code = args.run(args)
    except RequestError as error:
        return 2, str(error)
    except EnvironmentFault as error:
        return 3, str(error)
    return code, "\n".join(said)


@pytest.fixture
def quick(tiny_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """Weights that are loaded already, and the metrics that take no time."""

    def open_arms(_model: object, recipes: dict[str, Recipe], _device: str) -> dict[str, Pipeline]:
        return {arm: tiny_pipeline.sharing(recipe) for arm, recipe in recipes.items()}

    monkeypatch.setattr("eval.quality_run.open_arms", open_arms)
    fast = tuple(metric for metric in METRICS if metric.name in ("psnr", "motion_ratio", "audio_snr"))
    monkeypatch.setattr("eval.quality_run.usable", lambda: fast)
    return tiny_pipeline


@pytest.fixture(scope="module")
def evaluated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prompts, plain against plain, one with anchors, with exact frames kept."""
    folder = tmp_path_factory.mktemp("evals") / "a"
    arms = ("--recipe", "plain", "--vs", "plain", "--prompts", "2", "--anchors", "1", "--lossless")
    code, said = call("--model", str(tiny_model), *arms, *SHORT, "--steps", "2", "-o", str(folder))
    assert code == 0, said
    assert "# plain against plain: 2 clips, 2 identical" in said and str(folder / "report.html") in said
    return folder


def test_plain_against_plain_is_identical_and_the_anchors_are_not(evaluated: Path) -> None:
    report = json.loads((evaluated / "eval.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert report["schema"] == "videogen.eval/1" and report["class"] == "exact" and report["identical_clips"] == 2
    assert report["recipes"]["new"] == report["recipes"]["reference"] and report["recipes"]["new"]["name"] == "plain"
    psnr = report["summary"]["psnr"]
    assert psnr["new"]["identical"] == 2 and psnr["floor"]["mean"]["value"] > 20 + psnr["ceiling"]["mean"]["value"]
    assert psnr["retained"]["value"] == 1 and report["summary"]["ms_ssim"]["new"]["not_measured"] == 2
    assert report["oracle"]["state"] == "identical" and "bit-identical on all 2 prompts" in report["oracle"]["text"]
    assert "| ms_ssim | higher | n/a (sides of 96x64, at least 161 pixels needed) |" in (evaluated / "eval.md").read_text()
    assert {row["name"] for row in report["skipped"]} >= {"clip_score", "vbench"}
    for clip in report["clips"]:
        assert all(Path(file).is_file() for file in clip["files"].values()) and clip["alarms"] == []
    assert "math" in report["anchors"]["floor"] and "host" not in report["fingerprint"]


def test_a_report_is_never_overwritten_unasked(evaluated: Path, tiny_model: Path) -> None:
    before = (evaluated / "eval.json").read_bytes()
    code, said = call("--model", str(tiny_model), "--prompts", "1", *SHORT, "-o", str(evaluated))
    assert code == 2 and "--overwrite" in said and (evaluated / "eval.json").read_bytes() == before


def test_the_two_arms_can_be_evaluated_again_as_run_folders(evaluated: Path, tmp_path: Path) -> None:
    code, said = call(str(evaluated / "new"), str(evaluated / "reference"), "-o", str(tmp_path / "again"), "--json", "--gate")
    report = json.loads(said)
    assert code == 0 and report["identical_clips"] == 2 and report["gate"]["passed"] and report["oracle"]["prompts"] == 2


@pytest.mark.parametrize("workflow", ["fl2va", "ref2va"])
@pytest.mark.usefixtures("quick")
def test_workflows_with_pictures_and_progress(workflow: str, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = ("--model", str(tiny_model), "--prompts", "1", "--anchors", "0")
    argv = (*one, "--workflow", workflow, *SHORT, "-o", str(tmp_path / "e"), "--json")
    with caplog.at_level(logging.INFO, "eval.eval_command"):
        code, said = call(*argv)
    assert code == 0, said
    report = json.loads(said)
    asked = set(report["clips"][0]["oracle"]["new"])
    assert asked == ({"motion", "background", "pitch", "pan", "badge"} if workflow == "ref2va" else {*asked, "colour"})
    assert report["summary"]["psnr"]["floor"] is None and any(f"[1/1] {workflow}-0000" in text for text in caplog.messages)


@pytest.mark.usefixtures("quick")
def test_a_step_cache_under_test_is_shown_and_a_gate_that_shows_nothing_fails(tiny_model: Path, tmp_path: Path) -> None:
    cached = ("--steps", "7", "--cache-lambda", "9", "--lossless", "--gate", "-q")
    code, said = call("--model", str(tiny_model), "--prompts", "1", "--anchors", "0", *SHORT, *cached, "-o", str(tmp_path / "e"))
    assert code == 4 and "# exact+cache against plain: 1 clips, 0 identical" in said and "1 prompts cannot show it" in said
    report = json.loads((tmp_path / "e" / "eval.json").read_text())
    assert report["clips"][0]["cache"]["new"]["reused"] > 0 == report["clips"][0]["cache"]["reference"]["reused"]
    code, said = call(str(tmp_path / "e" / "new"), str(tmp_path / "e" / "reference"), "-o", str(tmp_path / "again"), "-q")
    assert code == 0 and "Gate (alarms and the oracle): failed." in said  # without --gate it is said, no more
    assert "steps reused" in (tmp_path / "e" / "report.html").read_text() and report["class"].startswith("not exact")


def test_the_list_names_every_metric_and_why_one_is_missing() -> None:
    code, said = call("list")
    assert code == 0 and "skipped: weights not found: openai/clip" in said and "psnr" in said
    rows = json.loads(call("list", "--json")[1])["metrics"]
    assert {row["name"] for row in rows} >= {"vmaf", "xpsnr", "ms_ssim", "frozen_excess", "lpips", "vbench"}


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--recipe", "warp"), "recipe: got 'warp'"),
        (("--vs", "nope"), "recipe: got 'nope'"),
        (("--model", "no/such/model"), "model: got"),
        (("--cache-lambda", "-1"), "cache lambda: got -1.0"),
        (("--prompts", "0"), "--prompts: got 0, expected from 1 to 1024"),
        (("--prompts", "-3"), "--prompts: got -3"),
        (("--prompts", "1025"), "--prompts: got 1025"),
        (("--prompts", "nowhere.txt"), "a number or an existing job file"),
        (("--prompts", "EMPTY"), "at least one"),
        (("--prompts", "KEY"), "'colour'"),
        (("--prompts", "REPEAT"), "both arms render every line once"),
        (("--prompts", "CACHE"), "cache_lambda"),
        (("--prompts", "LINES", "--workflow", "t2va"), "--workflow with a prompt file"),
        (("--workflow", "v2v"), "--workflow: got 'v2v'"),
        (("--size", "wide"), "--size: size: got 'wide'"),
        (("--size", "97x64"), "multiples of"),
        (("--frames", "100000"), "length: got"),
        (("--frames", "22", "--seconds", "1"), "only one of the two"),
        (("--steps", "0"), "steps: got 0"),
        (("--anchors", "9"), "--anchors: got 9"),
        (("--require", "pnsr"), "metric: got 'pnsr'"),
        (("--require", "ms_ssim", "--size", "96x64"), "--require ms_ssim: got 'sides of 96x64"),
        (("list", "more", "words"), "nothing, `list`, or two run folders"),
        (("only-one",), "two run folders: NEW REFERENCE"),
        (("here", "there"), "run folder: got 'here'"),
        (("here", "there", "--steps", "3", "--recipe", "exact"), "['recipe', 'shape'], expected none that render"),
        (("--output-dir", "LINES"), "expected a folder"),
        (("--gate", "--shard", "0/2"), "--gate with --shard"),
    ],
)
def test_bad_input_is_refused_before_anything_is_rendered(
    argv: tuple[str, ...], told: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Pipeline, "load", lambda self, workflow: pytest.fail("a weight was loaded"))
    files = {
        "EMPTY": "",
        "KEY": '{"prompt": "a", "colour": "red"}',
        "REPEAT": '{"prompt": "a", "repeat": 2}',
        "LINES": '{"prompt": "a"}',
        "CACHE": '{"prompt": "a", "cache_lambda": 1}',
    }
    for name, text in files.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    argv = tuple(f"{word}.jsonl" if word in files else word for word in argv)
    model = () if "--model" in argv or not argv[0].startswith("-") else ("--model", str(tiny_model))
    code, said = call(*argv, *model)
    assert code == 2 and told in said, said
    assert not list(tmp_path.rglob("eval.json")) and not (tmp_path / "evals").exists()


def test_a_metric_without_its_weights_is_an_environment_fault_when_required(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    code, said = call("--model", str(tiny_model), "--require", "lpips", "--prompts", "1")
    assert code == 3 and "metric lpips: got weights not found" in said


@pytest.mark.usefixtures("quick")
def test_a_job_file_with_pictures_keeps_its_seed(tiny_model: Path, tmp_path: Path) -> None:
    Image.new("RGB", (96, 64), "red").save(tmp_path / "a.png")
    (tmp_path / "p.jsonl").write_text('{"prompt": "it moves right", "image": "a.png", "seed": 77}\n')
    argv = ("--model", str(tiny_model), "--prompts", str(tmp_path / "p.jsonl"), "--anchors", "0", *SHORT, "-o", str(tmp_path / "e"))
    code, said = call(*argv, "--json", "-q")
    report = json.loads(said)
    assert code == 0 and report["clips"][0]["seed"] == 77 and report["oracle"]["skipped"].startswith("no prompt says")
