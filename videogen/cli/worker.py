"""One of several processes that render a folder's clips: started by `--gpus`, or by accelerate launch or torchrun themselves."""

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from videogen.cli.planning import Wanted, read_wanted
from videogen.cli.render import exit_code, opener, report, settle, signals
from videogen.cli.screen import JsonScreen, QuietScreen, make_screen
from videogen.config import Environment, Recipe
from videogen.errors import bad
from videogen.jobs.journal import Journal, locked, read_journal
from videogen.jobs.plan import Clip
from videogen.jobs.run import Renderer, Summary, row_of, run_clips
from videogen.parallel.claims import Claims, SharedQueue
from videogen.parallel.mesh import Place
from videogen.parallel.shared_plan import settled_once
from videogen.progress import StopFlag


@dataclass(frozen=True, slots=True)
class Worker:
    """This process: where it is, which run it belongs to, and whether `--gpus` started it."""

    place: Place
    run: str
    number: int
    is_supervised: bool

    @property
    def is_reporter(self) -> bool:
        """Whether it speaks for a run that nobody supervises."""
        return not self.is_supervised and self.place.rank == 0


def who(args: argparse.Namespace, told: Environment) -> Worker:
    """This process, as the launcher's environment has it. Processes of one launcher have one parent, which names the run."""
    place = Place(told.rank, told.local_rank, told.world_size, args.ulysses)
    if told.run:
        return Worker(place, told.run, told.worker, True)
    if "-" in args.jobs:
        raise bad("jobs", "-", "a file that every process can read", "write the jobs to a file")
    return Worker(place, f"parent {os.getppid()}", place.replica, False)


def run(args: argparse.Namespace, told: Environment) -> int:
    """Render what is free; exit code as that of `render`, but 0 where another process reports failed clips."""
    worker, stop = who(args, told), StopFlag()
    wanted = read_wanted(args)
    with signals(stop) as came, locked(wanted.folder, is_shared=True), Claims(wanted.folder) as claims:
        journal = read_journal(wanted.folder)
        journal.stamp = {"run": worker.run, "worker": worker.number}
        clips = settled_once(wanted.folder, worker.run, wanted.drafts, claims, lambda: settle(wanted, args, journal))
        queue = SharedQueue(journal, claims, worker.run)
        if worker.place.ulysses == 1:
            _place_on_device(args, worker.place)
            summary = _render(worker, wanted, args, clips, queue, stop)
        else:
            summary = _render_together(worker, wanted, args, clips, queue, stop)
    if not worker.is_reporter:  # who supervises or reports reads failed clips in the journal; another code means a death
        return exit_code(summary, came) if summary.is_stopped else 0
    whole = whole_summary(clips, journal, worker.run, is_stopped=summary.is_stopped)
    report(args, wanted, whole, lost=0)
    return exit_code(whole, came)


def _place_on_device(args: argparse.Namespace, place: Place) -> Any:
    """The device of this rank, made the current one where there are several; torch is loaded here."""
    import torch

    from videogen.load import pick_device

    device = pick_device(args.device)
    if device.type == "cuda" and place.world_size > 1:
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    return device


def _screen(worker: Worker, args: argparse.Namespace, environment: Environment, stop: StopFlag) -> QuietScreen:
    if worker.is_supervised:  # a supervisor that is gone has left its devices to whoever comes next
        return JsonScreen(stop.set) if worker.place.seat == 0 else QuietScreen()
    if worker.is_reporter:
        return make_screen("none" if args.quiet else args.progress, use_color=not environment.no_color)
    return QuietScreen()


def _render(
    worker: Worker,
    wanted: Wanted,
    args: argparse.Namespace,
    clips: list[Clip],
    queue: SharedQueue,
    stop: StopFlag,
    around: Callable[[Any], Any] = lambda queue: queue,
    open_renderer: Callable[[Recipe], Renderer] | None = None,
) -> Summary:
    from videogen.config import read_environment

    journal = queue.journal
    with _screen(worker, args, read_environment(), stop) as screen:

        def ended(number: int, clip: Clip) -> None:
            known = journal.jobs[clip.job_id]
            screen.begin(clip, number, len(clips))
            screen.end(clip, known.state, known.seconds, known.error or str(journal.folder / known.file))

        if worker.is_reporter:
            queue.on_end = ended
        opened = open_renderer or opener(wanted, args)
        return run_clips(clips, journal, opened, encoding=wanted.encoding, screen=screen, stop=stop, queue=around(queue))


def _render_together(
    worker: Worker, wanted: Wanted, args: argparse.Namespace, clips: list[Clip], queue: SharedQueue, stop: StopFlag
) -> Summary:
    """With the other ranks of this replica: the first claims and writes, all render."""
    from videogen.parallel.group import Announced, Lead, Together, follow
    from videogen.parallel.join import joined
    from videogen.parallel.probe import head_groups
    from videogen.parallel.sequence import Ulysses

    device = _place_on_device(args, worker.place)
    with ExitStack() as stack:
        peers = stack.enter_context(joined(worker.place, device))
        opened, lead = opener(wanted, args, Ulysses(peers, head_groups(peers, device))), Lead(peers)

        def open_renderer(recipe: Recipe) -> Renderer:
            with lead.alike():
                return Together(opened(recipe), lead)

        if peers.rank:
            follow(clips, peers, open_renderer, stop)
            return Summary(is_stopped=stop.wanted)

        def around(inner: SharedQueue) -> Announced:
            announced = Announced(inner, lead)
            inner.pause = announced.pause
            return announced

        kept = stack.enter_context(lead.to_the_end())
        return _render(worker, wanted, args, clips, queue, stop, around, open_renderer)
    raise kept[0]


def whole_summary(clips: list[Clip], journal: Journal, run: str, *, is_stopped: bool) -> Summary:
    """How a run went over all its workers, from the journal; a clip that none finished is `left`."""
    journal.catch_up()
    summary = Summary(is_stopped=is_stopped)
    for clip in clips:
        known = journal.jobs.get(clip.job_id)
        is_over = known is not None and known.run == run and known.state in ("done", "failed")
        state = "skipped" if clip.is_done else known.state if known is not None and is_over else "left"
        row = row_of(clip, state, journal.folder)
        if known is not None and is_over:
            row |= {"error": known.error} if state == "failed" else {"seconds": known.seconds} if state == "done" else {}
        summary.rows.append(row)
    return summary
