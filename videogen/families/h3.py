"""MiniMax-H3 before it is loaded: geometry, limits and cost, read from the folder's configs; imports no torch.

The arithmetic restates diffusers 0.42.1 (`modular_pipelines/minimax_h3/modular_pipeline.py`), which imports torch;
a test holds the two equal.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videogen.config import Recipe, Request
from videogen.errors import bad
from videogen.families.base import Estimate, Input, Resolved, open_input, read_json
from videogen.sampling import settle_sampling

FPS = 24
AUDIO_LATENTS_PER_SECOND = 40
MIN_SECONDS, MAX_SECONDS = 5.0, 15.0
DEFAULT_FRAMES = 124
DEFAULT_STEPS = 49
DEFAULT_SHIFT = 12.0  # of diffusers' MiniMaxH3Scheduler
MAX_IMAGES = 9
MIN_ASPECT, MAX_ASPECT = 1 / 4, 4.0


@dataclass(frozen=True, slots=True)
class H3Geometry:
    """The numbers of one H3 folder that a request is checked against. Lengths in pixels, frames or latents."""

    canvas_multiple: int
    canvas_short_edge: int
    canvas_max_pixels: int
    reference_short_edge: int
    frames_per_chunk: int
    latents_per_chunk: int
    min_frames: int
    hidden_size: int
    num_layers: int
    ffn_dim: int
    attention_dim: int
    default_steps: int
    video_shift: float
    audio_shift: float

    @property
    def max_frames(self) -> int:
        """The longest ladder length within 15 seconds: 345 for the released model."""
        whole = int(MAX_SECONDS * FPS)
        return whole - (whole - self.latents_per_chunk) % self.frames_per_chunk


def read_geometry(folder: Path, card: dict[str, Any]) -> H3Geometry:
    """Read the geometry from a folder's index and configs; `card` may shorten the shortest clip or the default steps."""
    index = read_json(folder, "modular_model_index.json")
    vae, dit = read_json(folder / "vae", "config.json"), read_json(folder / "transformer", "config.json")
    clip_length = int(vae["clip_length"])
    return H3Geometry(
        canvas_multiple=math.prod(vae["spatial_downsample_factors"]) * int(dit["patch_size"][2]),
        canvas_short_edge=int(index.get("canvas_short_edge", 768)),
        canvas_max_pixels=int(index.get("canvas_max_pixels", 768 * 1344)),
        reference_short_edge=int(index.get("reference_image_short_edge", 2048)),
        frames_per_chunk=clip_length,
        latents_per_chunk=math.ceil(clip_length / math.prod(vae["temporal_downsample_factors"])),
        min_frames=int(card.get("min_frames", MIN_SECONDS * FPS)),
        hidden_size=int(dit["hidden_size"]),
        num_layers=int(dit["num_layers"]),
        ffn_dim=int(dit["ffn_dim"]),
        attention_dim=int(dit["num_attention_heads"]) * int(dit["attention_head_dim"]),
        default_steps=int(card.get("default_steps", DEFAULT_STEPS)),
        video_shift=float(read_json(folder / "scheduler", "scheduler_config.json").get("shift", DEFAULT_SHIFT)),
        audio_shift=float(read_json(folder / "audio_scheduler", "scheduler_config.json").get("shift", DEFAULT_SHIFT)),
    )


def snap_frames(frames: int, geometry: H3Geometry) -> int:
    """The next count of the ladder `17 n + 5`, upwards."""
    return frames + (geometry.latents_per_chunk - frames) % geometry.frames_per_chunk


def latent_frames(frames: int, geometry: H3Geometry) -> int:
    """Latent frames of a ladder count: `5 n + 2`."""
    return (frames - geometry.latents_per_chunk) // geometry.frames_per_chunk * geometry.latents_per_chunk + 2


def canvas_for_aspect(width: float, height: float, geometry: H3Geometry) -> tuple[int, int]:
    """The (width, height) H3 gives an aspect ratio: short edge first, area capped, both rounded to the multiple."""
    ratio, multiple = width / height, geometry.canvas_multiple
    wide, high = geometry.canvas_short_edge * max(ratio, 1.0), geometry.canvas_short_edge / min(ratio, 1.0)
    if wide * high > geometry.canvas_max_pixels:
        scale = (geometry.canvas_max_pixels / (wide * high)) ** 0.5
        wide, high = wide * scale, high * scale
    return max(multiple, round(wide / multiple) * multiple), max(multiple, round(high / multiple) * multiple)


def _check_aspect(what: str, width: int, height: int) -> None:
    if not MIN_ASPECT <= width / height <= MAX_ASPECT:
        raise bad(what, f"{width}x{height}", "an aspect ratio from 1:4 to 4:1", "crop it, or choose another size")


@dataclass(frozen=True, slots=True)
class H3Family:
    """The H3 side of `Family` for one folder."""

    geometry: H3Geometry

    def resolve(self, request: Request, recipe: Recipe) -> Resolved:
        """Settle a request: workflow, canvas, ladder frames, forwards, pictures.

        Raises RequestError for whatever diffusers would leave to crash or to warn about.
        """
        if request.negative_prompt:
            advice = "drop the negative prompt, and say in the prompt what there should be"
            raise bad("negative prompt", request.negative_prompt, "none: guidance is distilled into MiniMax-H3, one forward a step", advice)
        if request.guidance:
            raise bad("guidance", request.guidance, "none: it is distilled into MiniMax-H3", "drop --guidance")
        inputs = self._inputs(request)
        notes: list[str] = []
        width, height = self._canvas(request, inputs, notes)
        frames = self._frames(request, notes)
        own_shifts = (self.geometry.video_shift, self.geometry.audio_shift)
        sampling = settle_sampling(request, recipe, default_steps=self.geometry.default_steps, own_shifts=own_shifts)
        return Resolved(
            workflow=request.workflow,
            prompt=request.prompt,
            width=width,
            height=height,
            frames=frames,
            fps=float(FPS),
            steps=sampling.steps,
            shifts=sampling.shifts,
            seed=request.seed,
            dtype=recipe.dtype,
            recipe=recipe.name,
            sigmas=sampling.sigmas,
            adapters=recipe.adapters.identity,
            inputs=inputs,
            notes=(*notes, *recipe.adapters.notes),
            expand=request.expand,
        )

    def estimate(self, resolved: Resolved) -> Estimate:
        """Rows and arithmetic of the denoising loop; text length is guessed at four characters a token."""
        g = self.geometry
        per_frame = (resolved.width // g.canvas_multiple) * (resolved.height // g.canvas_multiple)
        audio = 2 * round(resolved.frames / FPS * AUDIO_LATENTS_PER_SECOND)
        rows = len(resolved.prompt) // 4 + 1 + audio + per_frame * latent_frames(resolved.frames, g)
        for item in resolved.inputs:
            rows += per_frame * 2 if item.role != "reference" else 2 * self._reference_rows(item)
        linear = 2 * rows * (4 * g.hidden_size * g.attention_dim + 3 * g.hidden_size * g.ffn_dim) * g.num_layers
        attention = 4 * rows * rows * g.attention_dim * g.num_layers
        pixels = resolved.frames * resolved.width * resolved.height
        return Estimate(rows=rows, tflop=resolved.steps * (linear + attention) / 1e12, disk_bytes=pixels // 8 + 400_000)

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """As `canvas_for_aspect`."""
        return canvas_for_aspect(width, height, self.geometry)

    def lengths_s(self) -> tuple[float, float, float]:
        """The ends of the ladder, and the default between them."""
        shortest, longest = snap_frames(self.geometry.min_frames, self.geometry), self.geometry.max_frames
        return shortest / FPS, min(longest, max(shortest, DEFAULT_FRAMES)) / FPS, longest / FPS

    def _inputs(self, request: Request) -> tuple[Input, ...]:
        named = [("image", request.image), ("last_image", request.last_image), *(("reference", r) for r in request.references)]
        inputs = tuple(open_input(role, media) for role, media in named if media is not None)
        if len(request.references) > MAX_IMAGES:
            raise bad("references", len(request.references), f"at most {MAX_IMAGES} pictures", "leave some out")
        for item in inputs:
            if item.role == "reference":
                _check_aspect(f"reference {item.name}", item.width, item.height)
        return inputs

    def _canvas(self, request: Request, inputs: tuple[Input, ...], notes: list[str]) -> tuple[int, int]:
        multiple = self.geometry.canvas_multiple
        if request.size is None:
            frame = next((item for item in inputs if item.role != "reference"), None)
            if frame is None:
                return canvas_for_aspect(16, 9, self.geometry)
            _check_aspect(f"{frame.role} {frame.name}", frame.width, frame.height)
            return canvas_for_aspect(frame.width, frame.height, self.geometry)
        width, height = request.size
        _check_aspect("size", width, height)
        if width % multiple == 0 and height % multiple == 0:
            return width, height
        rounded = max(multiple, round(width / multiple) * multiple), max(multiple, round(height / multiple) * multiple)
        if not request.round_size:
            advice = f"use {rounded[0]}x{rounded[1]}, or --round-size to have it rounded"
            raise bad("size", f"{width}x{height}", f"both sides multiples of {multiple}", advice)
        _check_aspect("size", *rounded)
        notes.append(f"size {width}x{height} rounded to {rounded[0]}x{rounded[1]} (sides are multiples of {multiple})")
        return rounded

    def _frames(self, request: Request, notes: list[str]) -> int:
        g = self.geometry
        asked = request.frames
        if asked is None:
            asked = DEFAULT_FRAMES if request.seconds is None else round(request.seconds * FPS)
        frames = snap_frames(max(asked, 1), g)
        if frames > g.max_frames or frames < g.min_frames:
            shortest = snap_frames(g.min_frames, g)
            expected = f"{shortest} to {g.max_frames} frames ({shortest / FPS:.3f} to {g.max_frames / FPS:.3f} s at {FPS} fps)"
            got = f"{asked} frames ({asked / FPS:.3f} s)" + (f", which becomes {frames}" if frames != asked else "")
            raise bad("length", got, expected, "change --frames or --seconds")
        if frames != asked:
            notes.append(f"{asked} frames made {frames} ({frames / FPS:.3f} s): the video VAE decodes 17n+5 frames")
        return frames

    def _reference_rows(self, item: Input) -> int:
        scale, multiple = self.geometry.reference_short_edge / min(item.width, item.height), self.geometry.canvas_multiple
        return max(1, round(item.width * scale / multiple)) * max(1, round(item.height * scale / multiple))
