"""Adapters in a rendering: off is the base, on is the changed weights under the contract's schedule, and nothing stays behind."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from caches.certificate import Certificate
from lora.apply import attached_to
from lora.contract import shifted_grid
from tests.conftest import TINY, link_model
from videogen import Recipe, Request, Result
from videogen.certificates import certified
from videogen.cli.main import main
from videogen.config import Adapters, AdapterUse, StepCache
from videogen.errors import RequestError
from videogen.families.h3_pipeline import transformer_of
from videogen.pipeline import Pipeline, open_pipeline

PLAIN = Request("a large red circle moves right", size=TINY["size"], frames=22, seed=3)  # type: ignore[arg-type]
MODULE, ROWS, COLUMNS = "transformer_blocks.9.ff.net.2", 256, 576  # of pocket
CONTRACT = {"alpha": "4", "nfe": "2", "shift_video": "7", "shift_audio": "2.5"}


def factors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(4, COLUMNS, generator=rng) * 0.1, torch.randn(ROWS, 4, generator=rng) * 0.1


def write(path: Path, seed: int = 1, **metadata: str) -> str:
    path.parent.mkdir(exist_ok=True)
    down, up = factors(seed)
    save_file({f"{MODULE}.lora_A.weight": down, f"{MODULE}.lora_B.weight": up}, path, metadata or {"alpha": "4"})
    return str(path)


def using(*files: str | AdapterUse, **options: Any) -> Recipe:
    uses = tuple(AdapterUse(file) if isinstance(file, str) else file for file in files)
    cache = options.pop("cache", StepCache())
    return Recipe(name="test", cache=cache, adapters=Adapters(uses, **options))


def same(a: Result, b: Result) -> bool:
    return bool(np.array_equal(a.frames, b.frames) and np.array_equal(a.audio, b.audio))


def test_off_is_the_base_and_on_is_the_changed_weights_in_both_modes(pipeline: Pipeline, tmp_path: Path) -> None:
    request, (down, up) = replace(PLAIN, steps=1), factors(1)
    off = pipeline.sharing(using(AdapterUse(write(tmp_path / "off.safetensors", **CONTRACT), 0.0))).render(request)
    use = AdapterUse(write(tmp_path / "a.safetensors"), 8)
    found = [pipeline.sharing(using(use, fuse=fuse)).render(request) for fuse in (False, True)]
    weight = transformer_of(pipeline.load("t2va")).get_submodule(MODULE).weight
    original = weight.detach().clone()
    try:
        with torch.no_grad():
            weight += 8 * up @ down
        wanted = pipeline.render(request).frames.astype(np.float64)
    finally:
        weight.data.copy_(original)
    base = pipeline.render(request)
    assert same(off, base) and off.record["adapters"]["attached"] == [] and "off.safetensors: strength 0, off" in off.record["notes"]
    moved = np.abs(base.frames - wanted).mean()
    assert moved > 1
    for result in found:
        assert np.abs(result.frames - wanted).mean() < 0.01 * moved
        assert result.record["adapters"]["attached"][0]["strength"] == 8


def test_the_contract_holds_for_its_own_requests_and_leaves_no_trace(pipeline: Pipeline, tmp_path: Path) -> None:
    one = pipeline.sharing(using(write(tmp_path / "a.safetensors", **CONTRACT)))
    two = pipeline.sharing(using(write(tmp_path / "b.safetensors", 2, sigmas="1, 0.4, 0")))
    before = pipeline.render(replace(PLAIN, steps=2))
    first = one.render(PLAIN)
    pipe, own = pipeline._opened["t2va"], pipeline.family.geometry
    assert (pipe.scheduler.shift, pipe.audio_scheduler.shift) == (own.video_shift, own.audio_shift)
    model = transformer_of(pipe)
    attachment = attached_to(model)
    assert attachment is not None and attached_to(transformer_of(one.load("t2va"))) is attachment
    other = two.render(PLAIN)
    after = pipeline.render(replace(PLAIN, steps=2))
    assert attached_to(model) is None
    assert same(one.render(PLAIN), first) and same(before, after) and not same(first, before) and not same(other, first)
    assert first.record["forwards"] == 2 and before.record["sigmas"] == after.record["sigmas"]
    for name, shift in (("video", 7.0), ("audio", 2.5)):
        assert first.record["sigmas"][name] == pytest.approx(shifted_grid(2, shift), abs=1e-6)
        assert other.record["sigmas"][name] == pytest.approx([1, 0.4, 0])
    assert first.record["adapters"]["contract"]["sources"]["forwards"] == "file metadata of a.safetensors"
    assert "a.safetensors: 2 forwards, shifts 7/2.5 (by file metadata), strength 1" in first.record["notes"]


def test_a_contradiction_is_refused_before_a_weight_loads(short_model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors", partition="transformer", **CONTRACT)
    fresh = open_pipeline(str(short_model), using(file))
    for request, words in (
        (replace(PLAIN, steps=9), "forwards: 9 asked, 2 trained for .*--lora-contract=ignore"),
        (replace(PLAIN, references=(Image.new("RGB", (96, 96), "red"),)), "partition: transformer_ref asked, transformer trained for"),
    ):
        with pytest.raises(RequestError, match=words):
            fresh.render(request)
    half, eight = write(tmp_path / "h.safetensors", shift_video="6"), write(tmp_path / "e.safetensors", nfe="8")
    with pytest.raises(RequestError, match=r"shift_video without shift_audio.*--lora-contract shift_audio=VALUE"):
        fresh.sharing(using(half)).render(PLAIN)
    with pytest.raises(RequestError, match=r"forwards 2 by .* of a.safetensors and 8 by .* of e.safetensors"):
        fresh.sharing(using(file, eight))
    assert not fresh._opened
    ignoring = fresh.sharing(using(file, eight, contract="ignore", stated=("forwards=5",)))
    settled = ignoring.family.resolve(PLAIN, ignoring.recipe)
    own = fresh.family.geometry
    assert settled.steps == 5 and settled.shifts == (own.video_shift, own.audio_shift)
    completed = fresh.sharing(using(half, stated=("shift_audio=3",))).recipe
    assert fresh.family.resolve(PLAIN, completed).shifts == (6, 3)
    write(tmp_path / "a.safetensors", 5, **CONTRACT)
    with pytest.raises(RequestError, match="another content than when the job was planned"):
        fresh.render(PLAIN)


def test_the_step_cache_knows_the_adapter(pipeline: Pipeline, tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors")
    request = replace(PLAIN, steps=3)
    base = pipeline.stratum(pipeline.family.resolve(request, pipeline.recipe))
    certificate = Certificate(base, 50.0, 2, 1, 0, 0.1, 0.1, {"video": 0.05}, 52, 2, 0.5, "c" * 64)
    options = StepCache(certificates=(certificate,), on_mismatch="compute")
    turbo = pipeline.sharing(using(file))
    cache, note = certified(options, turbo.stratum(turbo.family.resolve(request, turbo.recipe)))
    assert cache.lam == 0 and "adapters" in note and "shifts" not in note
    assert certified(options, base)[0].lam == 50
    watched = pipeline.sharing(using(file, cache=StepCache(lam=1e-9))).render(request)
    assert same(watched, turbo.render(request)) and watched.record["cache"]["reused"] == 0


def test_turbo_is_there_where_the_model_ships_its_adapter(tmp_path: Path) -> None:
    model = link_model(tmp_path / "model")
    bare = open_pipeline(str(model))
    with pytest.raises(RequestError, match=r"no adapter turbo4.*adapters/turbo4.safetensors beside its weights; pass one with --lora"):
        bare.sharing(Recipe(name="turbo", steps=4, adapters=Adapters((AdapterUse("model:turbo4"),))))
    write(model / "adapters" / "turbo4.safetensors", nfe="4", shift_video="6", shift_audio="3")
    turbo = open_pipeline(str(model), "turbo")
    assert turbo.source.identity == bare.source.identity
    settled = turbo.family.resolve(PLAIN, turbo.recipe)
    assert (settled.steps, settled.shifts, settled.recipe) == (4, (6, 3), "turbo") and settled.adapters


def test_jobs_with_and_without_adapters_share_the_weights(
    short_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in" / "a.safetensors", **CONTRACT)
    write(tmp_path / "in" / "b.safetensors", 2)
    common = {"prompt": "a red circle", "size": "96x64", "frames": 22, "seed": 1}
    adapters: list[dict[str, Any]] = [
        {"lora": "a.safetensors"},
        {"steps": 2},
        {"lora": [{"file": "a.safetensors"}, "b.safetensors:0.5"], "lora_fuse": True},
    ]
    jobs = tmp_path / "in" / "jobs.jsonl"
    jobs.write_text("\n".join(json.dumps(common | more) for more in adapters))
    ask = ["-m", str(short_model), "-q", "-o", str(tmp_path / "out"), "--name", "{index}"]
    loads: list[str] = []
    monkeypatch.setattr("videogen.pipeline.load_pipeline", _counting(loads))
    assert main(["render", *ask, str(jobs)]) == 0 and loads == ["t2va"]
    capsys.readouterr()
    records = [json.loads((tmp_path / "out" / f"{k}.json").read_text()) for k in (1, 2, 3)]
    assert [record["forwards"] for record in records] == [2, 2, 2]
    assert [len(record["adapters"]["attached"]) for record in records] == [1, 0, 2]
    assert len({record["job_id"] for record in records}) == 3 and str(tmp_path) not in json.dumps(records)
    moved = shutil.copy(tmp_path / "in" / "a.safetensors", tmp_path / "other.safetensors")
    options = ["--prompt", "a red circle", "--size", "96x64", "--frames", "22", "--seed", "1", "--json"]
    ids = []
    for words in ([], ["--lora", str(moved)], ["--lora", f"{moved}:0.5"]):
        assert main(["plan", *ask[:3], *options, "--steps", "2", *words]) == 0
        (row,) = json.loads(capsys.readouterr().out)["clips"]
        ids.append(row["job_id"])
    assert ids[:2] == [records[1]["job_id"], records[0]["job_id"]] and ids[2] not in ids[:2]
    assert main(["inspect", str(tmp_path / "out" / "3.mp4")]) == 0
    told = capsys.readouterr().out
    assert "adapter   b at strength 0.5, fused" in told and "contract  shift_audio 2.5, by file metadata of a.safetensors" in told
    assert main(["inspect", "--as-job", str(tmp_path / "out" / "3.mp4")]) == 0
    (tmp_path / "in" / "again.jsonl").write_text(capsys.readouterr().out)
    assert main(["plan", *ask[:3], "--json", str(tmp_path / "in" / "again.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["clips"][0]["job_id"] == records[2]["job_id"]


def _counting(loads: list[str]) -> Any:
    from videogen.load import load_pipeline

    def load(source: Any, workflow: str, **options: Any) -> Any:
        loads.append(workflow)
        return load_pipeline(source, workflow, **options)

    return load
