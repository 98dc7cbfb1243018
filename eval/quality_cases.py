"""What an evaluation renders: the first N of a workflow's fixed set, or a job file; pictures are drawn, nothing is downloaded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from eval import prompts
from videogen.config import MAX_SEED, Recipe, Request
from videogen.errors import bad
from videogen.families.h3 import H3Family
from videogen.jobs.files import read_jobs
from videogen.jobs.plan import make_request
from videogen.pocket import sizes, world
from videogen.pocket.captions import Scene
from videogen.pocket.data import quantise


@dataclass(frozen=True, slots=True)
class Case:
    """One request with its seed; `scene` is what the clip should show where that is known, `layout` the badge to look for."""

    name: str
    request: Request
    seed: int
    scene: Scene | None = None
    layout: world.Layout | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What the command line lays over every request; None keeps the request's own value, then the model's."""

    size: tuple[int, int] | None = None
    frames: int | None = None
    seconds: float | None = None
    steps: int | None = None

    def lay_over(self, request: Request) -> Request:
        """The request with these values; a length given here replaces its length."""
        given: dict[str, Any] = {key: value for key, value in (("size", self.size), ("steps", self.steps)) if value is not None}
        if self.frames is not None or self.seconds is not None:
            given |= {"frames": self.frames, "seconds": self.seconds}
        return replace(request, **given)


def read_cases(which: str, workflow: str | None, shape: Shape, family: H3Family, recipe: Recipe) -> list[Case]:
    """The first N requests of the fixed set (`which` is a number), or every job of a file.

    Raises RequestError for a bad number, file or request; every request is settled once, so that nothing renders before.
    """
    if which.lstrip("-").isdigit():
        cases = fixed_cases(int(which), workflow or "t2va", shape, family, recipe)
    elif workflow is not None:
        raise bad("--workflow with a prompt file", workflow, "only with --prompts N", "drop it: each line's pictures decide")
    else:
        cases = _file_cases(Path(which).expanduser(), shape)
    for case in cases:
        family.resolve(case.request, recipe)
    return cases


def fixed_cases(number: int, workflow: str, shape: Shape, family: H3Family, recipe: Recipe) -> list[Case]:
    """Fixed requests whose visible combinations no training clip showed; their pictures are drawn at the canvas in force."""
    if workflow not in prompts.WORKFLOWS:
        raise bad("--workflow", workflow, f"one of {', '.join(prompts.WORKFLOWS)}", "change it")
    most = max(prompts.SIZES)
    if not 1 <= number <= most:
        raise bad("--prompts", number, f"from 1 to {most}, or a job file", "change it")
    return make_cases(prompts.load(workflow, number), shape, family, recipe)


def make_cases(items: Sequence[prompts.EvalRequest], shape: Shape, family: H3Family, recipe: Recipe) -> list[Case]:
    """Cases of stored or drawn requests."""
    settled = family.resolve(shape.lay_over(Request(prompt="size")), recipe)
    canvas = (settled.width, settled.height)
    cases = []
    for item in items:
        is_badge = item.workflow == "ref2va"
        layout = world.plan([item.scene], [item.world_seed], badge=is_badge, aspect=canvas[0] / canvas[1])
        last_s = (settled.frames - 1) / world.FPS
        pictures = _pictures(item, layout, canvas, last_s)
        request = shape.lay_over(Request(prompt=item.prompt, **pictures))
        cases.append(Case(item.id, request, item.seed, item.scene, layout if is_badge else None))
    return cases


def _pictures(item: prompts.EvalRequest, layout: world.Layout, canvas: tuple[int, int], last_s: float) -> dict[str, Any]:
    if item.workflow == "ref2va":
        side = sizes.CANVAS["reference_image_short_edge"]
        return {"references": (_draw(world.picture_of(layout, [item.world_seed]), 0.0, (side, side)),)}
    frames: dict[str, Any] = {}
    if item.anchors in ("first", "both"):
        frames["image"] = _draw(layout, 0.0, canvas)
    if item.anchors in ("last", "both"):
        frames["last_image"] = _draw(layout, last_s, canvas)
    return frames


def _draw(layout: world.Layout, time_s: float, canvas: tuple[int, int]) -> Image.Image:
    frames, _ = world.render(layout, torch.tensor([time_s]), canvas[1], canvas[0])
    return Image.fromarray(quantise(frames)[0, 0].numpy())


def _file_cases(path: Path, shape: Shape) -> list[Case]:
    if not path.is_file():
        raise bad("--prompts", str(path), "a number or an existing job file", "check the path")
    cases = []
    for index, raw in enumerate(read_jobs(path)):
        own = {"recipe", "repeat", "output", "cache_lambda", "cache_prior", "sparse_budget", "lora", "lora_contract", "lora_fuse"}
        unusual = sorted(own & set(raw.values))
        if unusual:
            raise bad(f"{raw.place}: key", unusual[0], "what describes one clip", "remove it: both arms render every line once")
        request = shape.lay_over(make_request(raw))
        seed = 1000 + index if request.seed is None else request.seed
        cases.append(Case(f"line-{index + 1:04d}", request, seed, known_scene(request.workflow, request.prompt)))
    if not cases:
        raise bad("--prompts", str(path), "a file with at least one job", "add a line")
    return cases


def shard_of(cases: Sequence[Case], which: str) -> list[Case]:
    """The share `I/N` of the cases, I from 0: several processes may fill one journal. Raises RequestError for anything else."""
    index, _, total = which.partition("/")
    if not (index.isdecimal() and total.isdecimal() and int(index) < int(total)):
        raise bad("--shard", which, "I/N with I from 0 to N - 1", "correct it")
    return list(cases[int(index) :: int(total)])


def known_scene(workflow: str, prompt: str) -> Scene | None:
    """What a full caption of the fixed set asks for; None for any other text, and where a picture says part of it."""
    if workflow != "t2va":
        return None
    return next((item.scene for item in prompts.load(workflow, max(prompts.SIZES)) if item.prompt == prompt), None)


def other_seed(seed: int) -> int:
    """The seed of the ceiling anchor: far from every seed of the fixed sets."""
    return (seed + 1_000_003) % MAX_SEED
