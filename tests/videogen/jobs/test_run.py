"""A batch survives bad clips and stops; nothing half-written is ever visible, nothing finished is made again (kills: tests.faults)."""

import json
from pathlib import Path

import pytest

from tests.videogen.jobs.fakes import FakeRenderer, run_batch, settle_prompts
from videogen.errors import EnvironmentFault
from videogen.identity import hash_file
from videogen.jobs import run as run_module
from videogen.jobs.journal import read_journal
from videogen.media import probe, read_comment
from videogen.progress import StopFlag

THREE = [{"prompt": "one"}, {"prompt": "two", "seed": 5}, {"prompt": "three"}]


def clips_in(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path) for path in sorted(folder.glob("*.mp4"))}


def strays_in(folder: Path) -> list[str]:
    known = {path.stem for path in folder.glob("*.mp4")}
    fine = {"run.jsonl", ".lock"} | {f"{stem}{end}" for stem in known for end in (".mp4", ".json")}
    return sorted(path.name for path in folder.iterdir() if path.name not in fine)


def test_a_batch_is_written_whole(tmp_path: Path) -> None:
    summary = run_batch(tmp_path, THREE, FakeRenderer())
    assert summary.count("done") == 3 and not strays_in(tmp_path)
    for path in tmp_path.glob("*.mp4"):
        record = json.loads(path.with_suffix(".json").read_text())
        assert record["output"]["sha256"] == hash_file(path) and record["output"]["frames"] == probe(path).frames == 5
        tag = json.loads(read_comment(path) or "")
        assert tag["prompt"] == record["prompt"] and tag["job_id"] == record["job_id"]


def test_a_finished_clip_is_never_made_again_and_a_failed_one_is(tmp_path: Path) -> None:
    def fail(prompt: str) -> None:
        if prompt == "two":
            raise RuntimeError("no luck")

    first = run_batch(tmp_path, THREE, FakeRenderer(fail))
    assert (first.count("done"), first.count("failed")) == (2, 1)
    assert read_journal(tmp_path).jobs[first.rows[1]["job_id"]].error == "RuntimeError: no luck"
    before, again = clips_in(tmp_path), FakeRenderer()
    second = run_batch(tmp_path, THREE, again)
    assert again.rendered == ["two"] and (second.count("done"), second.count("skipped")) == (1, 2)
    assert before.items() <= clips_in(tmp_path).items() and len(clips_in(tmp_path)) == 3


def test_changed_settings_make_another_clip_beside_the_first(tmp_path: Path) -> None:
    run_batch(tmp_path, [{"prompt": "one", "seed": 1}], FakeRenderer())
    run_batch(tmp_path, [{"prompt": "one", "seed": 1, "steps": 7}], FakeRenderer())
    assert sorted(clips_in(tmp_path)) == ["0001-one-2.mp4", "0001-one.mp4"]


def test_without_resume_a_drawn_seed_is_drawn_anew(tmp_path: Path) -> None:
    first = run_batch(tmp_path, [{"prompt": "one"}], FakeRenderer())
    second = run_batch(tmp_path, [{"prompt": "one"}], FakeRenderer(), is_resumed=False)
    assert first.rows[0]["seed"] != second.rows[0]["seed"] and len(clips_in(tmp_path)) == 2


def test_equal_jobs_are_made_once_and_repeats_count_seeds_up(tmp_path: Path) -> None:
    journal = read_journal(tmp_path)
    assert len(settle_prompts(tmp_path, journal, [{"prompt": "a", "seed": 1}] * 3)) == 1
    assert [c.seed for c in settle_prompts(tmp_path, journal, [{"prompt": "a", "seed": 4, "repeat": 3}])] == [4, 5, 6]
    drawn = [c.seed for c in settle_prompts(tmp_path, journal, [{"prompt": "a", "repeat": 3}])]
    assert len(set(drawn)) == 3
    assert [c.seed for c in settle_prompts(tmp_path, journal, [{"prompt": "a", "repeat": 3}])] == drawn


def test_a_stop_ends_the_run_between_steps_and_the_next_run_completes_it(tmp_path: Path) -> None:
    stop = StopFlag()

    class StopsInTheSecond(FakeRenderer):
        def render(self, request, **values):  # type: ignore[no-untyped-def]
            if request.prompt == "two":
                stop.set()
            return super().render(request, **values)

    summary = run_batch(tmp_path, THREE, StopsInTheSecond(), stop=stop)
    assert summary.is_stopped and summary.count("done") == 1 and not strays_in(tmp_path)
    again = FakeRenderer()
    run_batch(tmp_path, THREE, again)
    assert again.rendered == ["two", "three"] and len(clips_in(tmp_path)) == 3


def test_a_full_disk_ends_the_run_and_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise EnvironmentFault("clip: got no space left on device, expected space; free some")

    monkeypatch.setattr(run_module, "write_clip", full)
    with pytest.raises(EnvironmentFault, match="no space"):
        run_batch(tmp_path, THREE, FakeRenderer())
    assert not clips_in(tmp_path) and not strays_in(tmp_path)
    assert [known.state for known in read_journal(tmp_path).jobs.values()] == ["failed"]
