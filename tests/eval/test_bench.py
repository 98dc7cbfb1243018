"""A measurement end to end at tiny size; reports that may not be compared say which key differs."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from eval.cases import WORKLOADS, Workload, make_request
from eval.clip_check import broken_because
from videogen import Result
from videogen.cli.main import main
from videogen.load import load_pipeline

TINY = Workload("tiny", "pocket", (96, 64), 22, 1)


@pytest.fixture(scope="module")
def report_folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "one"
    loads: list[str] = []

    def load(source: object, workflow: str, **more: object) -> object:
        loads.append(workflow)
        return load_pipeline(source, workflow, **more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WORKLOADS, "tiny", TINY)
        patch.setattr("videogen.pipeline.load_pipeline", load)
        options = ["--model", str(tiny_model), "--min-clips", "3", "--min-seconds", "0", "--warmup", "1", "-o", str(folder)]
        assert main(["bench", "--workload", "tiny", "--vs", "exact", *options]) == 0
    assert loads == ["t2va"]  # both arms over one set of weights
    return folder


def test_a_measurement_writes_three_files_that_agree(report_folder: Path) -> None:
    report = json.loads((report_folder / "bench.json").read_text())
    assert [arm["arm"] for arm in report["arms"]] == ["exact (A)", "exact (B)"]
    assert report["speed_up"]["pairs"] == 3 and report["speed_up"]["ratio"]["low"] is not None
    assert report["arms"][1]["load_s"] >= report["arms"][0]["load_s"] > 0  # alone, the second would have paid for the weights too
    assert report["peak_host_mb"] > 0 and all(arm["peak_device_mb"] is None for arm in report["arms"])
    assert all(arm["clips"] == 3 and not arm["broken"] and arm["clips_per_hour_machine"] > 0 for arm in report["arms"])
    assert set(report["arms"][0]["stages_s"]) == {"load", "text", "prepare", "denoise", "decode", "encode"}
    rows = list(csv.DictReader((report_folder / "clips.csv").open()))
    assert len(rows) == len(report["clips"]) == 6
    text = (report_folder / "bench.md").read_text()
    assert "exact (A)" in text and "n/a (n=3)" in text and "clips/h" in text
    assert not {"hostname", "user", "node"} & set(report["fingerprint"])


def test_a_report_is_never_overwritten_by_accident(report_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (report_folder / "bench.json").read_bytes()
    assert main(["bench", "--workload", "pocket-small", "-o", str(report_folder)]) == 2
    assert "--overwrite" in capsys.readouterr().err and (report_folder / "bench.json").read_bytes() == before


def test_comparing_needs_the_same_thing_on_the_same_machine(
    report_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = report_folder / "bench.json"
    assert main(["compare", str(report_folder), str(old)]) == 0
    assert "1.000 times" in capsys.readouterr().out
    report = json.loads(old.read_text())
    for change, word in (
        (lambda r: r["workload"].update(steps=3), "workload.steps (1 against 3)"),
        (lambda r: r["fingerprint"].update(cpu="another"), "against 'another'"),
        (lambda r: r["model"].update(identity="x"), "model"),
        (lambda r: r.update(schema="videogen.bench/0"), "schema"),
    ):
        changed = json.loads(json.dumps(report))
        change(changed)
        (tmp_path / "new.json").write_text(json.dumps(changed))
        assert main(["compare", str(old), str(tmp_path / "new.json")]) == 2
        assert word in capsys.readouterr().err
    slower = json.loads(json.dumps(report))
    slower["arms"][0]["clips_per_hour_machine"] *= 0.5
    (tmp_path / "new.json").write_text(json.dumps(slower))
    assert main(["compare", str(old), str(tmp_path / "new.json"), "--max-loss", "10"]) == 4
    assert main(["compare", str(old), str(tmp_path / "none.json")]) == 2


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--workload", "nope"], "workload"),
        (["--workload", "pocket-small", "--recipe", "nope"], "recipe"),
        (["--workload", "pocket-small", "--min-clips", "0"], "--min-clips"),
        (["--workload", "pocket-small", "--gpus", "2"], "--gpus"),
        (["--workload", "pocket-small", "--vs", "exact", "--in-flight", "2"], "--in-flight"),
        ([], "--workload"),
    ],
)
def test_wrong_options_end_with_2_before_anything_is_measured(
    options: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "-o", str(tmp_path / "out"), *options]) == 2
    assert word in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_gpu_workload_without_a_gpu_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--workload", "h3-t2va-5s", "--device", "cpu", "-o", str(tmp_path / "out")]) == 3
    assert "no CUDA device" in capsys.readouterr().err


def test_a_broken_clip_is_named() -> None:
    rng = np.random.default_rng(0)
    good = Result(rng.integers(0, 255, (4, 8, 8, 3), dtype=np.uint8), np.zeros((2, 1333), np.float32), 8000, 24.0, {})
    assert not broken_because(good, frames=4, size=(8, 8))

    def damaged(frames: object = good.frames, audio: object = good.audio) -> str:
        return broken_because(Result(frames, audio, 8000, 24.0, {}), frames=4, size=(8, 8))  # type: ignore[arg-type]

    assert damaged(frames=np.zeros_like(good.frames)) == "black"
    assert damaged(frames=np.repeat(good.frames[:1], 4, axis=0)) == "frozen"
    assert "shape" in damaged(frames=good.frames[:3])
    assert "audio lasts" in damaged(audio=good.audio[:, :600])
    assert damaged(audio=np.full_like(good.audio, np.nan)) == "audio not finite"
    assert damaged(audio=np.zeros((2, 0), np.float32)) == "no audio"


def test_pairs_share_prompt_seed_and_picture() -> None:
    workload = WORKLOADS["pocket-ref"]
    one, two = make_request(workload, 3), make_request(workload, 3)
    assert (one.prompt, one.seed) == (two.prompt, two.seed) and one.references and one.workflow == "ref2va"
    assert make_request(workload, 4).prompt != one.prompt
