"""Workers of one folder, one of them killed at a random moment: is every clip there once, and none twice?

`python -m tests.videogen.parallel.trials TRIALS` makes 20 uneven clips with 4 workers a trial and reports the counts. A worker is a
process of its own with a renderer that sleeps, so that a trial takes seconds; claims, journal and files are the real ones.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.videogen.jobs.fakes import FakeRenderer, settle_prompts
from videogen.cli import worker as cli_worker
from videogen.cli.main import main as command_line
from videogen.jobs.journal import locked, read_journal
from videogen.jobs.run import SilentScreen, Summary, run_clips
from videogen.media import Encoding, probe
from videogen.parallel.claims import Claims, SharedQueue
from videogen.parallel.fleet import Command, watch
from videogen.parallel.shared_plan import settled_once
from videogen.progress import StopFlag

DEADLY, DEADLY_ONCE = "deadly", "deadly once"


class Uneven(FakeRenderer):
    """A clip takes from one to eight times as long as another; two prompts kill their worker, one of them the first time only."""

    def __init__(self, folder: Path, step_s: float = 0.03) -> None:
        super().__init__()
        self.folder, self.shortest_s = folder, step_s

    def render(self, request, **values):  # type: ignore[no-untyped-def]
        number, mark = int(request.prompt.split()[-1]), self.folder / ".killed"
        self.step_s = self.shortest_s * (1 + 7 * (number % 5 == 0))
        is_spared = request.prompt.startswith(DEADLY_ONCE) and mark.exists()
        if request.prompt.startswith(DEADLY) and not is_spared:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().render(request, **values)


def work(folder: Path, run: str, prompts: list[str]) -> Summary:
    """One worker from claim to claim, as `videogen render` is in a worker process."""
    with locked(folder, is_shared=True), Claims(folder) as claims:
        journal = read_journal(folder)
        journal.stamp = {"run": run}
        settled = settle_prompts(folder, journal, [{"prompt": prompt, "seed": 5} for prompt in prompts])
        clips = settled_once(folder, run, [clip.draft for clip in settled], claims, lambda: settled)
        queue = SharedQueue(journal, claims, run, pause=lambda _: time.sleep(0.02))
        screen, renderer = SilentScreen(), Uneven(folder)
        return run_clips(clips, journal, lambda _: renderer, encoding=Encoding(), screen=screen, stop=StopFlag(), queue=queue)


@dataclass
class Outcome:
    """What a run left: how often each clip was finished, exit codes, strays, and clips that were begun more than once."""

    done: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    again: int = 0
    by_worker: Counter[int] = field(default_factory=Counter)

    def is_whole(self, clips: int) -> bool:
        """Every clip once, none twice, each a whole file."""
        return len(self.done) == clips and set(self.done.values()) == {1} and not self.broken


def trial(folder: Path, prompts: list[str], workers: int, kill_after_s: float | None) -> Outcome:
    """One run; `kill_after_s` after the first clip began a worker that is rendering is killed."""
    run = "trial"
    words = (sys.executable, "-m", "tests.videogen.parallel.trials", "worker", str(folder), run, json.dumps(prompts))
    commands = [Command(words, dict(os.environ) | {"OMP_NUM_THREADS": "1"})] * workers
    errors: list[str] = []
    killer = _Killer(folder, kill_after_s)
    codes = watch(commands, lambda _, line: errors.append(line), lambda *_: None, killer)
    assert not errors, "\n".join(errors[-20:])
    return _outcome(folder, codes)


class _Killer(StopFlag):
    """Looked at by `watch` at every tick, it kills one worker process in place of wanting a stop."""

    __slots__ = ("after_s", "began", "folder")

    def __init__(self, folder: Path, after_s: float | None) -> None:
        self.folder, self.after_s, self.began = folder, after_s, 0.0

    @property
    def wanted(self) -> bool:  # type: ignore[override]
        """Never; kills when it is time."""
        if self.after_s is not None and (self.folder / "run.jsonl").is_file():
            self.began = self.began or time.monotonic()
            if time.monotonic() - self.began >= self.after_s:
                self.after_s = None
                victims = [pid for pid in _children() if _is_worker(pid)]
                os.kill(random.choice(victims), signal.SIGKILL) if victims else None
        return False


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _is_worker(pid: int) -> bool:
    return b"trials" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _outcome(folder: Path, codes: list[int]) -> Outcome:
    outcome, starts = Outcome(codes=codes), Counter[str]()
    for line in (folder / "run.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            starts[event["job"]] += 1
        elif event["event"] == "done":
            outcome.done[event["job"]] += 1
        elif event["event"] == "failed":
            outcome.failed[event["job"]] = event["error"]
    outcome.again = sum(count > 1 for count in starts.values())
    files = sorted(folder.glob("*.mp4"))
    outcome.broken = [path.name for path in files if probe(path).frames != 5] + [path.name for path in folder.glob("*.part*")]
    assert len(files) == len(outcome.done), (len(files), len(outcome.done))
    return outcome


def main(trials: int) -> None:
    """Trials with 4 workers, 20 clips and one kill each."""
    rng, counts, prompts = random.Random(11), Counter[str](), [f"clip {k}" for k in range(20)]
    random.seed(12)
    for _ in range(trials):
        with tempfile.TemporaryDirectory() as folder:
            outcome = trial(Path(folder), prompts, 4, rng.uniform(0.0, 1.5))
        counts["trials"] += 1
        counts["every clip once"] += outcome.is_whole(20)
        counts["workers killed"] += outcome.codes.count(-signal.SIGKILL)
        counts["killed amid a clip"] += outcome.again
        counts["other exit codes"] += sum(code not in (0, -signal.SIGKILL) for code in outcome.codes)
        sys.stdout.write(f"{dict(counts)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        work(Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    elif sys.argv[1] == "render":  # the real command line as a worker, around the stand-in
        cli_worker._place_on_device = lambda *_: None
        cli_worker.opener = lambda wanted, args: lambda recipe: Uneven(wanted.folder, 0.0)
        sys.exit(command_line(sys.argv[1:]))
    else:
        main(int(sys.argv[1]))
