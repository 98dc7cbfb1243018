"""The ladder and the kernel check at toy size: what is measured is what runs, and a lever that is off says why."""

import json
from pathlib import Path

import pytest

from eval import cases, kernel_check, ladder
from videogen.errors import EnvironmentFault


def test_the_ladder_names_every_lever_and_holds_the_exact_ones_equal(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cases.WORKLOADS, "tiny", cases.Workload("tiny", str(tiny_model), (96, 64), 22, 2))
    ladder.main(["--workload", "tiny", "--forwards", "2", "--decode", "1", "--device", "cpu", "--out", str(tmp_path / "a")])
    report = json.loads((tmp_path / "a" / "ladder.json").read_text())
    rows = {row["lever"]: row for row in report["forward"]}
    assert list(rows) == ["plain diffusers", *(f"+ {name}" for name in ladder.LEVERS)]
    for name in ("plain diffusers", "+ rope_tables", "+ refined_text", "+ lean_loop", "+ adaln_tables"):
        assert rows[name]["l2_to_plain"] == 0 and rows[name]["runs"] == 2
    assert rows["+ adaln_tables"]["told"] == {"adaln_tables": "made"}
    assert "host memory" in rows["+ park_adaln"]["reason"] and "Triton" in rows["+ kernels"]["reason"]
    assert [(row["most"], row["mean"]) for row in report["decode"]] == [(0, 0.0), (0, 0.0)]
    assert "| + park_adaln | off: the weights are in host memory already |" in (tmp_path / "a" / "ladder.md").read_text()


def test_the_kernel_check_refuses_or_runs_the_block_alone(tiny_model: Path, tmp_path: Path) -> None:
    options = ["--model", str(tiny_model), "--rows", "30", "--dtype", "float32", "--device", "cpu", "--runs", "1"]
    with pytest.raises(EnvironmentFault, match=r"kernels: got Triton .*, expected a GPU"):
        kernel_check.main([*options, "--out", str(tmp_path / "a")])
    kernel_check.main([*options, "--block-only", "--out", str(tmp_path / "b")])
    report = json.loads((tmp_path / "b" / "kernel_check.json").read_text())
    assert [(row["block"], row["l2_to_stock"]) for row in report["blocks"]] == [("stock", 0.0), ("kernels", 0.0)]
    config = json.loads((tiny_model / "transformer" / "config.json").read_text())
    assert kernel_check.shape_of(config, 30).rotated == 6 * config["rope_freq_dim"]
