"""`videogen audit` end to end at tiny size: what is drawn, resumed, refused and alarmed at."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from caches.certificate import Certificate
from caches.prior import Prior
from eval import audit
from eval.audit_clips import Made, certificate_id
from videogen.certificates import open_certificate
from videogen.cli import render
from videogen.cli.main import main
from videogen.config import Recipe, Request, StepCache, recipe_record
from videogen.pipeline import Pipeline


@pytest.fixture(scope="module")
def place(tiny_pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run folder with a clip under a certificate that every clip keeps and two under one that every clip breaks; beside it
    their files and the first picture of the clips."""
    place = tmp_path_factory.mktemp("audit")
    picture = place / "first.png"
    Image.new("RGB", (96, 64), "navy").save(picture)
    request = Request("x", image=picture, size=(96, 64), frames=22, steps=8)
    stratum = tiny_pipeline.stratum(tiny_pipeline.family.resolve(request, tiny_pipeline.recipe))
    wide = {"video": 9.0, "motion": 999.0, "spectrum": 999.0, "level": 999.0}
    kept = Certificate(stratum, 50.0, 3, 2, 2, 0.1, 0.1, wide, 52, 0, 0.5, "c")
    broken = replace(kept, tolerances=wide | {"video": 1e-12})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "open_pipeline", lambda _model, recipe, **_: tiny_pipeline.sharing(recipe))
        patch.setattr(render, "opener", lambda *_: tiny_pipeline.sharing)
        ask = ["render", "-m", str(tiny_pipeline.source.folder), "--size", "96x64", "--frames", "22", "--steps", "8", "--seed", "7", "-q"]
        for name, certificate, repeat in (("kept", kept, "1"), ("broken", broken, "2")):
            file = place / f"{name}.json"
            file.write_text(certificate.to_json())
            more = ["--prompt", name, "--certificate", str(file), "--repeat", repeat, "--image", str(picture)]
            assert main([*ask, *more, "-o", str(place / "run")]) == 0
        yield place


def test_audits_resume_alarm_and_refuse(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, files = place / "run", ["--files", str(place)]
    capsys.readouterr()

    def audited(*more: str, code: int = 0) -> dict[str, dict[str, Any]]:
        assert main(["audit", str(folder), "--share", "1", "--json", *files, *more]) == code
        return {each["promise"]: each for each in json.loads(capsys.readouterr().out)["certificates"]}

    (kept,) = audited("--certificate", str(place / "kept.json")).values()
    assert (kept["clips"], kept["violations"], kept["other_than_delivered"]) == (1, 0, 0) and kept["e_value"] < 1
    (broken,) = audited("--certificate", str(place / "broken.json"), "--level", "0.7", code=4).values()
    assert broken["clips"] == 1 and broken["is_alarm"] and broken["e_value"] == 1.5  # it stops at the alarm
    journal = folder / broken["journal"]
    rows = journal.read_text()
    journal.write_text(rows + '{"lam": 50.0, "case": "to')  # killed while it wrote
    both = audited()
    later = both[broken["promise"]]
    assert both[kept["promise"]] == kept
    assert later["clips"] == 2 and not later["is_alarm"] and journal.read_text().startswith(rows)
    whole = journal.read_text()
    assert audited() == both and journal.read_text() == whole
    other = place / "other"
    other.mkdir()
    Image.new("RGB", (96, 64), "red").save(other / "first.png")
    assert main(["audit", str(folder), "--share", "1", "--files", str(other)]) == 2
    assert "picture first.png: got 'another picture'" in capsys.readouterr().err


def test_clips_of_other_code_and_folders_without_any_are_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(place / "run", folder)
    for sidecar in folder.glob("*.json"):
        sidecar.write_text(sidecar.read_text().replace('"code": "', '"code": "x'))
    assert main(["audit", str(folder), "--share", "1", "--files", str(place)]) == 2
    assert "stratum: got 'code " in capsys.readouterr().err
    assert main(["audit", str(tmp_path)]) == 2 and main(["audit", str(folder), "--share", "0"]) == 2
    told = capsys.readouterr().err
    assert "with its run.jsonl" in told and "audit share: got 0.0" in told
    assert main(["audit", str(folder), "--share", "1e-9"]) == 0
    assert "0 of 3 clips under a certificate were drawn" in capsys.readouterr().out


def test_a_certificate_of_which_the_sidecar_keeps_a_digest_is_taken_from_its_file(place: Path) -> None:
    line, table = {"video": (0.9, 0.5)}, {"video": ((1.0, 0.5), (0.5, 1.0))}
    whole = open_certificate(place / "kept.json")
    known = replace(whole, prior=Prior(line, table, table, 4))
    recipe = recipe_record(Recipe(cache=StepCache(certificates=(known, whole))))
    made = Made("a", {"recipe": json.loads(json.dumps(recipe))}, "i", "k")
    assert made.recipe(place, {}).cache.certificates == (whole,)
    assert made.recipe(place, {certificate_id(known): known}).cache.certificates == (known, whole)
    other = replace(known, prior=Prior(line, table, table, 5))
    assert made.recipe(place, {certificate_id(other): other}).cache.certificates == (whole,)
