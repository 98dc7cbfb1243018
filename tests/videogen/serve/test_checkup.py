"""The doctor's look: asked for once, done by a worker between jobs, never lost with it, shown without a word of a path."""

from pathlib import Path
from typing import Any

import pytest

from tests.videogen.serve.fakes import StandIn, services_in
from videogen.doctor.examine import Examination
from videogen.doctor.report import Row
from videogen.errors import RequestError
from videogen.jobs.claims import group_lock
from videogen.progress import StopFlag
from videogen.serve import checkup, html
from videogen.serve.making import PipelineMaker
from videogen.serve.worker import Worker

AREA = {"area": "<b>linears", "requested": "float32", "executed": "float32", "reason": "r", "cost": "1 ms", "fix": "f", "is_slow": True}
REPORT = {"device": "cpu", "model": "pocket", "recipe": "exact", "rows": 7, "areas": [AREA], "attention": []}


def state(root: Path) -> str:
    found = checkup.read(services_in(root).store.database)
    return "" if found is None else found.state


def test_a_worker_looks_once_between_two_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services = services_in(tmp_path)
    database = services.store.database
    job, _ = services.desk.submit("me", {"prompt": "x"})
    assert checkup.read(database) is None and "Nobody has asked" in html.checkup(None)
    asked = checkup.ask(database)
    assert checkup.ask(database) == asked and asked.is_open
    calls: list[str] = []

    def examine() -> dict[str, Any]:
        now = services.store.get(job.id)
        assert now is not None
        calls.append(f"{state(tmp_path)} {now.state}")
        return REPORT

    with group_lock(tmp_path, "0", wait_s=1):
        Worker(tmp_path, "0", StandIn(), retention_s=10.0, stop=StopFlag(), examine=examine).run(until_idle=True)
    assert calls == ["running queued"], "before the next job, and no second time after it"
    assert checkup.ask(database).state == "done", "so soon after it nobody looks again"
    monkeypatch.setattr(checkup, "FRESH_S", 0.0)
    shown = html.checkup(checkup.read(database))
    assert checkup.ask(database).state == "wanted"
    assert "SLOW" in shown and "&lt;b&gt;linears" in shown and "1 of 1 areas" in shown and str(tmp_path) not in shown


def test_a_look_that_fails_or_dies_says_so_and_can_be_asked_for_again(tmp_path: Path) -> None:
    database = services_in(tmp_path).store.database

    def refuse() -> dict[str, Any]:
        raise RequestError(f"model: got {tmp_path}/x, expected another")

    def break_off() -> dict[str, Any]:
        raise RuntimeError("secret")

    with group_lock(tmp_path, "0", wait_s=1):
        checkup.ask(database)
        assert checkup.do(database, "0", refuse) and "It failed" in html.checkup(checkup.read(database))
        assert str(tmp_path) not in html.checkup(checkup.read(database)) and not checkup.do(database, "0", refuse)
        checkup.ask(database)
        with pytest.raises(RuntimeError):
            checkup.do(database, "0", break_off)
        assert state(tmp_path) == "failed"
        checkup._change(database, checkup.read(database), checkup.Checkup(checkup.RUNNING, 0.0, "0"))
        assert state(tmp_path) == "running"
    assert state(tmp_path) == "failed" and checkup.ask(database).state == "wanted"


def test_the_worker_looks_with_its_own_pipeline(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def look(self: Examination) -> None:  # the areas themselves have their own tests, and take seconds
        seen.append((self.pipe.transformer, self.resolved.recipe))
        self.rows.append(Row("linears", "a", "b", is_slow=True))
        self.measured |= {"rows": 7, "attention": []}

    monkeypatch.setattr(Examination, "look", look)
    maker = PipelineMaker(str(tiny_model), "cpu", tmp_path, offline=True)
    found = maker.examine()
    (pipeline,) = maker._opened.values()
    assert seen == [(pipeline.load("t2va").transformer, "exact")] and found["areas"][0]["is_slow"]
    assert "1 of 1 areas" in html.checkup(checkup.Checkup(checkup.DONE, 0.0, "0", found))
