"""The journal survives torn lines, and one folder takes one run."""

import json
from pathlib import Path

import pytest

from videogen.errors import EnvironmentFault
from videogen.identity import hash_bytes
from videogen.jobs.journal import JOURNAL, locked, read_journal


def finish(folder: Path, job: str, name: str, data: bytes = b"clip") -> None:
    (folder / f"{name}.mp4").write_bytes(data)
    (folder / f"{name}.json").write_text(json.dumps({"status": "completed"}))
    journal = read_journal(folder)
    journal.append("start", job=job, name=name)
    journal.append("done", job=job, file=f"{name}.mp4", sha256=hash_bytes(data), seconds=2.0, tflop=4.0)


def test_a_finished_clip_is_known_after_reading_again(tmp_path: Path) -> None:
    finish(tmp_path, "j1", "one")
    journal = read_journal(tmp_path)
    assert journal.is_done("j1") and journal.jobs["j1"].name == "one" and journal.rates == [0.5]
    assert not journal.is_done("j2")


@pytest.mark.parametrize("damage", ["gone", "changed", "no sidecar", "sidecar failed", "sidecar broken"])
def test_a_clip_that_is_not_whole_is_not_done(tmp_path: Path, damage: str) -> None:
    finish(tmp_path, "j1", "one")
    clip, sidecar = tmp_path / "one.mp4", tmp_path / "one.json"
    if damage == "gone":
        clip.unlink()
    elif damage == "changed":
        clip.write_bytes(b"clop")
    elif damage == "no sidecar":
        sidecar.unlink()
    else:
        sidecar.write_text('{"status": "failed"}' if damage == "sidecar failed" else '{"sta')
    assert not read_journal(tmp_path).is_done("j1")


def test_every_cut_of_the_journal_can_be_read_and_written_on(tmp_path: Path) -> None:
    finish(tmp_path, "j1", "one")
    whole = (tmp_path / JOURNAL).read_bytes()
    for cut in range(len(whole)):
        (tmp_path / JOURNAL).write_bytes(whole[:cut])
        journal = read_journal(tmp_path)
        journal.append("start", job="j9", name="nine")
        again = read_journal(tmp_path)
        assert again.jobs["j9"].name == "nine"
        assert again.is_done("j1") == (cut >= len(whole) - 1)


def test_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(b'\xff\xfe\n[]\n{"event": "seed"}\n{"event": "seed", "draft": "d", "seed": 5}\n')
    assert read_journal(tmp_path).seeds == {"d": 5}


def test_two_runs_on_one_folder_are_refused(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(EnvironmentFault, match="no other run"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentFault, match="output folder"), locked(tmp_path / "file" / "sub"):
        pass
