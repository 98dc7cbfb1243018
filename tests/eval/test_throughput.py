"""The arithmetic of a measurement, on a fake clock: order, windows, counts, ratios."""

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eval.energy import EnergyMeter
from eval.throughput import ClipRow, Cold, Finish, Made, arm_order, measure, speed_up, summarize, warm_up, window_s
from eval.timing import time_call
from videogen.errors import RequestError


class FakeClock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def make_arm(clock: FakeClock, seconds: float, broken: Callable[[int], str] = lambda _pair: "") -> Callable[[int], Finish]:
    def arm(pair: int) -> Finish:
        clock.time += seconds

        def finish() -> Made:
            clock.time += 1.0
            return Made({"denoise": seconds, "encode": 1.0}, 4, 1, broken(pair))

        return finish

    return arm


def test_the_order_is_abba() -> None:
    assert list(itertools.islice(arm_order(["A", "B"]), 6)) == [(0, "A"), (0, "B"), (1, "B"), (1, "A"), (2, "A"), (2, "B")]


def test_both_limits_must_be_met_and_pairs_are_whole() -> None:
    clock = FakeClock()
    rows = measure({"a": make_arm(clock, 4), "b": make_arm(clock, 1)}, min_clips=2, min_seconds=20, clock=clock)
    assert [row.arm for row in rows] == ["a", "b", "b", "a", "a", "b"]
    assert {row.pair for row in rows if row.arm == "a"} == {row.pair for row in rows if row.arm == "b"}


def test_figures_of_an_arm() -> None:
    clock = FakeClock()
    arms = {"a": make_arm(clock, 4), "b": make_arm(clock, 1, lambda pair: "black" if pair == 1 else "")}
    cold = Cold({"a": 10.0, "b": 10.0}, warm_up(arms, 2, clock))
    assert cold.warmup_s == {"a": [5.0, 5.0], "b": [2.0, 2.0]}
    rows = measure(arms, min_clips=4, min_seconds=0, clock=clock)
    a, b = (summarize(rows, name, cold, gpus=0) for name in "ab")
    assert a["clips_per_hour_machine"] == pytest.approx(720) and a["clips_per_hour_per_gpu"] is None
    assert a["clips_per_hour_cold"] == pytest.approx(3600 * 4 / (20 + 20))
    assert b["broken"] == 1 and b["clips_per_hour_machine"] == pytest.approx(3600 * 3 / 8)
    assert a["latency_s"]["P50"] == "n/a (n=4)" and a["ms_per_forward"] == pytest.approx(4000 / 3)
    assert a["stages_s"] == {"denoise": 4, "encode": 1.0}
    ratio = speed_up(rows, "a", "b")
    assert ratio["pairs"] == 3 and ratio["ratio"]["value"] == pytest.approx(2.5) and "cpu_ratio" not in ratio
    counted = [replace(row, cpu_s=6.0 if row.arm == "a" else 4.0) for row in rows]
    assert speed_up(counted, "a", "b")["cpu_ratio"]["value"] == pytest.approx(1.5)
    assert summarize(counted, "a", cold, gpus=0)["cpu_s_per_clip"] == 6.0
    assert summarize(rows, "a", cold, gpus=2)["gpu_seconds_per_clip"] == pytest.approx(10)


def test_getting_an_arm_ready_is_on_nobodys_clock_and_memory_and_energy_stay_with_their_arm() -> None:
    clock, readied = FakeClock(), []

    def ready(name: str) -> None:
        readied.append(name)
        clock.time += 100.0

    def arm(peak_mb: float, energy_wh: float | None) -> Callable[[int], Finish]:
        return lambda _pair: lambda: Made({}, 1, broken="black" if _pair == 0 else "", peak_mb=peak_mb + _pair, energy_wh=energy_wh)

    rows = measure({"a": arm(10, 6.0), "b": arm(20, None)}, min_clips=3, min_seconds=0, clock=clock, ready=ready)
    assert readied == ["a", "b", "b", "a", "a", "b"] and sum(row.seconds for row in rows) == 0
    a, b = (summarize(rows, name, Cold(), gpus=1) for name in "ab")
    assert (a["peak_device_mb"], b["peak_device_mb"]) == (12, 22)
    assert a["energy_wh_per_clip"] == 9.0 and b["energy_wh_per_clip"] is None  # two whole clips carry the third's


def test_energy_is_read_from_the_device_that_cuda_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def handle(uuid: str) -> str:
        if uuid != "GPU-ab-12":
            raise NVMLError
        return uuid

    counted = iter([3.6e6, 10.8e6])
    fake = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetTotalEnergyConsumption=lambda _handle: next(counted),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    seen = SimpleNamespace(uuid="ab-12")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _device: seen)
    meter = EnergyMeter(torch.device("cuda"))
    assert (meter.read_wh(), meter.read_wh()) == (1.0, 3.0) and EnergyMeter(torch.device("cpu")).read_wh() is None
    seen.uuid = "MIG"
    assert EnergyMeter(torch.device("cuda")).read_wh() is None


def test_overlapping_clips_count_once() -> None:
    rows = [ClipRow("a", k, k, began, ended, {}, 1) for k, (began, ended) in enumerate([(0, 4), (3, 6), (10, 12)])]
    assert window_s(rows) == 8.0


def test_in_flight_renders_on_while_encoding_and_loses_no_clip() -> None:
    clock = FakeClock()
    rows = measure({"a": make_arm(clock, 2)}, min_clips=5, min_seconds=0, clock=clock, in_flight=3)
    assert sorted(row.pair for row in rows) == [0, 1, 2, 3, 4]
    with pytest.raises(RequestError, match="--in-flight with --vs"):
        measure({"a": make_arm(clock, 2), "b": make_arm(clock, 2)}, min_clips=1, min_seconds=0, clock=clock, in_flight=2)


def test_timing_warms_up_waits_and_keeps_every_run() -> None:
    clock, waits, calls = FakeClock(), [0], [0]

    def call() -> None:
        calls[0] += 1
        clock.time += 1.0 + calls[0]

    def wait() -> None:
        waits[0] += 1
        clock.time += 0.5

    timing = time_call(call, runs=5, warmup=2, synchronize=wait, clock=clock)
    assert timing.runs_s == (4.5, 5.5, 6.5, 7.5, 8.5) and timing.median_s == 6.5 and waits == [6]
    assert timing.spread == pytest.approx(4 / 6.5) and timing.row()["runs"] == 5
    with pytest.raises(ValueError, match="at least 5"):
        time_call(call, runs=3)
