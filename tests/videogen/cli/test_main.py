"""The command line as a user meets it: exit codes, what is on which stream, and that planning loads nothing."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from videogen.cli.main import main
from videogen.identity import hash_file
from videogen.media import probe, read_audio, read_comment

SHORT = ["--size", "96x64", "--frames", "22", "--steps", "2"]


def render(model: Path, folder: Path, *more: str) -> int:
    return main(["render", "--model", str(model), "-o", str(folder), *SHORT, *more])


def test_a_prompt_becomes_a_checked_clip_with_its_record(short_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert render(short_model, tmp_path, "--prompt", "a red circle", "--seed", "3", "--progress", "plain") == 0
    out, err = capsys.readouterr()
    clip = Path(out.strip())
    info = probe(clip)
    assert (info.frames, info.width, info.height, info.video_codec, info.pixel_format) == (22, 96, 64, "h264", "yuv420p")
    assert info.audio_codec == "aac" and info.audio_channels == 2 and info.faststart
    record = json.loads(clip.with_suffix(".json").read_text())
    assert record["output"]["sha256"] == hash_file(clip) and record["resolved"]["seed"] == 3
    assert read_audio(clip, info.sampling_rate).shape == (2, round(22 / 24 * info.sampling_rate))
    tag = json.loads(read_comment(clip) or "")
    differing = {key for key in record if tag.get(key) != record[key]}
    assert differing == {"output", "stages_s"}
    assert "denoise" in err and "done in" in err


def test_the_second_run_makes_nothing_and_says_so(short_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert render(short_model, tmp_path, "--prompt", "a red circle", "-q") == 0
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.mp4")}
    assert render(short_model, tmp_path, "--prompt", "a red circle", "-q") == 0
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.mp4")} == before
    assert "finished before" in capsys.readouterr().out


def test_job_files_pictures_and_json_output(short_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (90, 60), "red").save(tmp_path / "a.png")
    jobs = tmp_path / "jobs.jsonl"
    lines = [
        {"prompt": "first", "image": "a.png", "seed": 1},
        {"prompt": "looks at", "references": ["a.png"], "seed": 2, "id": "r", "tags": ["x"]},
        {"prompt": "text", "seed": 1, "repeat": 2},
    ]
    jobs.write_text("\n".join(json.dumps(line) for line in lines))
    assert render(short_model, tmp_path / "out", str(jobs), "--json", "--progress", "jsonl", "--name", "{id}-{stem}-{seed}") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["totals"] == {"done": 4, "skipped": 0, "failed": 0, "stopped": False}
    assert [row["name"] for row in report["clips"]] == ["1-a-1", "r-a-2", "3-clip-1", "4-clip-2"]
    events = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert {event["event"] for event in events} == {"begin", "phase", "step", "end"}
    record = json.loads((tmp_path / "out" / "r-a-2.json").read_text())
    assert record["id"] == "r" and record["tags"] == ["x"] and record["inputs"][0]["sha256"] == hash_file(tmp_path / "a.png")
    assert main(["status", str(tmp_path / "out"), "--json"]) == 0
    assert [job["state"] for job in json.loads(capsys.readouterr().out)["jobs"]] == ["done"] * 4


def test_one_job_alone_equals_the_job_in_a_batch(short_model: Path, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.txt"
    jobs.write_text("one\ntwo\nthree\n")
    assert render(short_model, tmp_path / "batch", str(jobs), "--seed", "4", "-q", "--name", "{prompt}") == 0
    assert render(short_model, tmp_path / "alone", "--prompt", "three", "--seed", "4", "-q", "--name", "{prompt}") == 0
    batch, alone = (json.loads((tmp_path / where / "three.json").read_text())["output"] for where in ("batch", "alone"))
    assert batch["frames_sha256"] == alone["frames_sha256"] and batch["audio_sha256"] == alone["audio_sha256"]


def test_inspect_gives_back_a_job_that_makes_the_same_clip(short_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert render(short_model, tmp_path / "a", "--prompt", 'say "x", y', "-q", "--name", "c") == 0
    clip = tmp_path / "a" / "c.mp4"
    sidecar = json.loads(clip.with_suffix(".json").read_text())
    clip.with_suffix(".json").unlink()
    capsys.readouterr()
    assert main(["inspect", str(clip), "--as-job"]) == 0
    (tmp_path / "again.jsonl").write_text(capsys.readouterr().out)
    code = main(["render", "-q", "--model", str(short_model), "-o", str(tmp_path / "b"), "--name", "c", str(tmp_path / "again.jsonl")])
    assert code == 0
    again = json.loads((tmp_path / "b" / "c.json").read_text())
    assert again["output"]["frames_sha256"] == sidecar["output"]["frames_sha256"]
    assert main(["inspect", str(clip)]) == 0 and "2 forwards" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--prompt", ""], "prompt"),
        (["--prompt", "x", "--steps", "0"], "steps"),
        (["--prompt", "x", "--size", "100x64"], "size"),
        (["--prompt", "x", "--frames", "9999"], "length"),
        (["--prompt", "x", "--prompt", "y", "--image", "a.png"], "--image"),
        (["--prompt", "x", "--recipe", "turbo", "--model", "random:h3"], "a file adapters/turbo4.safetensors beside its weights"),
        (["--prompt", "x", "--lora-contract", "ignore"], "--lora FILE"),
        (["--prompt", "x", "--lora", "nowhere.safetensors:0.5"], "nowhere.safetensors, expected an existing"),
        (["--prompt", "x", "--name", "{nope}"], "name template"),
        (["--prompt", "x", "--crf", "99"], "crf"),
        (["--prompt", "x", "--model", "nowhere"], "model"),
        (["--prompt", "x", "--image", "none.png"], "none.png"),
        (["nothing.jsonl"], "job file"),
        (["--image", "a.png"], "--prompt"),
        ([], "jobs"),
    ],
)
def test_wrong_input_ends_with_2_and_a_message_in_the_project_form(
    options: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("plan", "render"):
        assert main([command, "-o", str(tmp_path / "out"), *options]) == 2
        out, err = capsys.readouterr()
        assert word in err and ": got " in err and ", expected " in err and not out
    assert not (tmp_path / "out").exists()


def test_every_wrong_job_is_listed_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "fine"}\n{"prompt": ""}\n{"prompt": "x", "steps": 0}\n')
    assert main(["plan", str(jobs)]) == 2
    err = capsys.readouterr().err
    assert "2 of 3 jobs are wrong" in err and "jobs.jsonl:2: prompt" in err and "jobs.jsonl:3: steps" in err


def test_a_broken_model_ends_with_3_and_leaves_a_journal(make_model, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    model = make_model()
    (model / "audio_vae").unlink()
    assert render(model, tmp_path / "out", "--prompt", "x", "-q") == 3
    assert "audio_vae" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.mp4"))


def test_planning_imports_no_torch_and_writes_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from videogen.cli.main import main; "
        f"code = main(['render', '--dry-run', '--json', '--prompt', 'x', '--seconds', '5', '-o', {str(tmp_path / 'out')!r}]); "
        "assert 'torch' not in sys.modules and 'diffusers' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    clip = json.loads(done.stdout)["clips"][0]
    assert clip["frames"] == 124 and clip["seed"] is None and "120 frames made 124" in clip["notes"][0]
    assert not (tmp_path / "out").exists()


def test_models_and_plan_speak_to_people(short_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0 and "pocket" in capsys.readouterr().out
    assert main(["models", str(short_model)]) == 0 and "22 to 345" in capsys.readouterr().out
    assert main(["plan", "-m", str(short_model), "-o", str(tmp_path), *SHORT, "--prompt", "a", "--repeat", "2"]) == 0
    assert "2 of 2 clips to render" in capsys.readouterr().out


def test_control_c_stops_between_steps_with_130_and_a_rerun_completes(short_model: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text("one\ntwo\n")
    options = ["--model", str(short_model), "-o", str(tmp_path / "out"), *SHORT, "--seed", "1", "--progress", "jsonl"]
    command = [sys.executable, "-m", "videogen", "render", str(tmp_path / "jobs.txt"), *options]
    process = subprocess.Popen([*command, "--steps", "400"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    deadline = time.monotonic() + 120
    for line in process.stderr:
        if '"step": 3' in line or time.monotonic() > deadline:
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopping after this step" in err and "run the same command to go on" in err and "Traceback" not in err
    assert not list((tmp_path / "out").glob("*.mp4*"))
    assert render(short_model, tmp_path / "out", str(tmp_path / "jobs.txt"), "--seed", "1", "-q") == 0
    assert len(list((tmp_path / "out").glob("*.mp4"))) == 2


def test_a_cached_clip_is_named_told_and_made_again(short_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "x", "--seed", "1", "-q", "--name", "c", "--cache-lambda", "100", "--steps", "12"]
    assert render(short_model, tmp_path / "a", *options) == 0
    clip = tmp_path / "a" / "c.mp4"
    record = json.loads(clip.with_suffix(".json").read_text())
    assert record["resolved"]["recipe"] == "exact+cache" and record["cache"]["reused"] > 0
    capsys.readouterr()
    assert main(["inspect", str(clip)]) == 0
    told = capsys.readouterr().out
    assert "steps reused; no certificate" in told and "##...#" in told
    assert main(["inspect", str(clip), "--as-job"]) == 0
    (tmp_path / "again.jsonl").write_text(capsys.readouterr().out)
    code = main(["render", "-q", "--model", str(short_model), "-o", str(tmp_path / "b"), "--name", "c", str(tmp_path / "again.jsonl")])
    assert code == 0
    again = json.loads((tmp_path / "b" / "c.json").read_text())
    assert again["output"]["frames_sha256"] == record["output"]["frames_sha256"]
    assert main(["plan", "--prompt", "x", "--cache-lambda", "nan"]) == 2
