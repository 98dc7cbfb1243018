"""A renderer without a model: its frames depend on request and seed alone, so that runs can be compared and killed cheaply."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from videogen.config import Recipe
from videogen.families.base import Resolved
from videogen.families.h3 import H3Family
from videogen.jobs.files import RawJob
from videogen.jobs.journal import Journal, locked, read_journal
from videogen.jobs.plan import Clip, SeedBook, make_drafts, settle
from videogen.jobs.run import SilentScreen, Summary, run_clips, sweep
from videogen.media import Encoding
from videogen.progress import Event, OnEvent, StopFlag
from videogen.result import Result
from videogen.source import find_model, open_family


class FakeRenderer:
    """Noise from the seed; `fail` may raise for a prompt, `step_s` is a pause that gives a kill time to land."""

    def __init__(self, fail: Callable[[str], None] | None = None, step_s: float = 0.0) -> None:
        self.fail, self.step_s = fail, step_s
        self.rendered: list[str] = []

    def render(self, request: Resolved, *, seed: int | None, on_event: OnEvent, stop: StopFlag | None) -> Result:
        """A 64x32 clip of five frames."""
        for step in range(3):
            on_event(Event("denoise", step, 3))
            time.sleep(self.step_s)
            if stop is not None:
                stop.check()
        if self.fail:
            self.fail(request.prompt)
        self.rendered.append(request.prompt)
        rng = np.random.default_rng(seed)
        frames = rng.integers(0, 255, (5, 32, 64, 3), dtype=np.uint8)
        audio = rng.uniform(-0.5, 0.5, (2, 1667)).astype(np.float32)
        record = {"schema": "videogen.clip/1", "status": "completed", "prompt": request.prompt, "stages_s": {}, "output": {}}
        return Result(frames, audio, 8000, 24.0, record)


def family() -> H3Family:
    """The shipped model's family: configs only."""
    return open_family(find_model("pocket"))


def settle_prompts(folder: Path, journal: Journal, values: list[dict[str, object]], *, is_resumed: bool = True) -> list[Clip]:
    """Clips for these job values, named and seeded as the command line does."""
    drafts = make_drafts([RawJob(dict(v), f"job {i}") for i, v in enumerate(values, 1)], family(), Recipe())
    counter = iter(range(10_000, 20_000))
    seeds = SeedBook(
        known=journal.seeds.copy() if is_resumed else {},
        remember=lambda key, seed: journal.append("seed", draft=key, seed=seed),
        draw=lambda: next(counter) + time.monotonic_ns() % 1_000_000,
    )
    existing = {path.name.lower() for path in folder.iterdir()}
    return settle(
        drafts,
        journal,
        seeds,
        model=("pocket", "identity"),
        encoding=Encoding(),
        template="{index:04d}-{prompt:20}",
        is_resumed=is_resumed,
        is_taken=lambda name: f"{name}.mp4" in existing,
    )


def run_batch(folder: Path, values: list[dict[str, object]], renderer: FakeRenderer, **options: object) -> Summary:
    """One whole run, as `videogen render` makes it."""
    with locked(folder):
        journal = read_journal(folder)
        sweep(journal)
        clips = settle_prompts(folder, journal, values, is_resumed=bool(options.get("is_resumed", True)))
        stop = options.get("stop")
        return run_clips(
            clips,
            journal,
            lambda _recipe: renderer,
            encoding=Encoding(),
            screen=SilentScreen(),
            stop=stop if isinstance(stop, StopFlag) else StopFlag(),
        )
