"""Clips given one by one to workers that may be anywhere, by a driver that keeps the journal: a lost worker's clip goes to another.

The workers write to storage that the driver shares; who they are (`ray_crew.py`: actors of a Ray cluster) is behind `Crew`.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from videogen.config import Recipe, as_plain
from videogen.errors import EnvironmentFault, say
from videogen.identity import canonical_json, hash_file
from videogen.jobs.faults import CLIP_ERRORS, describe, ends_the_run
from videogen.jobs.journal import Journal
from videogen.jobs.plan import Clip
from videogen.jobs.run import Renderer, SilentScreen, Summary, row_of, sweep_name, write_output
from videogen.media import Encoding
from videogen.parallel.claims import MAX_DEATHS
from videogen.progress import StopFlag, ignore

_TICK_S = 0.5


class WorkerLost(Exception):
    """The worker that had a clip is gone."""


class Crew(Protocol):
    """Workers to be had."""

    def hire(self, number: int) -> Any:
        """A new worker; it may still be starting."""
        ...

    def give(self, worker: Any, clip: Clip) -> Any:
        """Begin a clip on a worker that has none; what `first` and `result` know it by."""
        ...

    def first(self, tickets: Sequence[Any], timeout_s: float) -> Any:
        """One of the tickets that is over, None when none is in time."""
        ...

    def result(self, ticket: Any) -> dict[str, Any]:
        """What `Replica.render` returned. Raises WorkerLost."""
        ...

    def dismiss(self, worker: Any) -> None:
        """End a worker, whatever it is doing."""
        ...


class Replica:
    """One worker's side: renders a clip and writes it with its sidecar into the shared folder; models stay open."""

    def __init__(self, make_opener: Callable[[], Callable[[Recipe], Renderer]], folder: Path, encoding: Encoding) -> None:
        self.open_renderer, self.folder, self.encoding = make_opener(), folder, encoding
        self.opened: dict[str, Renderer] = {}

    def render(self, clip: Clip) -> dict[str, Any]:
        """`file`, `sha256` and `seconds`, or `error`; an EnvironmentFault is raised."""
        began = time.perf_counter()
        sweep_name(self.folder, clip.name)  # of a worker that died over it
        key = canonical_json(as_plain(clip.draft.recipe))
        try:
            if key not in self.opened:
                self.opened[key] = self.open_renderer(clip.draft.recipe)
            result = self.opened[key].render(clip.draft.resolved, seed=clip.seed, on_event=ignore, stop=StopFlag())
            path = write_output(clip, result, self.folder, self.encoding, SilentScreen())
        except CLIP_ERRORS as error:
            if ends_the_run(error):
                raise
            return {"error": describe(error)[:2000]}
        return {"file": path.name, "sha256": hash_file(path), "seconds": round(time.perf_counter() - began, 3)}


OnEvent = Callable[[int, dict[str, Any]], None]


@dataclass(slots=True)
class Driver:
    """One run over a crew of `size`: what is waiting, who has what, who died."""

    crew: Crew
    size: int
    journal: Journal
    on_event: OnEvent
    waiting: deque[tuple[int, Clip]] = field(default_factory=deque)
    running: dict[Any, tuple[int, int, Clip]] = field(default_factory=dict)  # ticket -> worker, number, clip
    workers: dict[int, Any] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    total: int = 0

    def run(self, clips: Sequence[Clip], stop: StopFlag) -> Summary:
        """Render every clip that is not done; rows in plan order.

        Raises EnvironmentFault when every worker is lost, or one says that nothing can be rendered.
        """
        rows = {clip.job_id: row_of(clip, "skipped" if clip.is_done else "left", self.journal.folder) for clip in clips}
        self.waiting.extend((number, clip) for number, clip in enumerate(clips, 1) if not clip.is_done)
        self.total = len(clips)
        for number in range(min(self.size, len(self.waiting))):
            self.workers[number] = self.crew.hire(number)
        try:
            while (self.waiting or self.running) and not stop.wanted:
                self._give()
                self._take(rows)
        finally:
            for _, _, clip in self.running.values():
                self.journal.append("stopped", job=clip.job_id)
            for worker in self.workers.values():
                self.crew.dismiss(worker)
        return Summary(list(rows.values()), stop.wanted)

    def _give(self) -> None:
        busy = {worker for worker, _, _ in self.running.values()}
        for worker in [each for each in self.workers if each not in busy]:
            if not self.waiting:
                return
            number, clip = self.waiting.popleft()
            self.journal.append("start", job=clip.job_id, name=clip.name, worker=worker)
            self.running[self.crew.give(self.workers[worker], clip)] = (worker, number, clip)
            self._tell(worker, "begin", number, clip)

    def _take(self, rows: dict[str, dict[str, Any]]) -> None:
        ticket = self.crew.first(list(self.running), _TICK_S)
        if ticket is None:
            return
        worker, number, clip = self.running[ticket]
        try:
            made: dict[str, Any] | None = self.crew.result(ticket)
        except WorkerLost as error:
            del self.running[ticket], self.workers[worker]
            made = self._bury(number, clip, error)
        else:
            del self.running[ticket]
        if made is None:
            return
        state = "failed" if "error" in made else "done"
        tflop = {"tflop": round(clip.draft.estimate.tflop, 3)} if state == "done" else {}
        self.journal.append(state, job=clip.job_id, **made, **tflop)
        rows[clip.job_id] = row_of(clip, state, self.journal.folder) | {k: made[k] for k in ("error", "seconds") if k in made}
        self._tell(worker, "end", number, clip, state=state, seconds=made.get("seconds", 0.0), message=made.get("error", ""))

    def _bury(self, number: int, clip: Clip, error: WorkerLost) -> dict[str, Any] | None:
        """A worker died over a clip: it goes back to the front, or is given up."""
        self.lost += 1
        self.deaths[clip.job_id] += 1
        if self.deaths[clip.job_id] >= MAX_DEATHS:
            return {"error": f"{self.deaths[clip.job_id]} workers died while rendering it"}
        if not self.workers:
            raise EnvironmentFault(say("workers", f"none left ({error})", "at least one", "look at the nodes' logs")) from None
        self.waiting.appendleft((number, clip))
        return None

    def _tell(self, worker: int, event: str, number: int, clip: Clip, **more: Any) -> None:
        self.on_event(worker, {"event": event, "clip": number, "clips": self.total, "name": clip.name, "job_id": clip.job_id} | more)
