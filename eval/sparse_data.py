"""Queries, keys and values to measure sparse attention on: heads made up in H3's shape, and those of a model at work."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed, _apply_rotary_emb
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

from videogen.attention.install import Qkv, project
from videogen.transforms.scope import InPlaceOf

HEAD_DIM, ROPE_FREQUENCIES = 128, 16


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's queries, keys and values (B, S, H, D), the video rows last and in raster order of `grid` (t, h, w)."""

    name: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grid: tuple[int, int, int]

    @property
    def first(self) -> int:
        """Rows before the video's."""
        return self.query.shape[1] - math.prod(self.grid)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a made-up head looks at: near rows (by the rotary product), alike content of a certain size, nothing in particular."""

    near: float
    alike: float
    size: float  # of things, in rotary units
    gain: float


# from sharply local to diffuse; gains put the standard deviation of the logits between 1 and 4
KINDS = (
    Kind(1.0, 0.3, 8, 2.5),
    Kind(0.8, 0.6, 16, 2.5),
    Kind(0.5, 0.9, 16, 3.0),
    Kind(0.2, 1.0, 8, 3.0),
    Kind(0.2, 1.0, 32, 3.0),
    Kind(0.6, 0.6, 32, 2.0),
    Kind(0.0, 1.0, 64, 2.0),
    Kind(0.3, 0.3, 16, 1.2),
)


def audio_latents(latent_frames: int) -> int:
    """Audio latents of one channel for a clip of this many latent video frames (5n + 2 for 17n + 5 frames at 24 fps)."""
    return max(1, round(((latent_frames - 2) / 5 * 17 + 5) / 24 * 40))


def packed_positions(grid: tuple[int, int, int], num_text: int, num_audio: int) -> torch.Tensor:
    """Rotary coordinates (S, 3) as diffusers packs a text-to-video request: text, stereo sound, video."""
    frames, height, width = grid
    tags = torch.ones(num_text, dtype=torch.long)
    packed = MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, frames, 2 * height, 2 * width, num_audio, (1, 2, 2), 2, 2, 0, ())
    positions: torch.Tensor = packed[0]
    return positions


def _field(positions: torch.Tensor, size: float, channels: int, draw: torch.Generator) -> torch.Tensor:
    """A smooth random field (S, channels) of unit variance whose features are about `size` wide."""
    waves = torch.randn(64, positions.shape[1], generator=draw).to(positions) / size
    phases = torch.rand(64, generator=draw).to(positions) * 2 * math.pi
    mix = torch.randn(64, channels, generator=draw).to(positions) / 8
    return (positions @ waves.T + phases).cos() * math.sqrt(2) @ mix


def made_up(
    grid: tuple[int, int, int], num_heads: int, device: torch.device, dtype: torch.dtype, *, num_text: int = 30, seed: int = 0
) -> Heads:
    """Heads on H3's positions, rotated as H3 rotates: 128 channels, the kinds of `KINDS` in turn."""
    positions = packed_positions(grid, num_text, audio_latents(grid[0])).float().to(device)
    draw = torch.Generator().manual_seed(seed)
    parts: list[list[torch.Tensor]] = [[], [], []]
    for head in range(num_heads):
        for part, made in zip(parts, _head(positions, KINDS[head % len(KINDS)], draw)):
            part.append(made)
    query, key, value = (torch.stack(part, 1)[None] for part in parts)
    rope = MiniMaxH3RotaryPosEmbed(ROPE_FREQUENCIES).to(device)(positions)
    query, key = _apply_rotary_emb(query, *rope), _apply_rotary_emb(key, *rope)
    return Heads("made up", query.to(dtype), key.to(dtype), value.to(dtype), grid)


def _head(positions: torch.Tensor, kind: Kind, draw: torch.Generator) -> Iterator[torch.Tensor]:
    shared = torch.randn(HEAD_DIM, generator=draw).to(positions)
    content = _field(positions, kind.size, HEAD_DIM, draw)
    for gain in (kind.gain, 1.0):
        noise = torch.randn(len(positions), HEAD_DIM, generator=draw).to(positions)
        mixed = kind.near * shared + kind.alike * content + 0.5 * noise
        yield gain * torch.nn.functional.rms_norm(mixed, (HEAD_DIM,))
    noise = torch.randn(len(positions), HEAD_DIM, generator=draw).to(positions)
    yield 0.7 * _field(positions, kind.size, HEAD_DIM, draw) + 0.7 * noise


@dataclass(slots=True, eq=False)
class _Listener(InPlaceOf):
    """A processor that keeps its inputs at some forwards and attends as before."""

    inner: Any
    at: Sequence[int]
    kept: list[Qkv] = field(default_factory=list)
    forward: int = 0

    def __call__(self, attn: Any, hidden_states: torch.Tensor, rotary_emb: Any = None, attention_mask: Any = None) -> Any:
        if self.forward in self.at:
            self.kept.append(project(attn, hidden_states, rotary_emb))
        self.forward += 1
        return self.inner(attn, hidden_states, rotary_emb, attention_mask)


@contextmanager
def listening(transformer: Any, layers: Sequence[int], forwards: Sequence[int]) -> Iterator[dict[int, list[Qkv]]]:
    """Inside the scope the projections of some layers at some forwards are kept, by layer."""
    attentions = {layer: transformer.transformer_blocks[layer].attn for layer in layers}
    listeners = {layer: _Listener(attn.processor, forwards) for layer, attn in attentions.items()}
    try:
        for layer, attn in attentions.items():
            attn.processor = listeners[layer]
        yield {layer: listener.kept for layer, listener in listeners.items()}
    finally:
        for layer, attn in attentions.items():
            attn.processor = listeners[layer].inner
