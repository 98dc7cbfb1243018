"""A certificate acts on the requests of its stratum, and on no other."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caches.certificate import Certificate
from tests.conftest import TINY
from videogen import Recipe, Request, recipes
from videogen.certificates import cache_code, open_certificate
from videogen.certificates import certified as certified_options
from videogen.cli.inspect import as_job
from videogen.cli.main import main
from videogen.config import StepCache
from videogen.errors import RequestError
from videogen.pipeline import Pipeline

STEPS = 12
REQUEST = Request("a large red circle moves right", seed=1, **(TINY | {"steps": STEPS}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pipeline(tiny_pipeline: Pipeline) -> Pipeline:
    """Certificates are about strata: any weights will do."""
    return tiny_pipeline


@pytest.fixture
def certificate(pipeline: Pipeline) -> Certificate:
    stratum = pipeline.stratum(pipeline.family.resolve(REQUEST, pipeline.recipe))
    return Certificate(stratum, 50.0, 2, 1, 0, 0.1, 0.1, {"video": 0.05}, 52, 2, 0.5, "c" * 64)


def certified(pipeline: Pipeline, certificate: Certificate, **options: Any) -> Pipeline:
    return pipeline.sharing(Recipe(name="exact+certified", cache=StepCache(certificates=(certificate,), **options)))


def test_a_covered_request_uses_what_was_certified(pipeline: Pipeline, certificate: Certificate) -> None:
    record = certified(pipeline, certificate).render(REQUEST).record["cache"]
    assert record["lambda"] == 50.0 and record["reused"] > 0 and record["certificate"] == certificate.promise
    longest = max(len(run) for run in "".join("r" if s["action"] == "reuse" else " " for s in record["steps"]).split())
    assert longest == 2


@pytest.mark.parametrize("change", [{"steps": STEPS + 1}, {"size": (112, 64)}, {"frames": 39}])
def test_another_stratum_is_refused_by_name_before_anything_renders(
    pipeline: Pipeline, certificate: Certificate, change: dict[str, Any]
) -> None:
    request = replace(REQUEST, **change)
    word = "steps" if "steps" in change else "canvas"
    with pytest.raises(RequestError, match=rf"certificate: got .*{word} .*instead of .*--cache-mismatch=compute"):
        certified(pipeline, certificate).render(request)
    computed = certified(pipeline, certificate, on_mismatch="compute").render(request)
    assert computed.record["cache"]["lambda"] == 0 and "another stratum" in computed.record["cache"]["note"]
    assert np.array_equal(computed.frames, pipeline.render(request).frames)


def test_other_weights_and_other_code_are_another_stratum(pipeline: Pipeline, certificate: Certificate) -> None:
    for change in ({"weights": "x" * 64}, {"code": "x" * 64}, {"device": "cuda"}, {"shifts": "7/7"}):
        other = replace(certificate, fingerprint=replace(certificate.fingerprint, **change))
        with pytest.raises(RequestError, match=next(iter(change))):
            certified(pipeline, other).render(REQUEST)
    assert len(cache_code()) == 64


def test_the_command_line_reads_a_certificate(
    tiny_model: Path, certificate: Certificate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.json"
    file.write_text(certificate.to_json())
    options = ["-m", str(tiny_model), "--size", "96x64", "--frames", "22", "--prompt", "x", "--seed", "1", "-q", "--name", "c"]
    ask = ["render", *options, "--certificate", str(file)]
    assert main([*ask, "--steps", str(STEPS), "-o", str(tmp_path / "a")]) == 0
    assert json.loads((tmp_path / "a" / "c.json").read_text())["cache"]["certificate"] == certificate.promise
    assert main([*ask, "--steps", "9", "-o", str(tmp_path / "b")]) == 1
    assert main([*ask, "--steps", "9", "--cache-mismatch", "compute", "-o", str(tmp_path / "c")]) == 0
    capsys.readouterr()
    for text in ("{", "{}", certificate.to_json().replace('"lam": 50.0', '"lam": -1')):
        file.write_text(text)
        assert main([*ask, "-o", str(tmp_path / "d")]) == 2
        assert "certificate" in capsys.readouterr().err
    assert main(["render", *options, "--certificate", str(tmp_path / "none.json")]) == 2
    with pytest.raises(RequestError, match="a file that can be read"):
        open_certificate(tmp_path / "none.json")


def test_shipped_files_make_a_recipe_that_acts_on_its_own_strata(
    pipeline: Pipeline, certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "CERTIFICATES", tmp_path)
    assert {"careful", "balanced"} <= set(recipes.unavailable())
    with pytest.raises(RequestError, match=r"careful .* is not built yet"):
        recipes.find_recipe("careful")
    other = replace(certificate, lam=1e-12, fingerprint=replace(certificate.fingerprint, steps=9))
    for name, each in (("a", other), ("b", certificate)):
        (tmp_path / f"careful-{name}.json").write_text(each.to_json())
    recipe = recipes.find_recipe("careful")
    assert recipe.name == "careful" and "careful" not in recipes.unavailable() and "balanced" in recipes.unavailable()
    record = pipeline.sharing(recipe).render(REQUEST).record
    assert record["cache"]["lambda"] == 50.0 and record["cache"]["certificate"] == certificate.promise
    assert as_job(record)["recipe"] == "careful" and "cache_lambda" not in as_job(record)
    stratum = pipeline.stratum(pipeline.family.resolve(replace(REQUEST, steps=10), recipe))
    options, note = certified_options(recipe.cache, stratum)
    assert options.lam == 0 and "steps 10 instead of" in note
