"""Wan 2.1 and 2.2 before they are loaded: geometry, limits and cost, read from a diffusers folder's configs; imports no torch.

One folder is text to video, image to video, or both (TI2V 5B); it has one expert or two, the second below `boundary`.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from videogen.config import Recipe, Request
from videogen.errors import bad
from videogen.families.base import Estimate, Input, Resolved, open_input, read_json
from videogen.identity import hash_text
from videogen.sampling import settle_sampling

INDEX = "model_index.json"
PIPELINES = ("WanPipeline", "WanImageToVideoPipeline")
T2V, I2V = "t2v", "i2v"
MAX_TEXT_TOKENS = 512  # what the pipelines pad every prompt to
DEFAULT_STEPS = 50  # of diffusers' pipelines


@dataclass(frozen=True, slots=True)
class WanGeometry:
    """The numbers of one Wan folder that a request is checked against. Lengths in pixels, frames or latents."""

    takes_text: bool
    takes_image: bool
    takes_last_image: bool
    multiple: int
    frames_per_latent: int
    max_positions: int
    boundary: float | None
    fps: float
    default_size: tuple[int, int]
    default_frames: int
    default_steps: int
    default_guidance: tuple[float, float]
    shift: float
    num_layers: int
    hidden_size: int
    ffn_dim: int

    @property
    def has_two_experts(self) -> bool:
        """Whether a second transformer takes over below the boundary."""
        return self.boundary is not None


@dataclass(frozen=True, slots=True)
class WanResolved(Resolved):
    """A settled Wan request: what guides it away, the guidance scales of both experts, and where the second takes over."""

    negative_prompt: str = ""
    guidance: tuple[float, float] = (1.0, 1.0)
    boundary: float | None = None

    @property
    def stratum(self) -> str:
        """Guidance, what it guides away from, and where the second expert takes over: each moves the residuals."""
        if not self.is_guided:
            return f"{self.workflow}, boundary {self.boundary}"
        scales = "/".join(f"{scale:g}" for scale in self.guidance)
        return f"{self.workflow}, boundary {self.boundary}, guidance {scales} from {hash_text(self.negative_prompt)[:12]}"

    @property
    def cache_code(self) -> tuple[str, ...]:
        """Streams and experts."""
        return ("videogen.families.wan_cache",)

    @property
    def is_guided(self) -> bool:
        """Whether a second forward a step is made; diffusers asks the first scale alone."""
        return self.guidance[0] > 1


def has_component(index: dict[str, Any], name: str) -> bool:
    """Whether a `model_index.json` names a component that is not left out (`[null, null]`)."""
    return isinstance(index.get(name), list) and index[name][0] is not None


def read_geometry(folder: Path, card: dict[str, Any]) -> WanGeometry:
    """Read the geometry from a folder's index and configs; `card` may change the defaults `fps`, `steps`, `size`, `frames`, `guidance`.

    Raises RequestError for a folder whose parts contradict each other.
    """
    index = read_json(folder, INDEX)
    vae, dit = read_json(folder / "vae", "config.json"), read_json(folder / "transformer", "config.json")
    scheduler = read_json(folder / "scheduler", "scheduler_config.json")
    is_5b, boundary = bool(index.get("expand_timesteps")), index.get("boundary_ratio")
    if (boundary is not None) != has_component(index, "transformer_2"):
        raise bad(f"model folder {folder}", f"boundary_ratio {boundary}", "one with two experts, none with one", "restore model_index.json")
    is_i2v = dit["in_channels"] > dit["out_channels"]
    scales = ((3.5, 3.5) if is_i2v else (4.0, 3.0)) if boundary is not None else (5.0, 5.0)
    width, height = card.get("size", (1280, 704) if is_5b else (832, 480))
    return WanGeometry(
        takes_text=not is_i2v,
        takes_image=is_i2v or is_5b,
        takes_last_image=is_i2v and (dit.get("image_dim") is None or dit.get("pos_embed_seq_len") is not None),
        multiple=int(vae.get("scale_factor_spatial", 8)) * int(dit["patch_size"][2]),
        frames_per_latent=int(vae.get("scale_factor_temporal", 4)),
        max_positions=int(dit.get("rope_max_seq_len", 1024)),
        boundary=None if boundary is None else float(boundary),
        fps=float(card.get("fps", 24 if is_5b else 16)),
        default_size=(int(width), int(height)),
        default_frames=int(card.get("frames", 121 if is_5b else 81)),
        default_steps=int(card.get("default_steps", DEFAULT_STEPS)),
        default_guidance=tuple(card.get("guidance", scales)),
        shift=float(scheduler.get("flow_shift", scheduler.get("shift", 1.0))),
        num_layers=int(dit["num_layers"]),
        hidden_size=int(dit["num_attention_heads"]) * int(dit["attention_head_dim"]),
        ffn_dim=int(dit["ffn_dim"]),
    )


def snap_frames(frames: int, geometry: WanGeometry) -> int:
    """The next count of the ladder `4 n + 1`, upwards."""
    return frames + (1 - frames) % geometry.frames_per_latent


def size_for_aspect(width: int, height: int, geometry: WanGeometry) -> tuple[int, int]:
    """(width, height) of a picture's aspect with at most the default area, both sides rounded down to the multiple."""
    area, multiple = math.prod(geometry.default_size), geometry.multiple
    wide, high = math.sqrt(area * width / height), math.sqrt(area * height / width)
    return max(multiple, int(wide) // multiple * multiple), max(multiple, int(high) // multiple * multiple)


@dataclass(frozen=True, slots=True)
class WanFamily:
    """The Wan side of `Family` for one folder."""

    geometry: WanGeometry

    @property
    def workflows(self) -> tuple[str, ...]:
        """What the folder can do."""
        return (T2V,) * self.geometry.takes_text + (I2V,) * self.geometry.takes_image

    def resolve(self, request: Request, recipe: Recipe) -> WanResolved:
        """Settle a request. Raises RequestError for whatever diffusers would leave to crash, to round or to warn about."""
        g, notes = self.geometry, list[str]()
        inputs = self._inputs(request)
        width, height = self._size(request, inputs, notes)
        frames = self._frames(request, notes)
        sampling = settle_sampling(request, recipe, default_steps=g.default_steps, own_shifts=(g.shift, g.shift), has_sound=False)
        is_few_step = recipe.adapters.terms.forwards is not None and request.guidance is None
        guidance = (1.0, 1.0) if is_few_step else self._guidance(request)
        if is_few_step:
            notes.append("guidance 1: adapters with a number of forwards have guidance distilled in; --guidance asks for another")
        if request.negative_prompt and guidance[0] <= 1:
            raise bad("negative prompt", f"guidance {guidance[0]:g}", "guidance above 1", "drop the negative prompt, or raise --guidance")
        return WanResolved(
            workflow=I2V if inputs else T2V,
            prompt=request.prompt,
            width=width,
            height=height,
            frames=frames,
            fps=g.fps,
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
            negative_prompt=request.negative_prompt,
            guidance=guidance,
            boundary=g.boundary,
        )

    def estimate(self, resolved: Resolved) -> Estimate:
        """Rows and arithmetic of the denoising loop: self-attention, cross-attention to 512 text rows, feed-forward."""
        g, is_guided = self.geometry, isinstance(resolved, WanResolved) and resolved.is_guided
        rows = resolved.width // g.multiple * (resolved.height // g.multiple) * self._latents(resolved.frames)
        linear = 2 * rows * (6 * g.hidden_size**2 + 2 * g.hidden_size * g.ffn_dim) * g.num_layers
        attention = 4 * rows * (rows + MAX_TEXT_TOKENS) * g.hidden_size * g.num_layers
        pixels = resolved.frames * resolved.width * resolved.height
        tflop = (1 + is_guided) * resolved.steps * (linear + attention) / 1e12
        return Estimate(rows=rows, tflop=tflop, disk_bytes=pixels // 8 + 100_000)

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """As `size_for_aspect`."""
        return size_for_aspect(width, height, self.geometry)

    def lengths_s(self) -> tuple[float, float, float]:
        """One step of the ladder, the trained length, and four times that: longer clips are legal and seldom good."""
        g = self.geometry
        longest = min(4 * g.default_frames, (g.max_positions - 1) * g.frames_per_latent + 1)
        return (g.frames_per_latent + 1) / g.fps, g.default_frames / g.fps, longest / g.fps

    def _latents(self, frames: int) -> int:
        return (frames - 1) // self.geometry.frames_per_latent + 1

    def _inputs(self, request: Request) -> tuple[Input, ...]:
        g = self.geometry
        if request.references:
            raise bad("references", len(request.references), "none: Wan has no reference workflow here", "use --image, or MiniMax-H3")
        if request.last_image is not None and (request.image is None or not g.takes_last_image):
            raise bad("last_image", str(request.last_image), "an image too, and a model trained for both", "drop --last-image")
        if request.image is not None and not g.takes_image:
            raise bad("image", str(request.image), "none: this folder is text to video", "use an image-to-video folder")
        if request.image is None and not g.takes_text:
            raise bad("image", None, "a first frame: this folder is image to video", "add --image")
        named = (("image", request.image), ("last_image", request.last_image))
        return tuple(open_input(role, media) for role, media in named if media is not None)

    def _guidance(self, request: Request) -> tuple[float, float]:
        scales = request.guidance or self.geometry.default_guidance
        if len(scales) == 2 and not self.geometry.has_two_experts and scales[0] != scales[1]:
            raise bad("guidance", scales, "one scale: this model has one expert", "pass one value")
        first, second = scales[0], scales[-1]
        if first <= 1 < second:
            raise bad("guidance", scales, "a first scale above 1 where the second is", "guidance is on for both experts or for none")
        return first, second

    def _size(self, request: Request, inputs: tuple[Input, ...], notes: list[str]) -> tuple[int, int]:
        g = self.geometry
        if request.size is None:
            return size_for_aspect(inputs[0].width, inputs[0].height, g) if inputs else g.default_size
        width, height = request.size
        if width % g.multiple == 0 and height % g.multiple == 0:
            size = width, height
        else:
            rounded = [max(g.multiple, round(side / g.multiple) * g.multiple) for side in request.size]
            size = rounded[0], rounded[1]
            if not request.round_size:
                advice = f"use {size[0]}x{size[1]}, or --round-size to have it rounded"
                raise bad("size", f"{width}x{height}", f"both sides multiples of {g.multiple}", advice)
            notes.append(f"size {width}x{height} rounded to {size[0]}x{size[1]} (sides are multiples of {g.multiple})")
        if max(size) // g.multiple > g.max_positions:
            raise bad("size", f"{size[0]}x{size[1]}", f"sides of at most {g.max_positions * g.multiple}", "choose a smaller size")
        return size

    def _frames(self, request: Request, notes: list[str]) -> int:
        g, asked = self.geometry, request.frames
        if asked is None:
            asked = g.default_frames if request.seconds is None else max(1, round(request.seconds * g.fps))
        frames = snap_frames(asked, g)
        if self._latents(frames) > g.max_positions:
            most = (g.max_positions - 1) * g.frames_per_latent + 1
            raise bad("length", f"{asked} frames", f"at most {most}", "change --frames or --seconds")
        if frames != asked:
            notes.append(f"{asked} frames made {frames} ({frames / g.fps:.3f} s): the video VAE decodes {g.frames_per_latent}n+1 frames")
        return frames
