"""Renders a plan into one folder: claims, renders, writes, journals; one bad clip never costs another."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from videogen.config import Recipe, as_plain
from videogen.errors import CancelledRender, EnvironmentFault, say
from videogen.families.base import Resolved
from videogen.heap import hand_back
from videogen.identity import canonical_json, hash_file
from videogen.jobs.faults import CLIP_ERRORS, describe, ends_the_run, is_of_machine, refuse_to_go_on
from videogen.jobs.journal import Journal
from videogen.jobs.plan import Clip
from videogen.media import ClipInfo, Encoding, OnChecked, discard_partial, encode_files, ignore, write_clip
from videogen.progress import Event, OnEvent, StopFlag
from videogen.result import Result

logger = logging.getLogger(__name__)


class Renderer(Protocol):
    """The part of `videogen.pipeline.Pipeline` that a run needs."""

    def render(self, request: Resolved, *, seed: int | None, on_event: OnEvent, stop: StopFlag | None) -> Result:
        """Render one clip."""
        ...


class Screen(Protocol):
    """What a run tells: each clip's begin, events and end (`state`: done, skipped, failed)."""

    def begin(self, clip: Clip, number: int, total: int) -> None:
        """A clip is next."""
        ...

    def event(self, event: Event) -> None:
        """A phase or step of the running clip."""
        ...

    def end(self, clip: Clip, state: str, seconds: float, message: str) -> None:
        """The clip is over."""
        ...


class SilentScreen:
    """Tells nothing."""

    def begin(self, clip: Clip, number: int, total: int) -> None:
        """Nothing."""

    def event(self, event: Event) -> None:
        """Nothing."""

    def end(self, clip: Clip, state: str, seconds: float, message: str) -> None:
        """Nothing."""


class Queue(Protocol):
    """Where a run takes its clips from."""

    def take(self, clips: Sequence[Clip], stop: StopFlag) -> Iterator[tuple[int, Clip]]:
        """The clips to attend to and their numbers from 1, each when the one before is over; ends early on a stop."""
        ...


class InOrder:
    """All of them, one after the other."""

    def take(self, clips: Sequence[Clip], stop: StopFlag) -> Iterator[tuple[int, Clip]]:
        """Every clip, finished ones too."""
        for number, clip in enumerate(clips, 1):
            if stop.wanted:
                return
            yield number, clip


IN_ORDER = InOrder()


@dataclass(slots=True)
class Summary:
    """How a run went: clip rows in plan order, whether it was stopped, and whether the machine failed at its last clip."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    is_stopped: bool = False
    is_shaken: bool = False

    def count(self, state: str) -> int:
        """How many clips ended in this state."""
        return sum(row["state"] == state for row in self.rows)


def sweep(journal: Journal) -> None:
    """Remove what a killed run left half-written, for every name the journal knows; call it holding the lock."""
    for known in journal.jobs.values():
        if known.name:
            sweep_name(journal.folder, known.name)


def sweep_name(folder: Path, name: str) -> None:
    """Remove what a killed run left half-written of one clip; call it with nobody else rendering it."""
    discard_partial(folder / f"{name}.mp4")
    _part(folder / f"{name}.json").unlink(missing_ok=True)


def run_clips(
    clips: Sequence[Clip],
    journal: Journal,
    open_renderer: Callable[[Recipe], Renderer],
    *,
    encoding: Encoding,
    screen: Screen,
    stop: StopFlag,
    queue: Queue = IN_ORDER,
) -> Summary:
    """Render every clip of the queue that is not done.

    `open_renderer` is called once per recipe in use, and only when a clip needs it. Raises EnvironmentFault when
    nothing more can be rendered or written; what was finished stays.
    """
    summary = Summary()
    opened: dict[str, Renderer] = {}

    def renderer_of(recipe: Recipe) -> Renderer:
        key = canonical_json(as_plain(recipe))
        if key not in opened:
            opened[key] = open_renderer(recipe)
        return opened[key]

    for number, clip in queue.take(clips, stop):
        screen.begin(clip, number, len(clips))
        if clip.is_done:
            journal.confirm(clip.job_id)
            screen.end(clip, "skipped", 0.0, str(journal.folder / f"{clip.name}.mp4"))
            summary.rows.append(row_of(clip, "skipped", journal.folder))
        elif _run_one(clip, renderer_of, journal, encoding, screen, stop, summary):
            hand_back()
        else:
            break
    summary.is_stopped |= stop.wanted and len(summary.rows) < len(clips)
    return summary


def _run_one(
    clip: Clip,
    renderer_of: Callable[[Recipe], Renderer],
    journal: Journal,
    encoding: Encoding,
    screen: Screen,
    stop: StopFlag,
    summary: Summary,
) -> bool:
    """Render one clip into the folder; False when the run should end here."""
    began = time.perf_counter()
    journal.append("start", job=clip.job_id, name=clip.name, **({"draft": clip.drawn, "seed": clip.seed} if clip.drawn else {}))
    try:
        renderer = renderer_of(clip.draft.recipe)
        result = renderer.render(clip.draft.resolved, seed=clip.seed, on_event=screen.event, stop=stop)
        path = write_output(clip, result, journal.folder, encoding, screen)
    except CancelledRender:
        journal.append("stopped", job=clip.job_id)
        summary.is_stopped = True
        return False
    except CLIP_ERRORS as error:
        message = describe(error)
        if ends_the_run(error):
            _note_failure(journal, clip, message)
            raise EnvironmentFault(f"{clip.draft.place}: {clip.name}: {message}") from error
        logger.debug("clip %s failed", clip.name, exc_info=True)
        journal.append("failed", job=clip.job_id, error=message[:2000])
        screen.end(clip, "failed", time.perf_counter() - began, message)
        summary.rows.append(row_of(clip, "failed", journal.folder) | {"error": message})
        refuse_to_go_on(error, is_second=summary.is_shaken)
        summary.is_shaken = is_of_machine(error)
        return True
    seconds = time.perf_counter() - began
    rate = {"seconds": round(seconds, 3), "tflop": round(clip.draft.estimate.tflop, 3)}
    journal.append("done", job=clip.job_id, name=clip.name, file=path.name, sha256=hash_file(path), **rate)
    screen.end(clip, "done", seconds, str(path))
    summary.rows.append(row_of(clip, "done", journal.folder) | {"seconds": round(seconds, 3)})
    summary.is_shaken = False
    return True


def _note_failure(journal: Journal, clip: Clip, message: str) -> None:
    """Journal a failure that ends the run; on a full disk even that may be impossible, and the cause matters more."""
    try:
        journal.append("failed", job=clip.job_id, error=message[:2000])
    except EnvironmentFault:
        logger.debug("the journal could not be written either")


def row_of(clip: Clip, state: str, folder: Path) -> dict[str, Any]:
    """A clip's entry in the summary; its file where it has one."""
    kept = {"job_id": clip.job_id, "name": clip.name, "state": state, "seed": clip.seed, "place": clip.draft.place}
    return kept | ({} if state not in ("done", "skipped") else {"file": str(folder / f"{clip.name}.mp4")})


def write_output(clip: Clip, result: Result, folder: Path, encoding: Encoding, screen: Screen) -> Path:
    """The clip, its companions and its sidecar, each appearing whole; the sidecar first, so that no clip is without."""
    began = time.perf_counter()
    screen.event(Event("encode"))
    path, sidecar, draft = folder / f"{clip.name}.mp4", folder / f"{clip.name}.json", clip.draft
    drawn = {"by": clip.drawn, "seed": clip.seed} if clip.drawn else None
    record: dict[str, Any] = {"job_id": clip.job_id, "id": draft.user_id, "tags": list(draft.tags), "place": draft.place, "drawn": drawn}
    record = result.record | {k: v for k, v in record.items() if v}

    def on_checked(info: ClipInfo, part: Path) -> None:
        stages_s = record["stages_s"] | {"encode": round(time.perf_counter() - began, 3)}
        output = record["output"] | _output_entry(path, part, info, encoding)
        write_json(sidecar, record | {"stages_s": stages_s, "output": output})

    try:
        write_result(path, result, encoding, canonical_json(record), on_checked)
    except BaseException:
        if not path.exists():
            sidecar.unlink(missing_ok=True)
        raise
    return path


def write_result(path: Path, result: Result, encoding: Encoding, comment: str, on_checked: OnChecked = ignore) -> ClipInfo:
    """A rendered clip as `write_clip` stores it, at its own rates; raises what `write_clip` raises."""
    return write_clip(
        path,
        result.frames,
        result.audio,
        fps=result.fps,
        sampling_rate=result.sampling_rate,
        encoding=encoding,
        comment=comment,
        on_checked=on_checked,
    )


def _output_entry(path: Path, part: Path, info: ClipInfo, encoding: Encoding) -> dict[str, Any]:
    return {
        "file": path.name,
        "companions": [file.name for file in encode_files(path, encoding)[1:]],
        "bytes": part.stat().st_size,
        "sha256": hash_file(part),
        "frames": info.frames,
        "size": f"{info.width}x{info.height}",
        "fps": round(info.fps, 6),
        "duration_s": round(info.duration_s, 6),
        "video_codec": info.video_codec,
        "audio_codec": info.audio_codec,
        "sampling_rate": info.sampling_rate,
        "crf": encoding.crf,
    }


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file appears whole or not at all; NaN and infinity are refused (they are not JSON).

    Raises EnvironmentFault when the disk refuses.
    """
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text so that the file appears whole or not at all.

    Raises EnvironmentFault when the disk refuses.
    """
    part = _part(path)
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        advice = f"{error.strerror or error}; make room, then run the same command to go on"
        raise EnvironmentFault(say("file", str(path), "a file that can be written", advice)) from None
