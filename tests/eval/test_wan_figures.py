"""The figures of issue 13 at toy size: the fixed list reuses half of each stream, dense clips scale, a CPU is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from eval.arms import open_arms
from eval.cases import find_workload
from eval.wan_figures import WORKLOAD, arms, main, measure, parse_plan
from tests.videogen.families.wan_toy import save
from videogen.errors import EnvironmentFault, RequestError


def test_the_arms_at_toy_size(tmp_path: Path) -> None:
    model = str(save(tmp_path / "two", "two"))
    recipes = arms("native", 0.25, min_rows=0, tile=(2, 2, 2), block=(8, 4))
    plan = parse_plan("dense:3,all:20,guarded:2", [*recipes])
    pipelines = open_arms(model, {name: recipes[name] for name, _ in plan}, "cpu")
    dense, whole, guarded = measure(pipelines, plan, replace(find_workload(WORKLOAD), size=(128, 64), frames=9))
    assert dense["calls"] == {"all": 6, "reused": 0} and dense["seconds_at_workload_steps"] > dense["seconds"]
    assert whole["calls"] == {"all": 40, "reused": 20} and whole["seconds_at_workload_steps"] == pytest.approx(whole["seconds"])
    assert [each["kept_blocks"] for each in whole["attention"]["experts"]] == [0.25, 0.25] and not whole["broken"]
    assert whole["attention"]["guard"] is None and guarded["attention"]["guard"] is not None
    with pytest.raises(RequestError, match="ARM:STEPS"):
        parse_plan("dense", [*recipes])
    with pytest.raises(EnvironmentFault, match="a GPU"):
        main(["--model", model, "--device", "cpu", "--out", str(tmp_path / "out")])
