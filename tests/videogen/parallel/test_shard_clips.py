"""Whole clips over two ranks at toy size: both layouts make the same clips, and the planner is asked where it knows the workload."""

from pathlib import Path
from typing import Any

import pytest

from eval import shard_clips
from eval.cases import Workload
from eval.launch import link_gbs
from tests.videogen.parallel.worlds import forked, in_world
from videogen.errors import RequestError
from videogen.parallel.comm import Peers
from videogen.parallel.sequence import Ulysses
from videogen.pipeline import Pipeline


def test_both_layouts_make_the_same_clips(four_heads: Pipeline, tmp_path: Path) -> None:
    workload = Workload("tiny", "pocket", (96, 64), 22, 3)

    def job(peers: Peers) -> list[dict[str, Any]]:
        bench = shard_clips.Bench(four_heads, four_heads.sharing(four_heads.recipe, Ulysses(peers)), peers)
        return [*bench.rows(workload, 2)]

    for rows in forked(tmp_path, 2, lambda rank: in_world(tmp_path, rank, 2, job)):
        assert [(row["layout"], row["clips"]) for row in rows] == [(shard_clips.REPLICAS, 4), (shard_clips.OVER, 2)]
        assert all(row["video_equal"] and row["sound_equal"] and not row["broken"] and row["clips_per_hour"] > 0 for row in rows)
        report = {"ranks": 2, "recipe": "exact", "weights": "whole", "fingerprint": {"gpus": []}}
        told = shard_clips.table(report | {"workloads": [{"name": "tiny", "steps": 3, "planner": None, "rows": rows}]})
        assert "one over all ranks | 2 |" in told


def test_the_planner_is_asked_where_it_knows_the_workload() -> None:
    known = shard_clips.priced(Workload("h3-t2va-5s", "random:h3", (1344, 768), 124, 8), 2, 290.0, "whole")
    assert known is not None and known[shard_clips.REPLICAS] > known[shard_clips.OVER] > 60
    assert shard_clips.priced(Workload("tiny", "pocket", (96, 64), 22, 3), 2, 290.0, "whole") is None


def test_a_workload_whose_message_was_not_sent_takes_the_slowest_rate() -> None:
    assert [link_gbs({"a": 310.0, "b": 290.0}, name) for name in ("a", "c")] == [310.0, 290.0]
    assert link_gbs({}, "a") == 0.0


def test_one_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="torchrun"):
        shard_clips.main(["--workload", "pocket-small", "--out", str(tmp_path / "a")])
