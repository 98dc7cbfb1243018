"""Requests and recipes refuse what no model could take, before anything loads."""

from dataclasses import replace

import pytest

from videogen.cli.inspect import as_job
from videogen.config import Recipe, Request, as_plain, read_environment
from videogen.errors import RequestError
from videogen.recipes import find_recipe, unavailable


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \n\t"}, "prompt"),
        ({"prompt": "x\ud800"}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"steps": 0}, "steps"),
        ({"steps": -3}, "steps"),
        ({"steps": True}, "steps"),
        ({"steps": 2.5}, "steps"),
        ({"frames": 0}, "frames"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seconds": 0.0}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": 5.0, "frames": 124}, "frames and seconds"),
        ({"size": (96,)}, "size"),
        ({"size": (0, 96)}, "width"),
        ({"references": ("a.png",), "image": "b.png"}, "references"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, object], word: str) -> None:
    with pytest.raises(RequestError, match=f"^{word}.*: got .*, expected .*; "):
        Request(**({"prompt": "a red circle"} | values))  # type: ignore[arg-type]


def test_the_workflow_follows_the_pictures() -> None:
    assert Request("p").workflow == "t2va"
    assert Request("p", last_image="b.png").workflow == "fl2va"
    assert Request("p", references=("r.png",)).workflow == "ref2va"


def test_recipes_are_what_their_names_say_and_an_unknown_one_is_refused() -> None:
    assert find_recipe("plain") == Recipe() and not unavailable()
    turbo, draft = find_recipe("turbo"), find_recipe("draft")
    assert replace(draft, name="turbo", sparse=turbo.sparse) == turbo and turbo.sparse.budget is None
    assert draft.sparse.budget == 0.25 and draft.sparse.min_rows == 16_384  # pocket's sequences are shorter: there it is turbo
    with pytest.raises(RequestError, match="expected one of exact"):
        find_recipe("fast")


def test_a_job_of_a_clip_asks_for_what_its_recipe_does_not_bring() -> None:
    resolved = {"prompt": "p", "frames": 22, "steps": 4, "seed": 1, "width": 96, "height": 64}
    record = {"recipe": {}, "cache": {"lambda": 0.0}, "attention": {"budget": 0.25}}
    jobs = {name: as_job(record | {"resolved": resolved | {"recipe": name}}) for name in ("draft", "exact+sparse")}
    assert jobs["exact+sparse"]["sparse_budget"] == 0.25 and (jobs["draft"]["recipe"], "sparse_budget" in jobs["draft"]) == ("draft", False)


def test_secrets_are_recorded_as_set_only() -> None:
    environment = read_environment({"HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "1", "VIDEOGEN_OUTPUT_DIR": "clips"})
    assert environment.record() == {"HF_HUB_OFFLINE": "1", "HF_TOKEN": "set"}
    assert environment.offline and environment.output_dir == "clips"
    assert "hf_secret" not in repr(environment)


def test_plain_data_has_no_python_objects() -> None:
    assert as_plain(Request("p", size=(96, 64)))["size"] == [96, 64]
