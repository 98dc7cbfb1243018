"""A certificate for Wan, end to end at toy size: what was calibrated is reused, and any other stratum is computed in full."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.videogen.families.wan_toy import save
from videogen.certificates import certified, open_certificate
from videogen.cli.main import main
from videogen.config import Recipe, Request, StepCache
from videogen.errors import RequestError
from videogen.pipeline import open_pipeline

REQUEST = Request("a fox runs", size=(64, 32), frames=5, steps=12, seed=3, negative_prompt="blur", guidance=(4.0, 3.0))


def test_a_certificate_covers_its_stratum_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, jobs, file = save(tmp_path / "two", "two"), tmp_path / "jobs.jsonl", tmp_path / "c.json"
    own = {"negative_prompt": "blur", "guidance": [4, 3]}
    jobs.write_text("".join(json.dumps({"prompt": prompt} | own) + "\n" for prompt in ("a fox", "a bear")))
    loose = [
        "--video",
        "1",
        "--motion",
        "255",
        "--alpha",
        "0.5",
        "--delta",
        "0.5",
        "--clips",
        "2",
        "--lambdas",
        "1000",
        "--recipe",
        "plain",
    ]
    shape = ["--size", "64x32", "--frames", "5", "--steps", "12", "--device", "cpu"]
    assert main(["calibrate", "--model", str(model), "--prompts", str(jobs), *shape, *loose, "-o", str(file)]) == 0
    assert "lambda 1000" in capsys.readouterr().out
    certificate = open_certificate(file)
    assert certificate.fingerprint.workflow.startswith("t2v, boundary 0.875, guidance 4/3 from ")
    assert certificate.fingerprint.workflow.endswith(", streams each") and certificate.mean_reused > 0.3
    plain = open_pipeline(str(model), "plain", device="cpu")
    pipeline = plain.sharing(Recipe("plain+certified", cache=StepCache(certificates=(certificate,), on_mismatch="compute")))
    covered = pipeline.render(REQUEST)
    assert covered.record["cache"]["reused"] and covered.record["cache"]["certificate"] == certificate.promise
    others = [replace(REQUEST, guidance=(4.0, 2.0)), replace(REQUEST, negative_prompt="grain"), replace(REQUEST, steps=11)]
    for other in others:
        stratum = pipeline.stratum(pipeline.family.resolve(other, pipeline.recipe))
        assert certified(pipeline.recipe.cache, stratum)[0].lam == 0
    result = pipeline.render(others[0])
    assert "another stratum (workflow" in result.record["cache"]["note"] and np.array_equal(result.frames, plain.render(others[0]).frames)
    together = pipeline.sharing(replace(pipeline.recipe, cache=replace(pipeline.recipe.cache, streams="together", on_mismatch="refuse")))
    with pytest.raises(RequestError, match="streams together"):
        together.render(REQUEST)
    few = ["calibrate", "--model", str(model), "--prompts", str(jobs), *shape, *loose, "-o", str(tmp_path / "d.json"), "--clips", "3"]
    assert main(few) == 2 and main([*few[:3], *shape, *loose, "-o", str(tmp_path / "d.json"), "--workflow", "ref2va"]) == 2
