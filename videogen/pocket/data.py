"""Rendered training material on a device: scenes drawn on the CPU from a seed, pictures and clips drawn where they are needed."""

import random
from collections.abc import Sequence

import torch

from videogen.pocket import world
from videogen.pocket.captions import Scene, as_badge, draw_scene


def draw(number: int, seed: int, *, held_out: bool = False, badge: bool = False, aspect: float = 5 / 3) -> tuple[list[Scene], world.Layout]:
    """Scenes and their layouts; clip k of a seed is always the same clip."""
    rng = random.Random(seed)
    scenes = [draw_scene(rng, held_out=held_out) for _ in range(number)]
    if badge:
        scenes = [as_badge(scene) for scene in scenes]
    return scenes, world.plan(scenes, clip_seeds(seed, number), badge=badge, aspect=aspect)


def clip_seeds(seed: int, number: int) -> list[int]:
    """The world seeds of the clips of a set."""
    return [seed * 1_000_003 + index for index in range(number)]


def quantise(frames: torch.Tensor) -> torch.Tensor:
    """[0, 1] pictures as the bytes a file would hold."""
    return (frames * 255).round().to(torch.uint8)


def stills(layouts: Sequence[world.Layout], height: int, width: int, device: torch.device, seed: int) -> torch.Tensor:
    """One frame of every clip at a random instant; uint8 (N, H, W, 4), the last channel is coverage."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for layout in layouts:
        for begin in range(0, len(layout), 256):
            part = layout[begin : begin + 256]
            when = torch.rand(len(part), generator=generator) * world.CLIP_S
            out.append(_drawn(_started(part, when).to(device), torch.zeros(1), height, width)[:, 0])
    return torch.cat(out)


def windows(layout: world.Layout, num_frames: int, height: int, width: int, device: torch.device, seed: int) -> torch.Tensor:
    """A run of frames of every clip from a random start; uint8 (N, T, H, W, 4)."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for begin in range(0, len(layout), 64):
        part = layout[begin : begin + 64]
        when = torch.rand(len(part), generator=generator) * (world.CLIP_S - num_frames / world.FPS)
        out.append(_drawn(_started(part, when).to(device), world.frame_times(num_frames), height, width))
    return torch.cat(out)


def _started(layout: world.Layout, when: torch.Tensor) -> world.Layout:
    return layout.replaced(start=layout.start + layout.velocity[:, None] * when[:, None, None])


def _drawn(layout: world.Layout, times: torch.Tensor, height: int, width: int) -> torch.Tensor:
    frames, cover = world.render(layout, times, height, width)
    return quantise(torch.cat([frames, cover[..., None]], dim=-1))
