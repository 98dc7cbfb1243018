"""Two ranks beside one alone at toy size: equal velocities and frames where they compute the same, a planner that is not asked in vain."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eval import shard_times
from eval.cases import Workload, make_request
from eval.staged import Components, StagedClip
from tests.videogen.parallel.worlds import CPU, forked, in_world
from videogen.attention.options import SparseAttention
from videogen.config import Recipe
from videogen.errors import RequestError
from videogen.parallel.comm import Peers
from videogen.pipeline import Pipeline


def test_two_ranks_give_what_one_gives(four_heads: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(SparseAttention, min_rows=0, tile=(2, 2, 2), block=(16, 16))
    monkeypatch.setattr(shard_times, "SparseAttention", small)
    request = make_request(Workload("tiny", "pocket", (96, 64), 22, 2), 3)
    resolved = four_heads.family.resolve(request, Recipe())

    def job(peers: Peers) -> dict[str, Any]:
        components = Components(four_heads.source, CPU, four_heads.dtype)
        plan = shard_times.Plan((1,), 0.5, True)
        return shard_times.run_plan(plan, components, [StagedClip("tiny", resolved)], peers, lambda _: None)

    for report in forked(tmp_path, 2, lambda rank: in_world(tmp_path, rank, 2, job)):
        entry = report["workloads"]["tiny"]
        assert entry["planner"] is None and report["link_gbs"]["h3-t2va-5s"] > 0
        rows = {row["arm"]: row for row in entry["forward"]}
        real = [row for name, row in rows.items() if "without link" not in name]
        assert len(real) == 5 and all(row["l2_to_alone"] < 5e-3 and row["ranks_equal"] for row in real)
        assert rows["without link"]["l2_to_alone"] is None
        assert {name for name, row in rows.items() if row["attention"]["backend"] != "dense"} == {name for name in rows if "sparse" in name}
        assert [row["most"] for row in entry["decode"]] == [0, 0]
        assert "over ranks, 4 head groups" in shard_times.table(report)
    assert shard_times.priced("h3-t2va-5s", 2, 290.0)["over_ranks_s"] == pytest.approx(3.18, abs=0.05)  # type: ignore[index]
    with pytest.raises(RequestError, match="torchrun"):
        shard_times.main(["--workload", "pocket-small", "--out", str(tmp_path / "a")])
