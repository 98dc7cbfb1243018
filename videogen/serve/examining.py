"""What `videogen doctor` finds, by the worker's own pipeline: no second copy of the model; imports torch."""

from typing import Any

from videogen.config import Request, read_environment
from videogen.device_profile import device_key
from videogen.doctor.examine import Examination
from videogen.doctor.report import SCHEMA, as_plain_rows
from videogen.pipeline import Pipeline

_PROMPT = "a look at what runs here"  # no clip of anybody, so that its encoding is not kept already


def examine(pipeline: Pipeline) -> dict[str, Any]:
    """The areas and attention candidates at the model's own canvas and length, under the pipeline's recipe."""
    resolved = pipeline.family.resolve(Request(_PROMPT), pipeline.recipe)
    environment = read_environment()
    pipe, transforms = pipeline.load(resolved.workflow), pipeline.transforms_for(resolved)
    found = Examination(pipe, resolved, transforms, pipeline.device, environment.record(), environment.offline)
    found.look()
    head = {"schema": SCHEMA, "device": device_key(pipeline.device), "model": pipeline.source.name, "recipe": pipeline.recipe.name}
    return head | {"rows": found.measured["rows"], "areas": as_plain_rows(found.rows), "attention": found.measured["attention"]}
