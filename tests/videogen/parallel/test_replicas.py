"""Several workers of one folder: every clip once, whoever dies; a clip that kills is given up; the exit code says what happened."""

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.videogen.jobs.fakes import FakeRenderer, settle_prompts
from tests.videogen.parallel.trials import DEADLY_ONCE, trial
from tests.videogen.parallel.worlds import forked, in_world
from videogen.cli import agent, fleet
from videogen.cli.main import main
from videogen.errors import EnvironmentFault, RequestError
from videogen.jobs import run
from videogen.jobs.journal import locked, read_journal
from videogen.jobs.run import IN_ORDER, SilentScreen, run_clips
from videogen.media import Encoding
from videogen.parallel import comm
from videogen.parallel.claims import Claims, SharedQueue
from videogen.parallel.comm import Peers, PeersLost
from videogen.parallel.fleet import Command
from videogen.parallel.group import Announced, Lead, Together, follow
from videogen.parallel.launch import Launch, worker_commands
from videogen.parallel.mesh import Part, Place, shares
from videogen.progress import StopFlag


def test_a_worker_killed_at_a_random_moment_costs_nothing(tmp_path: Path) -> None:
    outcome = trial(tmp_path, [f"clip {k}" for k in range(1, 5)], 2, kill_after_s=random.uniform(0.0, 0.3))
    assert outcome.is_whole(4) and not outcome.failed
    assert outcome.codes.count(-signal.SIGKILL) <= 1 and set(outcome.codes) <= {0, -signal.SIGKILL}


def test_a_clip_that_kills_its_workers_is_given_up_in_this_run_only(tmp_path: Path) -> None:
    def taken(run: str) -> list[str]:
        journal = read_journal(tmp_path)
        journal.stamp = {"run": run}
        clips = settle_prompts(tmp_path, journal, [{"prompt": f"clip {k}", "seed": k} for k in (1, 2)])
        with Claims(tmp_path) as claims:
            found = []
            for _, clip in SharedQueue(journal, claims, run).take(clips, StopFlag()):
                found.append(clip.name)
                journal.append("start", job=clip.job_id, name=clip.name)
                journal.append("done", job=clip.job_id) if found.count(clip.name) == 1 and clip.seed == 2 else None
        return found

    assert taken("a") == ["0001-clip-1", "0001-clip-1", "0002-clip-2"]  # begun twice without an end, then given up
    assert [known.error for known in read_journal(tmp_path).jobs.values()] == ["2 workers died while rendering it", ""]
    assert len(taken("b")) == 3


def test_the_command_starts_workers_and_says_that_one_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    jobs, out = tmp_path / "jobs.jsonl", tmp_path / "out"
    prompts = ["clip 1", f"{DEADLY_ONCE} 2", "clip 3"]
    jobs.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    def commands(args: Any, run: str, text: str) -> list[Command]:
        told = dict(os.environ) | {"VIDEOGEN_RUN": run}
        return [Command((sys.executable, "-m", "tests.videogen.parallel.trials", *args.words), told)] * args.gpus

    monkeypatch.setattr(fleet, "_commands", commands)
    words = ["render", str(jobs), "--gpus", "2", "--json", "-o", str(out)]
    assert main([*words, "--no-resume"]) == 5  # seeds are drawn anew, once for all workers
    told, errors = capfd.readouterr()
    totals = json.loads(told)["totals"]
    assert (totals["done"], totals["left"], totals["lost_workers"]) == (3, 0, 1) and "died (signal 9)" in errors
    seeds = {row["name"]: row["seed"] for row in json.loads(told)["clips"]}
    assert len(set(seeds.values())) == 3 and len(list(out.glob("*.mp4"))) == 3
    assert sorted(path.name for path in out.glob(".*")) == [".killed", ".lock"]
    assert main([*words, "--quiet"]) == 0  # nothing is left to do, and nobody is started
    assert {row["state"] for row in json.loads(capfd.readouterr().out)["clips"]} == {"skipped"}


@pytest.mark.parametrize(
    ("codes", "state", "wanted"),
    [([1, 0], "done", 5), ([0, 0], "failed", 1), ([0, 1], "failed", 1), ([3, 3], "start", 3), ([-9, -9], "start", 5), ([0, 0], "done", 0)],
)
def test_the_exit_code_tells_deaths_from_failures(
    codes: list[int], state: str, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[str] = []

    def watch(commands: list[Command], on_line: Any, on_exit: Any, stop: StopFlag) -> list[int]:
        journal = read_journal(tmp_path)
        journal.stamp = {"run": runs[0]}
        job_id = json.loads(next(tmp_path.glob(".plan-*")).read_text())["clips"][0][2]
        journal.append(state, job=job_id, name="a")
        for worker, code in enumerate(codes):
            on_exit(worker, code)
        return codes

    monkeypatch.setattr(fleet, "_commands", lambda args, run, text: runs.append(run))
    monkeypatch.setattr(fleet, "watch", watch)
    assert main(["render", "--prompt", "a", "--seed", "1", "--gpus", "2", "-o", str(tmp_path)]) == wanted
    assert capsys.readouterr().err.count("died (") == sum(code != 0 for code in codes)


def test_a_folder_is_shared_by_workers_and_by_nobody_else(tmp_path: Path) -> None:
    shared, refused = (locked(tmp_path, is_shared=True) for _ in "ab"), pytest.raises(EnvironmentFault, match="no other run")
    with next(shared), next(shared), refused, locked(tmp_path):
        pass


class Fails(FakeRenderer):
    """Fails where `prompt` says so: on every rank, or on the second alone."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def render(self, request, **values):  # type: ignore[no-untyped-def]
        if request.prompt == "all fail" or (request.prompt == "one fails" and self.rank):
            raise RuntimeError("no luck")
        if request.prompt == "one fails":
            raise RuntimeError("connection closed by peer")
        return super().render(request, **values)


def test_ranks_of_one_clip_fail_alike_or_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "MEET", comm.timedelta(seconds=1))

    def job(peers: Peers, folder: Path, prompts: list[str]) -> Any:
        journal = read_journal(folder)
        clips = settle_prompts(folder, journal, [{"prompt": prompt, "seed": 5} for prompt in prompts])
        renderer = Fails(peers.rank)
        if peers.rank:
            if prompts[0] == "one fails":
                return f"gone after {peers.same(0)}"  # without a word
            follow(clips, peers, lambda _: Together(renderer, Lead(peers)), StopFlag())
            return renderer.rendered
        lead, told = Lead(peers), {"encoding": Encoding(), "screen": SilentScreen(), "stop": StopFlag()}
        try:
            with lead.to_the_end() as kept:
                queue = Announced(IN_ORDER, lead)
                summary = run_clips(clips, journal, lambda _: Together(renderer, lead), queue=queue, **told)  # type: ignore[arg-type]
        except PeersLost:
            return "lost"
        return str(kept[0]) if kept else [row["state"] for row in summary.rows]

    def full(*_: Any) -> Any:
        raise EnvironmentFault("disk: full")

    def of_rank(rank: int) -> Any:
        folders = [tmp_path / name for name in ("a", "b", "c")]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        alike = in_world(folders[0], rank, 2, lambda peers: job(peers, folders[0], ["one", "all fail", "three"]))
        alone = in_world(folders[1], rank, 2, lambda peers: job(peers, folders[1], ["one fails"]))
        monkeypatch.setattr(run, "write_output", full)  # the leader's alone, between two clips
        fault = in_world(folders[2], rank, 2, lambda peers: job(peers, folders[2], ["one", "two"]))
        return alike, alone, fault

    (leader, lost, fault), (follower, gone, told) = forked(tmp_path, 2, of_rank)
    assert "disk: full" in fault and told == ["one"]  # the follower was told the end
    assert leader == ["done", "failed", "done"] and follower == ["one", "three"]
    assert lost == "lost" and gone == "gone after 1"
    assert [known.state for known in read_journal(tmp_path / "b").jobs.values()] == ["start"]  # another replica takes it


def test_a_leader_whose_peers_are_gone_says_why_it_ends_itself() -> None:
    class Gone:
        def __init__(self) -> None:
            self.told: list[int] = []

        def same(self, number: int) -> int:
            self.told.append(number)
            raise PeersLost("gone")

    for number in (None, 3):
        lead = Lead(Gone())  # type: ignore[arg-type]
        with (
            pytest.raises(EnvironmentFault if number is None else PeersLost, match="full" if number is None else "gone"),
            lead.to_the_end(),
        ):
            if number is not None:
                lead.tell(number)
            raise EnvironmentFault("disk: full")
        assert lead.peers.told == [0 if number is None else 3] and not lead.are_waiting  # type: ignore[attr-defined]


def test_shares_and_places_are_dealt_evenly() -> None:
    assert shares(10, 3) == (4, 3, 3) and shares(2, 3) == (1, 1, 0)
    assert (Part((4, 3, 3), 2).begin, Part((4, 3, 3), 2).size) == (7, 3)
    assert [(p.replica, p.seat) for p in (Place(rank, rank, 4, 2) for rank in range(4))] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert Place(0, 0, 4, 2).seats == ((0, 1), (2, 3))
    for ranks in ((0, 0, 4, 3), (4, 4, 4, 1)):
        with pytest.raises(RequestError):
            Place(*ranks)


def test_commands_go_through_accelerate_with_a_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIDEOGEN_API_KEY", "secret")
    alone = worker_commands(Launch(2, 1, ("4", "7")), ["render", "jobs.txt"], "r")
    assert [c.environment["CUDA_VISIBLE_DEVICES"] for c in alone] == ["4", "7"]
    assert alone[1].words[1:] == ("-m", "videogen", "render", "jobs.txt") and alone[1].environment["VIDEOGEN_WORKER"] == "1"
    pairs = worker_commands(Launch(4, 2, ("0", "1", "2", "3")), ["render", "jobs.txt"], "r")
    assert [c.words[c.words.index("--gpu_ids") + 1] for c in pairs] == ["0,1", "2,3"] and "--multi_gpu" in pairs[0].words
    assert all("VIDEOGEN_API_KEY" not in c.environment and c.environment["VIDEOGEN_RUN"] == "r" for c in alone + pairs)
    with pytest.raises(EnvironmentFault, match="at most the 1"):
        Launch(2, 1, ("0",))


@pytest.mark.parametrize(
    ("raised", "code"),
    [(None, 0), (3, 3), (-9, 137), (-15, 1), (SignalException("stop", signal.SIGTERM), 143)],
)
def test_the_launcher_of_ranks_ends_as_the_first_that_failed(
    raised: Any, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def main() -> None:
        if isinstance(raised, int):
            failures = {rank: ProcessFailure(rank, 100 + rank, ended, str(tmp_path)) for rank, ended in enumerate((-15, raised))}
            failures[0].timestamp, failures[1].timestamp = 20, 10
            raise ChildFailedError("videogen", failures)
        if raised is not None:
            raise raised

    monkeypatch.setattr(agent.launch, "main", main)
    assert agent.main() == code
