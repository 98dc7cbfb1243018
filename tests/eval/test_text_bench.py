"""The text bench at toy size: every kind of part leaves its rows, and one that fails leaves the reason."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from eval.text_bench import RESULT, TOYS, run, table


def test_parts_are_written_as_they_come_and_a_failure_stays_its_own(tmp_path: Path) -> None:
    failing = replace(TOYS[2], engine="batching")
    rows = run([failing, replace(TOYS[2], lengths=(32, 8192), levels=(), most=64)], torch.device("cpu"), torch.float32, tmp_path)
    assert json.loads((tmp_path / RESULT).read_text())["rows"] == rows and len(rows) == 2
    assert "--engine" in rows[0]["error"]
    assert rows[1]["prefill"][0]["n"] == 1 and "at most" in rows[1]["prefill"][1]["refused"]
    assert rows[1]["growth"]["tokens"] == 64 and "loads" not in rows[1]
    text = "\n".join(table(rows))
    assert "prefix snapshots | prefill 32, 32 a forward" in text and "not tried beyond 64" in text and "--engine" in text
