"""The driver of a cluster run: clips go to whoever is free, a lost worker's clip to another, a deadly one to nobody. No cluster needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.videogen.jobs.fakes import FakeRenderer, settle_prompts
from videogen.cli.main import main
from videogen.errors import EnvironmentFault
from videogen.jobs.journal import locked, read_journal
from videogen.jobs.run import Summary
from videogen.media import Encoding, probe
from videogen.parallel.crew import Driver, Replica, WorkerLost
from videogen.progress import StopFlag


class Here:
    """Workers in this process; one dies at its n-th clip, and over every clip of a deadly prompt."""

    def __init__(self, folder: Path, dies: dict[int, int], fail: str = "") -> None:
        self.folder, self.dies, self.fail = folder, dies, fail
        self.given: list[tuple[int, str]] = []
        self.tickets: list[Any] = []
        self.dismissed: list[int] = []

    def hire(self, number: int) -> Any:
        def fail(prompt: str) -> None:
            if prompt == self.fail:
                raise RuntimeError("no luck")

        return number, Replica(lambda: lambda _: FakeRenderer(fail), self.folder, Encoding())

    def give(self, worker: Any, clip: Any) -> Any:
        assert worker[0] not in [each[0] for each, _ in self.tickets], "two clips at once"
        self.given.append((worker[0], clip.draft.resolved.prompt))
        self.tickets.append((worker, clip))
        return len(self.given)

    def first(self, tickets: Sequence[Any], timeout_s: float) -> Any:
        return min(tickets)

    def result(self, ticket: Any) -> dict[str, Any]:
        number, prompt = self.given[ticket - 1]
        worker, clip = self.tickets.pop(0)
        if prompt.startswith("deadly") or [n for n, _ in self.given[:ticket]].count(number) == self.dies.get(number):
            (self.folder / f"{clip.name}.mp4.part").write_bytes(b"half")
            raise WorkerLost("gone")
        return worker[1].render(clip)

    def dismiss(self, worker: Any) -> None:
        self.dismissed.append(worker[0])


def run(folder: Path, crew: Here, prompts: list[str], size: int) -> tuple[Summary, Driver]:
    with locked(folder):
        journal = read_journal(folder)
        clips = settle_prompts(folder, journal, [{"prompt": prompt, "seed": 5} for prompt in prompts])
        driver = Driver(crew, size, journal, lambda *_: None)
        return driver.run(clips, StopFlag()), driver


def test_a_lost_workers_clip_is_made_once_by_another_and_a_bad_one_fails(tmp_path: Path) -> None:
    crew = Here(tmp_path, dies={1: 2}, fail="bad")
    summary, driver = run(tmp_path, crew, ["a", "b", "bad", "d"], 2)
    assert [row["state"] for row in summary.rows] == ["done", "done", "failed", "done"] and driver.lost == 1
    assert summary.rows[2]["error"] == "RuntimeError: no luck"
    assert [prompt for _, prompt in crew.given].count("d") == 2 and crew.dismissed == [0]
    assert all(probe(path).frames == 5 for path in tmp_path.glob("*.mp4")) and not list(tmp_path.glob("*.part"))
    again, _ = run(tmp_path, Here(tmp_path, {}), ["a", "b", "bad"], 2)
    assert [row["state"] for row in again.rows] == ["skipped", "skipped", "done"]


def test_a_deadly_clip_is_given_up_and_a_lost_crew_is_said(tmp_path: Path) -> None:
    summary, driver = run(tmp_path, Here(tmp_path, {}), ["a", "deadly", "b"], 3)
    assert [row["state"] for row in summary.rows] == ["done", "failed", "done"] and driver.lost == 2
    with pytest.raises(EnvironmentFault, match="none left"):
        run(tmp_path, Here(tmp_path, {0: 1}), ["c"], 1)


def test_the_command_asks_for_ray_where_it_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    monkeypatch.delitem(__import__("sys").modules, "videogen.parallel.ray_crew", raising=False)
    assert main(["render", "--prompt", "a", "--engine", "ray"]) == 3 and "videogen[ray]" in capsys.readouterr().err
    assert main(["render", "--prompt", "a", "--engine", "ray", "--ulysses", "2"]) == 2
