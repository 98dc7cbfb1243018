"""Which fixed requests each use of the step cache's figures may see: no clip serves two uses."""

from dataclasses import dataclass

from eval import prompts
from eval.quality_cases import Case, Shape, make_cases
from videogen.errors import bad
from videogen.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the endless drawn sequence of requests, whose first 1,024 are stored."""

    begin: int
    end: int


PARTS = {
    "report": Part(0, 256),  # `videogen eval` and the peers' curve
    "fit": Part(256, 512),  # choosing lambdas, orders, tolerances
    "calibrate": Part(512, 1024),
    "held-out": Part(1024, 4096),
}


def cases_of(part: str, number: int, workflow: str, shape: Shape, pipeline: Pipeline) -> list[Case]:
    """The first `number` requests of a part; held-out ones repeat no request of the other parts.

    Raises RequestError when the part has fewer.
    """
    where, taken = PARTS[part], prompts.make(workflow, PARTS[part].end)
    seen = {(item.prompt, item.scene) for item in taken[: where.begin]}
    items = [item for item in taken[where.begin :] if (item.prompt, item.scene) not in seen]
    if not 1 <= number <= len(items):
        raise bad("--clips", number, f"from 1 to {len(items)} of the {part} part", "change it")
    return make_cases(items[:number], shape, pipeline.family, pipeline.recipe)
