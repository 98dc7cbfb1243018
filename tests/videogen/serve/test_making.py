"""A worker renders real jobs through the project's own pipeline; a preview changes no bit of them and stays cheap."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.videogen.serve.fakes import services_in
from videogen.jobs.claims import Claims, group_lock
from videogen.jobs.database import CANCELLED, COMPLETED, FAILED, RUNNING, Job
from videogen.pipeline import Pipeline
from videogen.progress import Event, StopFlag
from videogen.serve import preview
from videogen.serve.making import PipelineMaker
from videogen.serve.preview import ColourMap, Lens, Previewing
from videogen.serve.worker import Made, Worker, tidy

TINY = {"prompt": "a red circle", "size": "96x64", "frames": 22, "steps": 2, "seed": 3, "recipe": "plain"}


def test_a_job_becomes_a_checked_clip_and_a_bad_one_a_message(tiny_model: Path, tmp_path: Path) -> None:
    services = services_in(tmp_path)
    store, desk = services.store, services.desk
    good, _ = desk.submit("me", TINY)
    other, _ = desk.submit("me", TINY | {"size": "64x96"})
    twin, _ = desk.submit("me", TINY)
    gone = tmp_path / "uploads" / "gone.png"
    bad, _ = store.submit("me", TINY | {"image": str(gone)}, good.summary)
    maker = PipelineMaker(str(tiny_model), "cpu", tmp_path, offline=True)
    assert Worker(tmp_path, "0", maker, retention_s=10.0, stop=StopFlag()).run(until_idle=True) == 4
    first, second, third = (store.get(job.id) for job in (good, twin, bad))
    assert first is not None and second is not None and third is not None
    assert first.state == COMPLETED and first.record["resolved"]["seed"] == 3 and first.bytes > 0 and first.step == first.total == 2
    between = store.get(other.id)
    assert between is not None and between.record["output"]["size"] == "64x96"  # nothing of another size stays behind
    assert first.record["output"]["frames_sha256"] == second.record["output"]["frames_sha256"]
    assert third.state == FAILED and third.error_code == "invalid_value" and str(tmp_path) not in third.error
    kept = sorted(path.suffix for path in (tmp_path / "clips").glob(f"{good.id}*"))
    assert kept == [".jpg", ".json", ".mp4"] and not list((tmp_path / "work").iterdir())
    assert json.loads((tmp_path / "clips" / f"{good.id}.json").read_text())["output"]["sha256"] == first.record["output"]["sha256"]


class Stopping:
    """A maker whose process is told to stop, or whose job is cancelled, at its first step."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def make(self, job: Job, folder: Path, on_event: Any, stop: StopFlag) -> Made:
        """As `Maker` says."""
        self.act(job)
        on_event(Event("denoise", 1, 4))
        stop.check()
        raise AssertionError("it should have stopped")


def test_a_stopping_worker_gives_its_job_back_and_a_cancelled_job_ends(tmp_path: Path) -> None:
    services, stop = services_in(tmp_path), StopFlag()
    store = services.store
    job, _ = services.desk.submit("me", TINY)
    with group_lock(tmp_path, "0", wait_s=1):
        Worker(tmp_path, "0", Stopping(lambda _job: stop.set()), retention_s=10.0, stop=stop).run()
    given = store.get(job.id)
    assert given is not None and (given.state, given.worker, given.attempt) == (RUNNING, "", 0)
    Worker(tmp_path, "1", Stopping(lambda each: store.cancel(each.id)), retention_s=10.0, stop=StopFlag()).run(until_idle=True)
    ended = store.get(job.id)
    assert ended is not None and (ended.state, ended.error) == (CANCELLED, "stopped between steps, as asked")
    assert Claims(store.database, "2", retention_s=1.0).claim() is None


def test_previews_change_no_bit_and_stay_within_their_share(
    tiny_pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = services_in(tmp_path).desk.family.resolve(_request(), tiny_pipeline.recipe)
    plain = tiny_pipeline.render(resolved, seed=3)
    path = tmp_path / "clips" / "x.preview.webp"
    path.parent.mkdir(exist_ok=True)
    previewing = Previewing(tiny_pipeline, path, tmp_path / "previews", 1)
    seen = previewing.render(resolved, seed=3, on_event=lambda _event: None, stop=None)
    assert not path.exists(), "a loop of milliseconds has no time for a preview"
    monkeypatch.setattr(preview, "MAX_SHARE", 1e9)
    seen = previewing.render(resolved, seed=3, on_event=lambda _event: None, stop=None)
    assert (seen.frames == plain.frames).all() and (seen.audio == plain.audio).all() and seen.record["sigmas"] == plain.record["sigmas"]
    with Image.open(path) as image:
        assert image.size[0] <= 256 and image.size[0] * 64 == image.size[1] * 96 and getattr(image, "n_frames", 1) >= 1


def test_tidying_touches_only_names_of_ours_that_no_job_knows(tmp_path: Path) -> None:
    job, _ = services_in(tmp_path).desk.submit("me", TINY)
    mine, used, stray = tmp_path / "clips" / "holiday.mp4", tmp_path / "clips" / f"{job.id}.mp4", tmp_path / "clips" / "video_0.mp4"
    lost, kept = tmp_path / "uploads" / f"{'a' * 32}.png", tmp_path / "uploads" / "photo.png"
    for path in (mine, used, stray, lost, kept):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        os.utime(path, (0, 0))
    tidy(tmp_path)
    assert [path.exists() for path in (mine, used, stray, lost, kept)] == [True, True, False, False, True]


def _request() -> Any:
    from videogen.config import Request

    return Request(prompt="a red circle", size=(96, 64), frames=22, steps=2)


def test_a_lens_unpacks_rows_as_the_decoder_does() -> None:
    t, h, w, c = 2, 4, 6, 3
    latents = torch.arange(t * h * w * c, dtype=torch.float32).reshape(c, t, h, w)
    cells = latents.reshape(c, t, 1, h // 2, 2, w // 2, 2).permute(1, 3, 5, 0, 2, 4, 6)  # t h w | c pt ph pw
    rows = cells.reshape(t * (h // 2) * (w // 2), -1)
    lens = Lens(ColourMap(torch.eye(3), torch.zeros(3), 1.0), Path("x"), 1, (t, h // 2, w // 2), (1, 2, 2), [1.0])
    assert torch.equal(lens._unpacked(rows), latents.permute(1, 2, 3, 0))
    assert torch.equal(lens.colour_map.colours(torch.tensor([[0.5, 2.0, -1.0]])), torch.tensor([[0.5, 1.0, 0.0]]))


def test_a_lens_shows_the_estimate_of_the_clean_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Lens, "_write", lambda _self, pictures: seen.append(pictures))
    monkeypatch.setattr(preview, "MAX_SHARE", 1e9)
    lens = Lens(ColourMap(torch.eye(3), torch.zeros(3), 1.0), Path("x"), 2, (1, 1, 1), (1, 1, 1), [0.9, 0.5])
    lens._began = 1e-9
    clean, velocity = torch.tensor([0.2, 0.4, 0.6]), torch.tensor([1.0, -2.0, 3.0])
    for sigma in lens.sigmas:
        hidden = torch.stack([torch.full((3,), 9.0), clean - sigma * velocity])[None]  # a condition row stands first
        lens.see(None, (), {"hidden_states": hidden}, (torch.stack([velocity * 0, velocity])[None],))
    lens.close()
    assert [picture.tolist() for picture in seen] == [[[[[51, 102, 153]]]]]
