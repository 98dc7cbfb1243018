"""The cost model stays near what others published, ranks layouts as they do, and says why it chooses."""

import json
from dataclasses import replace

import pytest

from videogen.cli.main import main
from videogen.errors import RequestError
from videogen.families.h3 import H3Family, read_geometry
from videogen.parallel import published
from videogen.parallel.plan import (
    DEVICES,
    GIB,
    HEADS,
    WORKLOADS,
    Device,
    Layout,
    compute_s,
    exchange_gb,
    layouts,
    link_gbs,
    memory_gib,
    price,
    rank,
)
from videogen.source import find_model

FIVE, FIFTEEN = WORKLOADS["h3-t2va-5s"], WORKLOADS["h3-t2va-15s"]
H200, PRO = DEVICES["h200"], DEVICES["rtx-pro-6000"]


def test_every_published_row_is_met_within_a_quarter() -> None:
    checked = published.check()
    predictions = [each for each in checked if each.is_prediction]
    assert len(predictions) == len(checked) - len({row.engine.name for row in published.ROWS}) - 1 > 40  # the packing rate is from one more
    assert max(abs(each.error) for each in predictions) < 0.25
    assert all(abs(each.error) < 1e-9 for each in checked if each.is_calibration)
    for name, engine in (("b300", "SGLang, B300"), ("rtx-pro-6000", "vLLM-Omni, RTX PRO 6000"), ("h200", "this project, exact, H200")):
        row = next(each.row for each in checked if each.row.engine.name == engine)
        assert published.calibrate(row) == pytest.approx(DEVICES[name].factor, rel=0.01)


@pytest.mark.parametrize(
    ("better", "worse", "workload", "device", "why"),
    [
        (Layout(1, 4), Layout(1, 2, 2), FIVE, H200, "SGLang, 4 x H200: 74.38 against 78.33 s"),
        (Layout(1, 4, 2), Layout(1, 2, 4), FIFTEEN, DEVICES["rtx-6000d"], "RunningHub, 8 x RTX 6000D: TP4 x U2 12 % slower"),
        (Layout(1, 2, 2), Layout(1, 1, 4), FIVE, H200, "SGLang, 4 x H100: 13.25 against 13.86 s"),
        (Layout(1, 8), Layout(1, 4), FIVE, PRO, "vLLM-Omni, RTX PRO 6000: 90.5 against 172.3 s"),
    ],
)
def test_layouts_rank_as_published(better: Layout, worse: Layout, workload: object, device: Device, why: str) -> None:
    times = [price(workload, device, layout, link_gbs(device.link)).forward_s for layout in (better, worse)]  # type: ignore[arg-type]
    assert times[0] < times[1], why


def test_replicas_make_more_clips_and_ranks_make_one_sooner_as_published_for_b300() -> None:
    plan = rank(FIVE, DEVICES["b300"], layouts(8), link_gbs("nvlink5"), 16)  # 16.2 s a clip in replicas, 18.25 s over eight
    assert plan.throughput[0].layout == Layout(8, 1) and plan.latency[0].layout == Layout(1, 8)
    assert plan.throughput[0].clips_per_hour(16) == pytest.approx(3600 / 16.2, rel=0.05)
    assert any("costs" in line for line in plan.why(16))


def test_memory_rules_layouts_out_and_streams_weights_instead() -> None:
    plan = rank(FIFTEEN, replace(PRO, memory_gib=10), layouts(4), 45, 8)
    assert not plan.throughput and "nothing fits: the smallest, 1 x U4 offload, text by layers" in plan.why(8)[0]
    plan = rank(FIFTEEN, replace(PRO, memory_gib=30), layouts(4), 45, 8)
    assert plan.throughput and all(cost.text == "offload" for cost in plan.throughput)
    kinds = [price(FIFTEEN, replace(PRO, memory_gib=room), Layout(4, weights="offload"), 45) for room in (95, 58, 30)]
    assert [cost.text for cost in kinds] == ["resident", "visiting", "offload"]
    assert [cost.clip_s - kinds[0].clip_s for cost in kinds[1:]] == [pytest.approx(51.5 / 25)] * 2
    assert kinds[2].memory_gib < kinds[1].memory_gib < kinds[0].memory_gib
    assert memory_gib(FIVE, Layout(weights="offload"), "offload") == pytest.approx(
        12.75 + 0.5, rel=0.05
    )  # reserved by torch, and the context
    slow = rank(replace(FIVE, rows=2_000), H200, [Layout(4, 1, weights="offload"), Layout(4, 1)], 45, 8)
    assert slow.throughput[0].layout.weights == "whole" and slow.throughput[1].stream_s > slow.throughput[1].compute_s


def test_few_clips_are_not_worth_many_replicas() -> None:
    assert rank(FIVE, H200, layouts(8), 300, 1).throughput[0].layout == Layout(1, 8)
    cost = price(FIVE, H200, Layout(4, 2), 300)
    assert cost.mean_wait_s(6) == pytest.approx(cost.clip_s * (4 * 1 + 2 * 2) / 6) and cost.waves(6) == 2


def test_the_parts_of_the_model_are_what_they_are_said_to_be() -> None:
    assert exchange_gb(FIVE, Layout(1, 8)) == pytest.approx(11.9, rel=0.01)  # 237 MB a layer
    assert exchange_gb(FIVE, Layout()) == 0
    even, uneven = (compute_s(FIVE, H200, Layout(1, ranks)) * ranks / compute_s(FIVE, H200, Layout()) for ranks in (8, 6))
    assert even == pytest.approx(1, abs=1e-3) and uneven > 1.02  # 56 heads over 6 ranks: one has 10
    assert memory_gib(FIVE, Layout()) - 51.5 / GIB == pytest.approx(74.5, rel=0.05)  # measured without the text encoder
    geometry = read_geometry(find_model("random:h3").folder, {})
    assert geometry.num_layers * geometry.attention_dim == 50 * HEADS * 128 and isinstance(H3Family(geometry), H3Family)


def test_the_command_prints_layouts_and_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--workload", "h3-t2va-15s", "--gpus", "8", "--gpu", "rtx-6000d", "--link", "pcie4", "--memory-gib", "84"]
    assert main([*words, "--in-flight", "16"]) == 0
    told = capsys.readouterr().out
    assert (
        "most clips: 8 x U1 parked, text by layers" in told
        and "8 x U1, text by layers needs 88 of 84" in told
        and "Modelled, not measured" in told
    )
    assert main([*words, "--steps", "4", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["workload"]["forwards"] == 4 and record["throughput"][0]["clips_per_hour"] > 30
    assert main(["plan", "--check-model"]) == 0 and "median error" in capsys.readouterr().out
    assert main([*words, "--link", "string"]) == 2 and main([*words, "--prompt", "a"]) == 2 and main([*words, "--gpus", "0"]) == 2
    with pytest.raises(RequestError, match="pcie5"):
        link_gbs("-3")
