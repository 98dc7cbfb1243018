"""Fixed evaluation requests for the core world, none of whose visible combinations was trained; pictures are described by world seeds."""

import argparse
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from videogen.pocket import captions
from videogen.pocket.captions import Scene

WORKFLOWS = ("t2va", "fl2va", "ref2va")
SIZES = (64, 256, 1024)  # each set is the beginning of the next larger one
_HERE = Path(__file__).parent
_ANCHORS = ("first", "first", "last", "both")


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """One request: `seed` draws the noise, `world_seed` places the objects of the given pictures, `anchors` is first, last, both or ""."""

    id: str
    workflow: str
    prompt: str
    seed: int
    world_seed: int
    anchors: str
    scene: Scene


def make(workflow: str, number: int) -> list[EvalRequest]:
    """Draw a set; the same every time."""
    rng = random.Random(f"pocket-{workflow}")
    out = []
    for index in range(number):
        scene = captions.draw_scene(rng, held_out=True)
        anchors = _ANCHORS[index % len(_ANCHORS)] if workflow == "fl2va" else ""
        if workflow == "ref2va":
            scene = captions.as_badge(scene)
            prompt = captions.pictured(scene, rng)
        elif workflow == "fl2va" and index % 2:
            prompt = captions.animate(scene, rng)
        else:
            prompt = captions.full(scene, rng)
        world_seed = 7_000_000_000 + WORKFLOWS.index(workflow) * 1_000_000 + index
        out.append(EvalRequest(f"{workflow}-{index:04d}", workflow, prompt, 1000 + index, world_seed, anchors, scene))
    return out


def load(workflow: str, number: int) -> list[EvalRequest]:
    """The first `number` requests of a workflow's stored set."""
    lines = (_HERE / f"{workflow}.jsonl").read_text().splitlines()[:number]
    rows = [json.loads(line) for line in lines]
    return [EvalRequest(**{**row, "scene": Scene(*row["scene"])}) for row in rows]


def write(folder: Path) -> None:
    """Store the largest set of every workflow, one request a line."""
    for workflow in WORKFLOWS:
        rows = [{**asdict(r), "scene": list(asdict(r.scene).values())} for r in make(workflow, max(SIZES))]
        (folder / f"{workflow}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """`python -m eval.prompts FOLDER` writes the sets anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=_HERE)
    write(parser.parse_args().folder)
