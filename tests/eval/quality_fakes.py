"""Clips of the drawn world in the place of a model's, with the records that a pipeline would write."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval import prompts
from eval.metrics.pair import Clip
from eval.quality_trials import Shown, Stored, Trial
from videogen.config import Request
from videogen.errors import RequestError
from videogen.identity import hash_bytes
from videogen.pocket import world
from videogen.pocket.captions import Scene
from videogen.result import Result

RATE, FRAMES, HEIGHT, WIDTH = 8000, 39, 64, 96
Damage = Callable[[Clip], Clip]


def drawn(scene: Scene, seed: int, name: str = "clip") -> Clip:
    """What the prompt asks, drawn; the seed places the objects."""
    layout = world.plan([scene], [seed], aspect=WIDTH / HEIGHT)
    frames, _ = world.render(layout, world.frame_times(FRAMES), HEIGHT, WIDTH)
    audio = world.sound(layout, FRAMES * 40 // 24, RATE)[0]
    return Clip((frames[0] * 255).round().byte().numpy(), audio.numpy().astype(np.float32), RATE, 24.0, name)


def record(prompt: str, seed: int, clip: Clip, **recipe: Any) -> dict[str, Any]:
    """The part of a sidecar that an evaluation reads."""
    resolved = {"workflow": "t2va", "prompt": prompt, "width": WIDTH, "height": HEIGHT, "frames": FRAMES, "fps": 24.0, "seed": seed}
    return {
        "schema": "videogen.clip/1",
        "resolved": resolved | {"steps": 4, "dtype": "auto", "recipe": "exact"} | recipe,
        "inputs": [],
        "model": {"source": "pocket", "identity": "m", "card": {"name": "pocket-h3"}, "label": ""},
        "recipe": {"name": "exact"} | recipe,
        "stages_s": {"load": 9.0, "denoise": 1.5, "decode": 0.5, "encode": 9.0},
        "output": {"frames_sha256": hash_bytes(clip.frames.tobytes()), "sampling_rate": RATE},
    }


class DrawingModel:
    """Draws what the fixed set's prompts ask for, then damages it; `broken` raises instead."""

    def __init__(self, damage: Damage = lambda clip: clip, broken: Exception | None = None) -> None:
        self.damage, self.broken, self.seeds = damage, broken, list[int]()
        self.scenes = {item.prompt: item.scene for item in prompts.load("t2va", 64)}

    def render(self, request: Request) -> Result:
        """One clip; a request without a seed is a mistake of the caller."""
        if self.broken:
            raise self.broken
        if request.seed is None:
            raise RequestError("no seed")
        self.seeds.append(request.seed)
        clip = self.damage(drawn(self.scenes[request.prompt], request.seed))
        return Result(clip.frames, clip.audio, RATE, 24.0, record(request.prompt, request.seed, clip))


def trials(number: int, damage: Damage = lambda clip: clip, *, anchors: bool = True) -> list[Trial]:
    """Drawn trials of the fixed set: the floor is off by one level in one pixel, the ceiling places the objects elsewhere."""
    out = []
    for item in prompts.load("t2va", number):
        reference = drawn(item.scene, item.seed)
        near = reference.frames.copy()
        near[0, 0, 0] ^= 1
        arms = []
        for arm, clip in (("new", damage(reference)), ("reference", reference)):
            arms.append(Shown(clip, Stored(Path(f"{arm}/{item.id}.mp4"), record(item.prompt, item.seed, clip))))
        floor = Clip(near, reference.audio, RATE, 24.0) if anchors else None
        ceiling = drawn(item.scene, item.seed + 1) if anchors else None
        out.append(Trial(item.id, item.prompt, item.seed, *arms, floor, ceiling, item.scene))
    return out


def grain(clip: Clip) -> Clip:
    """A little noise in the picture, the sound untouched."""
    noise = torch.randn(clip.frames.shape, generator=torch.Generator().manual_seed(1)).numpy() * 2
    return Clip((clip.frames + noise).clip(0, 255).astype(np.uint8), clip.audio, RATE, 24.0)
