"""A rough picture of a clip while it is denoised: a linear map from latents to colours, fitted once per model to its own video VAE.

It only reads what the transformer was given and gave back, so the clip stays bit-identical; and it keeps its own time under a share
of the denoising time, by leaving previews out.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition
from PIL import Image

from videogen.families.base import Resolved
from videogen.families.h3 import latent_frames
from videogen.families.h3_pipeline import sigmas_of, transformer_of
from videogen.identity import hash_folder
from videogen.jobs.database import Job
from videogen.jobs.run import Renderer, write_json
from videogen.pipeline import Pipeline
from videogen.pocket.data import draw
from videogen.pocket.world import frame_times, render
from videogen.progress import Event, OnEvent, StopFlag
from videogen.result import Result
from videogen.serve.worker import CLIPS
from videogen.source import ModelSource

logger = logging.getLogger(__name__)

SHIPPED_MAPS = Path(__file__).parent / "previews"  # HASH.json, the hash of the VAE's folder
MAX_SHARE = 0.01  # of the denoising time
MAX_FRAMES, MAX_SIDE_PX, FRAME_MS = 16, 256, 160
FIRST_S = 0.03  # what the first one is taken to cost
FIT_CLIPS, FIT_FRAMES = 6, 22
FIT_SEED = 20_000


@dataclass(frozen=True, slots=True)
class ColourMap:
    """rgb = latents @ weights + bias, for normalised latents (..., C) and colours from 0 to 1; r2 is the share explained when fitted."""

    weights: torch.Tensor  # (C, 3)
    bias: torch.Tensor  # (3,)
    r2: float

    def colours(self, latents: torch.Tensor) -> torch.Tensor:
        """(..., C) to (..., 3), cut to 0 and 1."""
        weights, bias = self.weights.to(latents.device), self.bias.to(latents.device)
        return torch.addmm(bias, latents.float().flatten(0, -2), weights).clamp(0, 1).reshape(*latents.shape[:-1], 3)


def fit(pipe: Any) -> ColourMap:
    """Least squares from the latents of rendered scenes to their colours, by the pipeline's own VAE."""
    multiple = int(np.prod(pipe.vae.config.spatial_downsample_factors))
    height, width = 12 * multiple, 20 * multiple
    _, layout = draw(FIT_CLIPS, FIT_SEED)
    frames, _ = render(layout, frame_times(FIT_FRAMES), height, width)  # (N, F, H, W, 3) in 0 to 1
    sources, targets = [], []
    device = next(pipe.vae.parameters()).device
    for clip in frames:
        pixels = (clip.permute(3, 0, 1, 2)[None] * 255).round().to(torch.uint8).to(device)
        with torch.no_grad():
            latents = encode_vae_condition(pipe.vae, pixels, pipe.pixel_mean, pipe.pixel_std)[0]  # (C, T, h, w)
        chosen = torch.linspace(0, FIT_FRAMES - 1, latents.shape[1]).round().long()
        small = torch.nn.functional.adaptive_avg_pool2d(clip[chosen].permute(0, 3, 1, 2), latents.shape[2:])  # (T, 3, h, w)
        sources.append(latents.permute(1, 2, 3, 0).reshape(-1, latents.shape[0]))
        targets.append(small.permute(0, 2, 3, 1).reshape(-1, 3))
    a, b = torch.cat(sources).double(), torch.cat(targets).double()
    design = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
    solution = torch.linalg.lstsq(design, b).solution
    rest = ((design @ solution - b) ** 2).sum() / ((b - b.mean(0)) ** 2).sum()
    return ColourMap(solution[:-1].float(), solution[-1].float(), 1 - float(rest))


def kept(pipe: Any, source: ModelSource, folder: Path) -> ColourMap:
    """The map of a model's VAE: the one shipped for it, the one kept in the folder, or one fitted now and kept there."""
    name = f"{hash_folder(source.folder / 'vae', without='-')[:32]}{'-random' if source.weights == 'random' else ''}.json"
    path = folder / name
    for each in (SHIPPED_MAPS / name, path):
        if each.is_file():
            found = json.loads(each.read_text(encoding="utf-8"))
            return ColourMap(torch.tensor(found["weights"]), torch.tensor(found["bias"]), float(found["r2"]))
    made = fit(pipe)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {"weights": made.weights.tolist(), "bias": made.bias.tolist(), "r2": made.r2})
    return made


@dataclass(slots=True)
class Lens:
    """Watches one transformer for the length of one render and writes a small animated WebP now and then."""

    colour_map: ColourMap
    path: Path
    every: int
    grid: tuple[int, int, int]  # latent frames, rows of patches, columns of patches
    patch: tuple[int, int, int]
    sigmas: list[float]
    step: int = 0
    spent_s: float = 0.0
    written: int = 0
    _began: float = 0.0
    _thread: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def see(self, _module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook: keep the estimate of the clean latents when a preview is due and paid for."""
        now = time.perf_counter()
        self._began = self._began or now
        index, self.step = self.step, self.step + 1
        is_idle = self._thread is None or not self._thread.is_alive()
        if self.step % self.every or index >= len(self.sigmas) or not is_idle or self._cost() > MAX_SHARE * (now - self._began):
            return
        rows = self.grid[0] * self.grid[1] * self.grid[2]
        clean = kwargs["hidden_states"][0, -rows:].float() + self.sigmas[index] * output[0][0, -rows:].float()
        pictures = (self.colour_map.colours(self._unpacked(clean)) * 255).round().to(torch.uint8).cpu().numpy()
        self._spend(time.perf_counter() - now)
        self._thread = threading.Thread(target=self._write, args=(pictures,), daemon=True)
        self._thread.start()

    def _cost(self) -> float:
        """What one more would bring the total to."""
        return self.spent_s * (self.written + 1) / self.written if self.written else FIRST_S

    def _spend(self, seconds: float) -> None:
        with self._lock:
            self.spent_s += seconds

    def _unpacked(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the packed sequence as (T, h, w, C), at most MAX_FRAMES of them."""
        (t, h, w), (pt, ph, pw) = self.grid, self.patch
        chosen = torch.linspace(0, t - 1, min(t, MAX_FRAMES)).round().long().to(rows.device)
        cells = rows.reshape(t, h, w, -1, pt, ph, pw)[chosen]  # (T, h, w, C, pt, ph, pw)
        return cells[:, :, :, :, 0].permute(0, 1, 4, 2, 5, 3).reshape(len(chosen), h * ph, w * pw, -1)

    def _write(self, pictures: Any) -> None:
        began = time.thread_time()
        height, width = pictures.shape[1:3]
        scale = max(1, MAX_SIDE_PX // max(height, width))
        frames = [Image.fromarray(each).resize((width * scale, height * scale), Image.Resampling.BILINEAR) for each in pictures]
        part = self.path.with_suffix(".part")
        try:
            frames[0].save(part, format="WEBP", save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0, quality=60, method=0)
            part.replace(self.path)
        except OSError:  # a preview is not worth a clip
            logger.debug("no preview written", exc_info=True)
        self.written += 1
        self._spend(time.thread_time() - began)

    def close(self) -> None:
        """Wait for the last one."""
        if self._thread is not None:
            self._thread.join(5)


@contextmanager
def watching(transformer: Any, lens: Lens) -> Iterator[Lens]:
    """The lens on the transformer for the length of the scope."""
    handle = transformer.register_forward_hook(lens.see, with_kwargs=True)
    try:
        yield lens
    finally:
        handle.remove()
        lens.close()


@dataclass(slots=True)
class Previewing:
    """A pipeline that writes previews of what it renders to `path`."""

    pipeline: Pipeline
    path: Path
    folder: Path
    every: int

    def render(self, request: Resolved, *, seed: int | None, on_event: OnEvent, stop: StopFlag | None) -> Result:
        """As the pipeline's own, with a lens on its transformer."""
        on_event(Event("load"))
        pipe = self.pipeline.load(request.workflow)
        colour_map = kept(pipe, self.pipeline.source, self.folder)
        patch = tuple(int(side) for side in pipe.patch_size)
        spatial = int(np.prod(pipe.vae.config.spatial_downsample_factors))
        length = latent_frames(request.frames, self.pipeline.family.geometry)
        grid = (length // patch[0], request.height // spatial // patch[1], request.width // spatial // patch[2])
        lens = Lens(colour_map, self.path, self.every, grid, (patch[0], patch[1], patch[2]), [])

        def hear(event: Event) -> None:
            if event.phase == "denoise" and event.step == 0:
                lens.sigmas = sigmas_of(pipe)["video"][:-1]  # known once the schedule is set
            on_event(event)

        with watching(transformer_of(pipe), lens):
            return self.pipeline.render(request, seed=seed, on_event=hear, stop=stop)


def previews(every: int) -> Callable[[Pipeline, Job, Path], Renderer]:
    """What wraps a job's pipeline so that its previews lie beside the clips while it is rendered; Wan has none."""

    def around(pipeline: Pipeline, job: Job, root: Path) -> Renderer:
        if pipeline.source.is_wan:
            return pipeline
        clips = root / CLIPS
        clips.mkdir(exist_ok=True)
        return Previewing(pipeline, clips / f"{job.id}.preview.webp", root / "previews", every)

    return around
