"""Training material for the transformer, encoded once and kept on the device: latents, anchors, sounds, captions in several words."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from transformers import Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from videogen.pocket import captions, data, sizes, world
from videogen.pocket.captions import PANS, PITCHES, SILENT, Scene
from videogen.pocket.fast_vae import encode_window, to_vae
from videogen.pocket.packed import patchify
from videogen.pocket.shapes import parts, unflatten
from videogen.pocket.train_text import features_during, live_language

REFERENCE = sizes.CANVAS["reference_image_short_edge"]
Canvas = tuple[int, int]  # height and width in pixels
AUDIO_LATENTS = 207
VISION_START, VISION_END, IMAGE_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
KINDS = ("t", "f", "l", "b")  # text; first, last, both frames; r is a reference picture
_KIND_SHARES = (0.75, 0.125, 0.05, 0.075)


@dataclass
class Bucket:
    """Requests of one kind and text length; index tensors point into the cache."""

    kind: str
    tags: list[int]
    clip: torch.Tensor  # (n,)
    sound: torch.Tensor  # (n,)
    text: torch.Tensor  # (n, L, text_dim)
    scenes: list[Scene]
    canvas: Canvas = sizes.SMALL


class Models:
    """The frozen encoders of a pocket folder."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device, self.folder = device, folder
        self.vae: Any = AutoencoderKLMiniMaxH3.from_pretrained(folder / "vae", torch_dtype=torch.float32).to(device).eval()
        self.text: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32).to(device).eval()
        self.language = live_language(self.text)
        self.processor: Any = Qwen3VLProcessor.from_pretrained(folder / "processor")
        self.mean, self.std = (self._channels(getattr(self.vae.config, f"latents_{k}")) for k in ("mean", "std"))

    @cached_property
    def audio(self) -> Any:
        """The audio VAE, loaded when first needed, so that clips can be encoded while it is still training."""
        vae: Any = AutoencoderKLMiniMaxH3Audio.from_pretrained(self.folder / "audio_vae", torch_dtype=torch.float32)
        return vae.to(self.device).eval()

    @cached_property
    def audio_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation of every audio latent channel."""
        return self._channels(self.audio.config.latents_mean), self._channels(self.audio.config.latents_std)

    def _channels(self, values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    @torch.no_grad()
    def rows_of(self, frames: torch.Tensor, autocast: torch.dtype | None = None) -> torch.Tensor:
        """Normalised, packed latent rows (B, T' rows, 4 C) of uint8 frames (B, T, H, W, 3)."""
        pixels = to_vae(frames.float() / 255).movedim(-1, 2)
        latents = encode_window(self.vae, pixels, autocast=autocast).float().chunk(2, dim=2)[0]
        latents = (latents.half().float() - self.mean[:, None, None]) / self.std[:, None, None]
        return patchify(latents.transpose(1, 2))

    @torch.no_grad()
    def sound_rows(self, samples: torch.Tensor) -> torch.Tensor:
        """Normalised audio latents (B, 2, T, C) of stereo samples (B, 2, N)."""
        latents = self.audio.encode(samples.flatten(0, 1)[:, None]).latent_dist.mode().transpose(1, 2)
        mean, std = self.audio_scale
        return unflatten((latents - mean) / std, 0, samples.shape[:2])

    def pixel_values(self, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The vision tower's patches (B, n, d) and grid (3,) of uint8 pictures (B, H, W, 3)."""
        seen = self.processor.image_processor(images=list(frames.movedim(-1, 1)), return_tensors="pt")
        return seen["pixel_values"].view(len(frames), -1, seen["pixel_values"].shape[-1]), seen["image_grid_thw"][0]

    @torch.no_grad()
    def features(self, ids: torch.Tensor, pixels: torch.Tensor | None, grid: torch.Tensor | None) -> torch.Tensor:
        """hidden_states[50] of equal-length presentations (B, L); `pixels` (B, pictures, n, d)."""
        ids = ids.to(self.device)
        kinds = torch.tensor(self.processor.create_mm_token_type_ids(ids[:1].tolist()), device=self.device)
        extra: dict[str, Any] = {}
        grids = None
        if pixels is not None and grid is not None:
            extra["pixel_values"] = pixels.flatten(0, 2).to(self.device)
            grids = grid[None].expand(pixels.shape[1], -1).to(self.device)
            extra["image_grid_thw"] = grids.repeat(len(ids), 1)
        # every row has the same shape, so its positions are worked out once
        where, _ = self.text.model.get_rope_index(ids[:1], mm_token_type_ids=kinds, image_grid_thw=grids)
        where = where.expand(-1, len(ids), -1)
        kinds = kinds.expand(len(ids), -1)
        return features_during(
            self.language,
            lambda: self.text.model(input_ids=ids, position_ids=where, mm_token_type_ids=kinds, use_cache=False, **extra),
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """A request from outside: its kind (t, f, l, b or r), words, scene and where the scene's objects are."""

    kind: str
    prompt: str
    scene: Scene
    world_seed: int


class Cache:
    """Clips, sounds and captioned requests of one set, on the models' device."""

    def __init__(
        self,
        models: Models,
        clips: int,
        *,
        seed: int,
        held_out: bool,
        paraphrases: int,
        full_only: bool = False,
        sounds_each: int = 64,
        num_frames: int = 124,
        canvas: Canvas = sizes.SMALL,
        audio_ready: Callable[[], None] | None = None,
    ) -> None:
        self.models, self.canvas = models, canvas
        plain = clips * 3 // 4
        scenes, layout = self._sorted(*data.draw(plain, seed, held_out=held_out))
        badge_scenes, badge_layout = data.draw(clips - plain, seed + 1, held_out=held_out, badge=True)
        self.scenes, self.plain, self.layout, self.badges = scenes + badge_scenes, plain, layout, badge_layout
        self._encode([layout, badge_layout], clips - plain, num_frames)
        if audio_ready is not None:
            audio_ready()
        self._encode_sounds(seed, sounds_each)
        self.buckets = self._requests(random.Random(seed), paraphrases, full_only)

    @classmethod
    def of(cls, models: Models, asked: Sequence[Asked], *, badge: bool, canvas: Canvas = sizes.SMALL) -> "Cache":
        """A set for given requests; their clips serve as the given pictures and as the truth to compare with."""
        cache = cls.__new__(cls)
        layout = world.plan([a.scene for a in asked], [a.world_seed for a in asked], badge=badge)
        none = layout[:0]
        cache.canvas = canvas
        cache.models, cache.scenes, cache.plain = models, [a.scene for a in asked], 0 if badge else len(asked)
        cache.layout, cache.badges = (none, layout) if badge else (layout, none)
        cache._encode([layout], len(asked) if badge else 0, world.FRAMES)
        cache._encode_sounds(0, 1)
        held: dict[tuple[str, int], list[tuple[int, int, list[int], Scene]]] = defaultdict(list)
        for clip, a in enumerate(asked):
            ids = cache._present(a.kind, a.prompt)
            held[a.kind, len(ids)].append((clip, 0, ids, a.scene))
        cache.buckets = [cache._bucket(kind, entries) for (kind, _), entries in sorted(held.items())]
        return cache

    @staticmethod
    def _sorted(scenes: list[Scene], layout: world.Layout) -> tuple[list[Scene], world.Layout]:
        order = sorted(range(len(scenes)), key=lambda i: (scenes[i].shape, scenes[i].count))
        return [scenes[i] for i in order], layout[torch.tensor(order)]

    def _encode(self, layouts: list[world.Layout], badges: int, num_frames: int) -> None:
        device = self.models.device
        dtype = torch.bfloat16 if device.type == "cuda" else None
        ends = [n for n in LAST_FRAMES if n <= num_frames]
        most = CLIP_BATCH if device.type == "cuda" else 2
        batch = max(1, most * sizes.HEIGHT * sizes.WIDTH // (self.canvas[0] * self.canvas[1]))
        rows, firsts = [], []
        lasts: dict[int, list[torch.Tensor]] = {n: [] for n in ends}
        pixels: list[torch.Tensor] = []
        for layout in layouts:
            for begin in range(0, len(layout), batch):
                part = layout[begin : begin + batch].to(device)
                frames = data.quantise(world.render(part, world.frame_times(num_frames), *self.canvas)[0])
                rows.append(self.models.rows_of(frames, dtype).to(torch.bfloat16))
                firsts.append(self.models.rows_of(frames[:, :1]).half())
                for number in ends:
                    lasts[number].append(self.models.rows_of(frames[:, number - 1 : number]).half())
                pixels.append(self.models.pixel_values(frames[:, [0, -1]].flatten(0, 1))[0].half())
        self.rows, self.first = torch.cat(rows), torch.cat(firsts)
        self.last = {number: torch.cat(parts) for number, parts in lasts.items()}
        self.pixels = unflatten(torch.cat(pixels), 0, (len(self.scenes), 2))
        if not badges:
            return
        pictures = world.picture_of(self.badges, range(badges)).to(device)
        seen = data.quantise(world.render(pictures, torch.zeros(1), REFERENCE, REFERENCE)[0])
        self.pictures = seen[:, 0]
        self.reference = self.models.rows_of(seen).half()
        self.reference_pixels = self.models.pixel_values(seen[:, 0])[0]

    def _encode_sounds(self, seed: int, sounds_each: int) -> None:
        """A pool of stereo sounds of every pitch and side, several phases and strengths each."""
        base = self.scenes[0]
        self.sounds = [
            (pitch, pan)
            for pitch in range(len(PITCHES))
            for pan in (range(len(PANS)) if pitch != SILENT else (world.centre_pan(),))
            for _ in range(sounds_each)
        ]
        scenes = [replace(base, pitch=pitch, pan=pan) for pitch, pan in self.sounds]
        layout = world.plan(scenes, data.clip_seeds(seed + 5, len(scenes))).to(self.models.device)
        samples = world.sound(layout, AUDIO_LATENTS, sizes.AUDIO_RATE_HZ)
        self.audio = torch.cat([self.models.sound_rows(part) for part in parts(samples, 64)])

    def _requests(self, rng: random.Random, paraphrases: int, full_only: bool) -> list[Bucket]:
        by_sound = defaultdict(list)
        for index, key in enumerate(self.sounds):
            by_sound[key].append(index)
        held: dict[tuple[str, int], list[tuple[int, int, list[int], Scene]]] = defaultdict(list)
        for clip, scene in enumerate(self.scenes):
            for _ in range(paraphrases):
                sound = rng.randrange(len(self.sounds)) if full_only or rng.random() > 0.1 else rng.choice(by_sound[SILENT, 1])
                pitch, pan = self.sounds[sound]
                told = replace(scene, pitch=pitch, pan=pan)
                kind = "r" if clip >= self.plain else rng.choices(KINDS, _KIND_SHARES)[0]
                text = _caption(kind, rng, full_only)(told, rng)
                held[kind, len(ids := self._present(kind, text))].append((clip, sound, ids, told))
        return [self._bucket(kind, entries) for (kind, _), entries in sorted(held.items())]

    def _present(self, kind: str, prompt: str) -> list[int]:
        """Token ids of a whole presentation, pictures first, as the pipeline writes it."""
        tokenizer = self.models.processor.tokenizer
        out: list[int] = []
        for index in range({"t": 0, "b": 2}.get(kind, 1)):
            tokens = self.reference_pixels.shape[1] // 4 if kind == "r" else self.pixels.shape[2] // 4
            out += tokenizer(f"<Picture {index + 1}>: ", add_special_tokens=False)["input_ids"]
            out += tokenizer.convert_tokens_to_ids([VISION_START] + [IMAGE_PAD] * tokens + [VISION_END])
        return out + list(tokenizer(prompt, add_special_tokens=False)["input_ids"])

    def _bucket(self, kind: str, entries: list[tuple[int, int, list[int], Scene]]) -> Bucket:
        clip = torch.tensor([e[0] for e in entries])
        ids = torch.tensor([e[2] for e in entries])
        features = []
        for begin in range(0, len(entries), 512):
            part = clip[begin : begin + 512]
            pixels, grid = self._pixels(kind, part)
            features.append(self.models.features(ids[begin : begin + 512], pixels, grid).to(torch.bfloat16))
        device = self.models.device
        vision = set(self.models.processor.tokenizer.convert_tokens_to_ids([VISION_START, VISION_END, IMAGE_PAD]))
        tags = [0 if token in vision else 1 for token in entries[0][2]]
        sound = torch.tensor([e[1] for e in entries])
        return Bucket(kind, tags, clip.to(device), sound.to(device), torch.cat(features), [e[3] for e in entries], self.canvas)

    def _pixels(self, kind: str, clip: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if kind == "t":
            return None, None
        if kind == "r":
            return self.reference_pixels[clip - self.plain][:, None].float(), torch.tensor([1, 4, 4])
        which = {"f": [0], "l": [-1], "b": [0, -1]}[kind]
        return self.pixels[clip][:, which].float(), torch.tensor([1, 2, 4])

    def condition(self, bucket: Bucket, index: torch.Tensor, num_frames: int) -> torch.Tensor:
        """Clean condition rows (B, C, 4 C) of some requests of a bucket for clips of `num_frames`."""
        clip = bucket.clip[index]
        chosen = [self.rows.new_zeros(len(index), 0, self.rows.shape[-1]).float()]
        if bucket.kind in "fb":
            chosen.append(self.first[clip].float())
        if bucket.kind in "lb":
            chosen.append(self.last[num_frames][clip].float())
        if bucket.kind == "r":
            chosen.append(self.reference[clip - self.plain].float())
        return torch.cat(chosen, dim=1)


LAST_FRAMES = (39, 124)  # clip lengths trained
CLIP_BATCH = 32


def _caption(kind: str, rng: random.Random, full_only: bool) -> Callable[[Scene, random.Random], str]:
    if kind == "r":
        return captions.pictured
    if kind == "t":
        return captions.full if full_only or rng.random() > 0.15 else captions.short
    return captions.full if rng.random() < 0.5 else captions.animate
