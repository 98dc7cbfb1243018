"""A prior without a certificate: measured by the command, named by a job, refused for another schedule, told elsewhere."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from caches.policy import Action
from eval import calibrate_command
from eval.cache_prior import foreseen
from videogen.cli.inspect import as_job
from videogen.config import Environment, Request
from videogen.errors import RequestError
from videogen.jobs.files import RawJob
from videogen.jobs.plan import make_drafts
from videogen.pipeline import Pipeline
from videogen.priors import MeasuredPrior, open_prior
from videogen.recipes import find_recipe, with_cache

REQUEST = Request("a red circle", size=(96, 64), frames=22, steps=12, seed=3)


@pytest.fixture(scope="module")
def measured(tiny_pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("priors") / "prior.json"
    said: list[str] = []
    parser = argparse.ArgumentParser()
    calibrate_command.add_calibrate(parser.add_subparsers(), Environment())
    words = ["calibrate", "--prior-only", "--clips", "2", "--size", "96x64", "--frames", "22", "--steps", "12", "-o", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate_command, "open_pipeline", lambda *_, **__: tiny_pipeline)
        assert (args := parser.parse_args(words, argparse.Namespace(say=said.append))).run(args) == 0
    assert "2 clips, 12 steps" in said[0] and "--cache-lambda 0.01: about" in said[1]
    return path


def drafts(pipeline: Pipeline, folder: Path, **values: Any) -> Any:
    """The recipe that a job of REQUEST with these keys gets."""
    job = {"prompt": REQUEST.prompt, "size": "96x64", "frames": 22, "steps": 12} | values
    return make_drafts([RawJob(job, "job 1", folder)], pipeline.family, pipeline.recipe, lambda recipe: recipe)[0].recipe


def drifts(record: dict[str, Any]) -> list[Any]:
    return [step["drift"] for step in record["cache"]["steps"]]


def test_a_job_names_a_prior_and_its_clip_says_so(measured: Path, tiny_pipeline: Pipeline) -> None:
    recipe = drafts(tiny_pipeline, measured.parent, cache_lambda=0.5, cache_prior="prior.json")
    assert (recipe.name, recipe.cache.max_streak, recipe.cache.warm_up) == ("exact+cache", 6, 0.16)
    record = tiny_pipeline.sharing(recipe).render(REQUEST).record
    prior = open_prior(measured)
    assert record["cache"]["reused"] > 0 and record["cache"]["certificate"] is None and record["cache"]["note"] == ""
    assert record["recipe"]["cache"]["prior"] == {"digest": prior.prior.digest, "clips": 2}
    assert {key: as_job(record)[key] for key in ("cache_lambda", "cache_prior")} == {"cache_lambda": 0.5, "cache_prior": "prior.json"}
    parabolas = tiny_pipeline.sharing(with_cache(tiny_pipeline.recipe, 0.5)).render(REQUEST).record
    assert "cache_prior" not in as_job(parabolas) and drifts(parabolas) != drifts(record)
    wider = Request("a red circle", size=(128, 64), frames=22, steps=12, seed=3)
    note = tiny_pipeline.sharing(recipe).render(wider).record["cache"]["note"]
    assert note == "cache prior prior.json: measured with another canvas; what looks unusual is computed"
    assert with_cache(find_recipe("exact"), 0.0, prior) == find_recipe("exact")


def test_what_the_prior_foretells_falls_with_lambda(measured: Path, tiny_pipeline: Pipeline) -> None:
    prior = open_prior(measured).prior
    shares = [foreseen(prior, lam) for lam in (0.0, 1e-9, 1e-3, 0.1, 10.0)]
    assert shares[0] == shares[1] == 1 and shares == sorted(shares, reverse=True) and shares[-1] < 0.6
    recipe = with_cache(tiny_pipeline.recipe, 10.0, open_prior(measured))
    steps = tiny_pipeline.sharing(recipe).render(REQUEST).record["cache"]["steps"]
    assert sum(step["action"] == Action.COMPUTE for step in steps) == pytest.approx(12 * shares[-1])


def test_wrong_priors_are_refused_before_anything_loads(measured: Path, tiny_pipeline: Pipeline, tmp_path: Path) -> None:
    whole = json.loads(measured.read_text())
    (tmp_path / "stray.json").write_text(json.dumps(whole | {"of": {"steps": 12}}))
    (tmp_path / "old.json").write_text(json.dumps({key: value for key, value in whole.items() if key != "of"}))
    (tmp_path / "bytes.json").write_bytes(b"\xff")
    for values, word in (
        ({"cache_prior": "old.json"}, "cache_lambda beside it"),
        ({"cache_prior": 5}, "cache_prior: got 5"),
        ({"cache_prior": "none.json"}, "none.json"),
        ({"cache_prior": "stray.json"}, "the stratum it was measured in"),
        ({"cache_prior": "bytes.json"}, "UTF-8"),
        ({"cache_prior": "old.json", "steps": 13}, "got 13, expected 12, as old.json has"),
    ):
        lam = {} if "beside" in word else {"cache_lambda": 0.1}
        with pytest.raises(RequestError, match=word):
            drafts(tiny_pipeline, tmp_path, **lam | values)
    old = open_prior(tmp_path / "old.json")
    assert old.of is None and old.told(tiny_pipeline.stratum(tiny_pipeline.family.resolve(REQUEST, tiny_pipeline.recipe))) == ""
    of = open_prior(measured).of
    assert of is not None
    resolved = tiny_pipeline.family.resolve(REQUEST, tiny_pipeline.recipe)
    with pytest.raises(RequestError, match="shifts with a cache prior"):
        MeasuredPrior(old.prior, "p", type(of)(**{f: getattr(of, f) for f in of.__slots__} | {"shifts": "1/1"})).check(resolved)
