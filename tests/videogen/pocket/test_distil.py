"""Distillation of the pocket transformer at toy size: the student's forward, trajectories, stages, checkpoints, the gate's table."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eval.distil_gate import Arm, Found, report
from lora.apply import Use, attached
from lora.convert import load_adapter
from lora.target import target_of
from tests.videogen.pocket.test_packed import tiny
from videogen.cli.main import USAGE, main
from videogen.errors import RequestError
from videogen.pocket import packed, sizes
from videogen.pocket.bank import Part, Shape, Teaching, build_bank
from videogen.pocket.distil import export
from videogen.pocket.distil_options import DistilOptions
from videogen.pocket.distiller import Distiller
from videogen.pocket.matching import Matching
from videogen.pocket.packed import PackedForward
from videogen.pocket.ranks import Ranks
from videogen.pocket.steps import Steps
from videogen.pocket.training import Log
from videogen.pocket.warp import WARPS

ROWS = packed.layout([1, 1, 1], "t", (2, 12, 20), 8, (4, 4))
SHIFTS = (3.0, 12.0)
CPU = torch.device("cpu")


def toy_bank(model: torch.nn.Module, options: DistilOptions, size: int = 4) -> tuple[list[Part], list[Shape]]:
    rng = torch.Generator().manual_seed(3)
    text = torch.randn(6, 3, sizes.TEXT_DIM, generator=rng)
    bucket = SimpleNamespace(kind="t", tags=[1, 1, 1], clip=torch.arange(6), text=text, canvas=sizes.SMALL)
    cache = SimpleNamespace(models=SimpleNamespace(device=CPU), condition=lambda b, i, n: torch.zeros(len(i), 0, 96))
    shapes = [Shape(cache, bucket, 5, ROWS, 1.0)]
    how = Teaching(PackedForward(model, dtype=torch.float32), 6, SHIFTS, [1.0, 0.6, 0.0], ROWS.length * size)
    return build_bank(shapes, how, 1, held=2, least=1, is_over=lambda: True), shapes


def toy_run(folder: Path, **changes: object) -> Distiller:
    options = DistilOptions(folder=folder, out=folder, forwards=2, teacher=6, rank=2, adaln_rank=1, steps=4, row_budget=400, warp=0.5)
    options = replace(options, **changes)
    torch.manual_seed(0)
    model = tiny()
    run = Distiller(options, Ranks(0, 1, CPU), Log(folder / "log.jsonl", "toy"), model, SHIFTS)
    _, shapes = toy_bank(model, options)
    run.gather([], shapes, lambda share: True)
    return run


def test_the_student_is_the_base_until_it_learns_and_then_what_is_applied(tmp_path: Path) -> None:
    run = toy_run(tmp_path)
    part = run.parts[0]
    index = torch.arange(2)
    state = tuple(s[0, index] for s in part.states)
    levels = (torch.tensor([0.5, 0.9]), torch.tensor([0.8, 0.6]))

    def both(call) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([x.flatten() for x in part.velocity(call, index)(state, levels)])

    base = both(run.teacher)
    assert torch.equal(both(run.whole.using(run.student)), base)
    with torch.no_grad():
        for up in run.student.ups:
            up.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    learnt = both(run.whole.using(run.student))
    assert float((learnt - base).norm() / base.norm()) > 0.1 and torch.equal(both(run.teacher), base)
    written = export(run)
    adapter = load_adapter(Path(written["file"]), target_of(run.model))
    assert written["contract"] == {
        "nfe": "2",
        "shift_video": "6.0",
        "shift_audio": "1.5",
        "strength": "1.0",
        "trained_size": "160x96",
    }
    with attached(run.model, [Use(adapter)], fuse=True):
        fused = both(run.teacher)
    assert float((fused - learnt).norm() / learnt.norm()) < 0.01  # bfloat16 factors
    assert torch.equal(both(run.teacher), base)


def test_trajectories_end_where_plain_sampling_ends(tmp_path: Path) -> None:
    model = tiny()
    parts, _ = toy_bank(model, DistilOptions(folder=tmp_path, out=tmp_path, forwards=2))
    (part,) = parts
    assert part.held == 2 and part.count == 2 and part.states[0].shape[:2] == (3, 4)
    again = torch.Generator().manual_seed(1)
    torch.randint(6, (4,), generator=again)
    torch.randn(4, 0, 96, generator=again)
    forward = PackedForward(model, dtype=torch.float32)
    plain = packed.sample(forward, ROWS, part.text, part.condition, (sizes.AUDIO_CHANNELS, 96), 6, SHIFTS, again)
    for kept, end in zip(part.states, plain):
        torch.testing.assert_close(kept[-1], end, atol=1e-5, rtol=1e-4)


def test_stages_bring_the_student_nearer_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    run = toy_run(tmp_path)
    before = run.compare("before", with_base=True)
    assert before["student"]["video_db"] < before["base@6"]["video_db"]
    run.run("regress", run.regress, 0.02, 0.0)
    run.run("rollout", run.unroll, 0.02, 0.0)
    assert run.finished == ["regress", "rollout"] and run.steps == 8
    found = torch.stack([run.unroll(run.parts[0]) for _ in range(3)]).mean()
    with torch.no_grad():
        for up in run.student.ups:
            up.zero_()
    assert float(found.detach()) < float(run.unroll(run.parts[0]).detach())

    first = toy_run(tmp_path)
    advance = Steps(first.student, first.ranks, rate=0.01, muon_rate=0.0)
    for _ in range(3):
        advance("a", lambda: first.regress(first.parts[0]))
    first.spent, first.steps = 0.5, 3
    first.save("regress", advance)
    second = toy_run(tmp_path)
    second.resume()
    assert second.spent == 0.5 and second.steps == 3
    assert all(torch.equal(a, b) for a, b in zip(first.student.ups, second.student.ups))
    second.run("regress", second.regress, 0.01, 0.0)
    assert second.steps == 5 and second.finished == ["regress"]  # the other half of four
    third = toy_run(tmp_path)
    third.resume()
    assert third.finished == ["regress"] and all(torch.equal(a, b) for a, b in zip(second.student.ups, third.student.ups))
    with pytest.raises(RequestError, match="checkpoint"):
        toy_run(tmp_path, rank=3).resume()


def test_a_stage_that_made_it_worse_is_undone(tmp_path: Path) -> None:
    run = toy_run(tmp_path)
    kept = [up.clone() for up in run.student.ups]
    with run.keeping_better(), torch.no_grad():
        for up in run.student.ups:
            up.normal_()
    assert all(torch.equal(a, b) for a, b in zip(kept, run.student.ups))


def test_matching_ends_by_its_clock_and_keeps_the_best_look(tmp_path: Path) -> None:
    run = toy_run(tmp_path)
    kept = [up.clone() for up in run.student.ups]
    assert Matching(run)(0.0) == "its time was over"
    assert all(torch.equal(a, b) for a, b in zip(kept, run.student.ups))  # ten steps of the fake, none of the student


def test_the_warp_is_chosen_where_the_undistilled_model_ends_nearest(tmp_path: Path) -> None:
    run = toy_run(tmp_path, warp=0.0)
    rows = [line for line in (tmp_path / "log.jsonl").read_text().splitlines() if '"score"' in line]
    scores = {row["warp"]: row["score"] for row in map(json.loads, rows)}
    assert list(scores) == list(WARPS) and run.warp == max(scores, key=lambda warp: scores[warp])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--forwards", "0"], "--forwards"), (["--teacher", "2"], "--teacher"), (["--folder", "random"], "a folder with weights")],
)
def test_wrong_options(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lora", "distil", "--out", str(tmp_path), *arguments]) == USAGE
    assert words in capsys.readouterr().err


def test_the_gate_compares_request_by_request() -> None:
    arms = [Arm(f"base@{n}", n, SHIFTS) for n in (49, 12, 24)] + [Arm("turbo4@4", 4, SHIFTS, SimpleNamespace())]
    right = torch.ones(50)
    wrong = right.clone()
    wrong[:2] = 0
    found = {arm.name: Found({"a": right, "b": right}, torch.full((50,), float(arm.forwards)), {}) for arm in arms}
    found["turbo4@4"] = Found({"a": right, "b": wrong}, torch.full((50,), 12.5), {"first_db": 30.0})
    rows = report(found, arms)
    row = rows["turbo4@4"]
    assert row["b"][0] == 0.96 and row["mean accuracy"][0] == 0.98 and row["all together - teacher"][0] == -0.04 and row["first_db"] == 30.0
    assert row["gate"] == {"accuracy": [True, False], "psnr": True, "margin": 0.02, "base": 12} and "gate" not in rows["base@12"]
