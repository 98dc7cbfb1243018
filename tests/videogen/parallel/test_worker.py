"""The command itself as ranks of one clip: what a launcher's processes do, and that the clip is the one of a single process."""

import json
import os
import socket
from pathlib import Path

import pytest

from tests.videogen.parallel.worlds import forked
from videogen.cli.main import main
from videogen.config import Recipe, Request
from videogen.pipeline import Pipeline


def test_two_ranks_of_a_launcher_render_the_clip_of_one(four_heads: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    wanted = four_heads.sharing(Recipe()).render(Request("a circle", size=(96, 64), frames=22, steps=1, seed=3)).record
    shape = ["--size", "96x64", "--frames", "22", "--steps", "1", "--seed", "3"]
    how = ["--model", str(four_heads.source.folder), "--recipe", "plain", "--device", "cpu", "--ulysses", "2", "-q"]

    def rank(number: int) -> int:
        os.environ.update({"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"})
        return main(["render", "--prompt", "a circle", *shape, *how, "-o", str(tmp_path / "out")])

    assert forked(tmp_path, 2, rank) == [0, 0]
    (sidecar,) = (tmp_path / "out").glob("*.json")
    record = json.loads(sidecar.read_text())
    assert record["parallel"] == "ulysses 2" and record["output"]["frames_sha256"] == wanted["output"]["frames_sha256"]
