"""Workloads as data: what is rendered to measure throughput, and on which weights."""

import random
from dataclasses import dataclass

import numpy as np
from PIL import Image

from videogen.config import Recipe, Request
from videogen.errors import bad
from videogen.pocket.captions import as_badge, draw_scene, full, pictured

H3_PROMPT = (
    "A fox trots along a snowy ridge at dawn, breath visible in the cold air, the camera gliding beside it while "
    "distant pines sway; soft wind, light paw steps on crusted snow, and a single raven calling far away."
)
MLPERF_NEGATIVE = (  # of MLPerf Inference's inference_config.yaml for wan-2.2-t2v-a14b
    "vivid colors, overexposed, static, blurry details, subtitles, style, work of art, painting, picture, still, overall grayish, "
    "worst quality, low quality, JPEG artifacts, ugly, deformed, extra fingers, poorly drawn hands, poorly drawn face, deformed, "
    "disfigured, deformed limbs, fused fingers, static image, cluttered background, three legs, many people in the background, "
    "walking backwards"
)


@dataclass(frozen=True, slots=True)
class Workload:
    """One thing to render again and again. Sizes in pixels; `reference` is the (width, height) of a synthetic picture.

    guidance and negative_prompt are for families that guide; with a `seed` every clip begins with the same noise.
    """

    name: str
    model: str
    size: tuple[int, int]
    frames: int
    steps: int
    reference: tuple[int, int] | None = None
    needs_gpu: bool = False
    note: str = ""
    guidance: tuple[float, float] | None = None
    negative_prompt: str = ""
    has_sound: bool = True
    seed: int | None = None

    @property
    def workflow(self) -> str:
        """The workflow of its requests."""
        if self.guidance is not None:
            return "t2v"
        return "t2va" if self.reference is None else "ref2va"

    def prompt(self, index: int) -> str:
        """The prompt of clip `index`: pocket captions for pocket models, one fixed long prompt at real size."""
        if self.guidance is not None:
            return f"{H3_PROMPT} Take {index + 1}."  # each text is encoded: no clip is served from what another kept
        if self.needs_gpu:
            return H3_PROMPT
        rng = random.Random(f"{self.name} {index}")
        scene = draw_scene(rng, held_out=True)
        return full(scene, rng) if self.reference is None else pictured(as_badge(scene), rng)


_REAL = "real sizes, random weights: time only, the clips are noise"

WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("pocket-small", "pocket", (160, 96), 124, 49, note="quick checks"),
        Workload("pocket-t2v", "pocket", (256, 144), 124, 49, note="the larger pocket canvas"),
        Workload("pocket-ref", "pocket", (256, 144), 124, 49, reference=(160, 96), note="the larger pocket canvas, one picture"),
        Workload("h3-t2va-5s", "random:h3", (1344, 768), 124, 49, needs_gpu=True, note=_REAL),
        Workload("h3-ref2va-5s", "random:h3", (1344, 768), 124, 49, reference=(1824, 1024), needs_gpu=True, note=_REAL),
        Workload("h3-t2va-15s", "random:h3", (1344, 768), 345, 49, needs_gpu=True, note=_REAL),
        Workload("h3-ref2va-15s", "random:h3", (1344, 768), 345, 49, reference=(1824, 1024), needs_gpu=True, note=_REAL),
        Workload(
            "mlperf-wan22-t2v",
            "random:wan22-t2v",
            (1280, 720),
            81,
            20,
            needs_gpu=True,
            note="MLPerf Inference's text-to-video settings; " + _REAL,
            guidance=(4.0, 3.0),
            negative_prompt=MLPERF_NEGATIVE,
            has_sound=False,
            seed=42,
        ),
    )
}


def find_workload(name: str) -> Workload:
    """The workload of this name.

    Raises RequestError for an unknown one.
    """
    if name not in WORKLOADS:
        raise bad("workload", name, f"one of {', '.join(WORKLOADS)}", "see `videogen bench --list`")
    return WORKLOADS[name]


def _reference_picture(size: tuple[int, int]) -> Image.Image:
    """A synthetic picture: smooth colours that survive any scaling. `size` is (width, height)."""
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    planes = [np.sin(x / size[0] * 7) * 100 + 128, np.sin(y / size[1] * 5) * 100 + 128, (x + y) % 256]
    return Image.fromarray(np.stack(planes, axis=-1).astype(np.uint8))


def make_request(workload: Workload, pair: int, recipe: Recipe | None = None) -> Request:
    """The request of one pair: prompt and, where the workload fixes none, seed follow its number, so that both arms get the same.

    Forwards are the workload's, unless the recipe fixes its own.
    """
    reference = (_reference_picture(workload.reference),) if workload.reference else ()
    return Request(
        prompt=workload.prompt(abs(pair)),
        references=reference,
        size=workload.size,
        frames=workload.frames,
        steps=None if recipe is not None and recipe.steps else workload.steps,
        seed=abs(pair) if workload.seed is None else workload.seed,
        negative_prompt=workload.negative_prompt,
        guidance=workload.guidance,
    )
