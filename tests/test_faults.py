"""A seeded few of the trials of `tests.faults`, on a smaller batch, and what is quicker to see in one process."""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import faults, injectors
from tests.faults import Bench, wrong
from tests.injectors import Batch
from tests.videogen.jobs.fakes import FakeRenderer, run_batch, settle_prompts
from tests.videogen.serve.fakes import StandIn, services_in
from videogen.cli.screen import JsonScreen, PlainScreen
from videogen.errors import ClipFault, EnvironmentFault
from videogen.jobs.database import COMPLETED, FAILED
from videogen.jobs.journal import JOURNAL, read_journal
from videogen.progress import Event, StopFlag
from videogen.serve.assemble import SteadyClock
from videogen.serve.worker import Worker

JOBS = [{"prompt": "one", "seed": 5}, {"prompt": "two"}]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), JOBS)


@pytest.mark.parametrize("kind", ["kills", "signals", "enospc", "journals"])
def test_nothing_is_lost_made_twice_half_written_or_different(kind: str, bench: Bench, tmp_path: Path) -> None:
    found = faults.TRIALS[kind](bench, random.Random(kind), tmp_path)
    assert found["trials"] == 1 and not wrong(found), found


def failing(*errors: Exception | None) -> FakeRenderer:
    """Raises these, one a clip."""
    left = iter(errors)

    def fail(_prompt: str) -> None:
        error = next(left)
        if error is not None:
            raise error

    return FakeRenderer(fail)


def test_a_machine_that_fails_at_one_clip_costs_that_clip_and_at_two_in_a_row_the_run(tmp_path: Path) -> None:
    four = [{"prompt": each, "seed": 1} for each in "abcd"]
    hung = ClipFault("ffmpeg: got no end after 2 s, expected an end; render it again")
    summary = run_batch(tmp_path, four, failing(hung, None, OSError("x"), None))
    assert [row["state"] for row in summary.rows] == ["failed", "done", "failed", "done"] and summary.rows[0]["error"] == str(hung)
    with pytest.raises(EnvironmentFault, match=r"two clips in a row .*OSError: y.* run the same command"):
        run_batch(tmp_path, four, failing(hung, OSError("y")))
    dead = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(EnvironmentFault, match="device: got RuntimeError: CUDA error"):
        run_batch(tmp_path, four, failing(dead))
    assert run_batch(tmp_path, four, FakeRenderer()).count("done") == 2


def test_a_recipe_that_is_refused_costs_its_clip_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = FakeRenderer()
    monkeypatch.setattr("tests.videogen.jobs.fakes.run_clips", _refusing(stock))
    summary = run_batch(tmp_path, [{"prompt": "one"}, {"prompt": "two", "recipe": "exact"}], stock)
    assert [row["state"] for row in summary.rows] == ["done", "failed"]


def _refusing(stock: FakeRenderer) -> Any:
    from videogen.jobs.run import run_clips

    def run(clips: Any, journal: Any, _open: Any, **more: Any) -> Any:
        def open_renderer(recipe: Any) -> FakeRenderer:
            if recipe.name == "exact":
                raise ValueError("not here")
            return stock

        return run_clips(clips, journal, open_renderer, **more)

    return run


def test_a_lost_journal_is_read_from_the_sidecars(tmp_path: Path) -> None:
    batch = Batch(tmp_path, jobs=JOBS)
    assert batch.run() == 0
    before = injectors.clips_in(batch.folder)
    (batch.folder / JOURNAL).unlink()
    (batch.folder / "notes.json").write_text('{"status": "completed", "job_id": "x", "output": []}')
    assert batch.run() == 0 and injectors.clips_in(batch.folder) == before and batch.said.count("finished before") == 2
    assert {known.state for known in read_journal(batch.folder).jobs.values()} == {"done"}


def test_a_changed_line_is_no_line_and_a_name_leads_nowhere_else(tmp_path: Path) -> None:
    journal = read_journal(tmp_path)
    settle_prompts(tmp_path, journal, [{"prompt": "one"}])
    journal.append("start", job="j", name="one")
    whole = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(whole.replace(b'"name": "one"', b'"name": "two"'))
    assert read_journal(tmp_path).damaged == 1 and not read_journal(tmp_path).jobs
    for name in ("../../x", "/x", ".lock", ""):
        (tmp_path / JOURNAL).write_text(json.dumps({"event": "start", "job": "j", "name": name}) + "\n")
        assert read_journal(tmp_path).jobs.get("j", None) is None or not name


def test_a_run_that_nobody_hears_goes_on_and_a_worker_whose_supervisor_is_gone_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Closed:
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    stop = StopFlag()
    monkeypatch.setattr(sys, "stderr", Closed())
    PlainScreen()._say("clip 1/2")
    assert not stop.wanted
    JsonScreen(stop.set).event(Event("load"))
    assert stop.wanted


def test_a_full_disk_under_a_server_costs_its_job_and_says_so(tmp_path: Path) -> None:
    class Full(StandIn):
        def make(self, job: Any, *given: Any) -> Any:
            if job.summary["prompt"] == "one":
                raise OSError(28, "No space left on device")
            return super().make(job, *given)

    services = services_in(tmp_path)
    first, second = (services.desk.submit("me", {"prompt": prompt})[0] for prompt in ("one", "two"))
    Worker(tmp_path, "0", Full(), retention_s=10.0, stop=StopFlag()).run(until_idle=True)
    failed, done = services.store.get(first.id), services.store.get(second.id)
    assert failed is not None and done is not None and (failed.state, done.state) == (FAILED, COMPLETED)
    assert failed.error_code == "environment" and "No space left on device" in failed.error


def test_a_clock_that_jumps_ends_no_clips_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteadyClock()
    began = clock.now()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1e6)
    assert began <= clock.now() < began + 100
    monkeypatch.setattr(time, "time", lambda: now - 1e6)
    assert clock.now() == now - 1e6
