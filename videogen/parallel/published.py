"""Published timings of H3 that the cost model can express, each its author's claim (docs/parallel.md), and the model's error on them.

An engine on a device has one factor. It is solved from one row, marked as calibration; every other row is a prediction.
"""

from dataclasses import dataclass, replace

from videogen.parallel.plan import (
    EXACT_REST_S_PER_ROW,
    LINKS_GBS,
    PACKING_GBS,
    REST_S_PER_ROW,
    Device,
    Layout,
    Workload,
    h3,
    price,
)

CLIP, STEP = "clip s", "step s"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine on a device: its link, decoding of 124 frames on one device, and seconds outside denoising and decoding."""

    name: str
    link: str
    decode_s: float
    fixed_s: float
    is_decode_spread: bool = True
    rest_s_per_row: float = REST_S_PER_ROW
    packing_gbs: float = float("inf")


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure; `is_fitted`: another constant of the engine is from it, so that it is no prediction."""

    engine: Engine
    layout: Layout
    workload: Workload
    seconds: float
    what: str = CLIP
    note: str = ""
    is_fitted: bool = False


@dataclass(frozen=True, slots=True)
class Checked:
    """A row, what the model says, and whether the factor came from it."""

    row: Row
    predicted: float
    is_calibration: bool

    @property
    def is_prediction(self) -> bool:
        """Whether no constant is from it."""
        return not (self.is_calibration or self.row.is_fitted)

    @property
    def error(self) -> float:
        """Relative, signed: positive where the model is slower."""
        return self.predicted / self.row.seconds - 1


def _u(ranks: int, tensor: int = 1, weights: str = "whole") -> Layout:
    return Layout(1, ranks, tensor, weights)


def _t2va(frames: int, forwards: int = 49) -> Workload:
    return h3(f"{frames} f", frames, forwards=forwards)


def _fl2va(frames: int) -> Workload:
    return h3(f"{frames} f, keyframe", frames, keyframes=1)


SGLANG_H200 = Engine("SGLang, H200", "nvlink", 5.3, 0.8)
DIFFUSERS_H200 = Engine("diffusers, H200", "nvlink", 7.75, 1.0, is_decode_spread=False)
VLLM_H200 = Engine("vLLM-Omni, H200", "nvlink", 7.4, 1.0)
OURS_H200 = Engine("this project, plain, H200", "nvlink", 12.4, 2.1)
EXACT_H200 = Engine("this project, exact, H200", "nvlink", 3.91, 0.6, rest_s_per_row=EXACT_REST_S_PER_ROW, packing_gbs=PACKING_GBS)
SGLANG_B300 = Engine("SGLang, B300", "nvlink5", 5.1, 0.5)
DIFFUSERS_B300 = Engine("diffusers, B300", "nvlink5", 5.1, 1.0, is_decode_spread=False)
VLLM_B300 = Engine("vLLM-Omni, B300", "nvlink5", 4.0, 1.6)
VLLM_PRO_6000 = Engine("vLLM-Omni, RTX PRO 6000", "pcie5", 10.8, 0.5)
VLLM_PRO_5000 = Engine("vLLM-Omni, RTX PRO 5000", "pcie5", 14.0, 0.5)
VLLM_H20 = Engine("vLLM-Omni, H20-3e", "nvlink", 10.0, 0.5)
RUNNINGHUB_6000D = Engine("SGLang (RunningHub), RTX 6000D", "pcie5", 16.0, 1.0)

_PICTURES = h3("124 f, 2 pictures", 124, more_rows=14_599)
ROWS = (  # the first row of an engine calibrates it
    Row(OURS_H200, _u(1), _t2va(124), 6.504, STEP),
    Row(OURS_H200, _u(1), _t2va(345), 35.325, STEP),
    Row(OURS_H200, _u(1), _PICTURES, 10.858, STEP),
    Row(OURS_H200, _u(1), h3("345 f, 2 pictures", 345, more_rows=14_599), 45.004, STEP),
    Row(EXACT_H200, _u(1), _t2va(124), 5.956, STEP),
    Row(EXACT_H200, _u(1), _t2va(345), 34.348, STEP),
    Row(EXACT_H200, _u(1), _PICTURES, 10.153, STEP),
    Row(EXACT_H200, _u(2), _t2va(124), 3.176, STEP, "the packing rate is from this row", is_fitted=True),
    Row(EXACT_H200, _u(2), _t2va(345), 17.708, STEP, "two copies more than today"),
    Row(EXACT_H200, _u(2), _PICTURES, 5.354, STEP),
    Row(EXACT_H200, _u(1), _t2va(124, 8), 52.17),
    Row(EXACT_H200, _u(2), _t2va(124, 8), 28.10),
    Row(EXACT_H200, _u(1), replace(_PICTURES, forwards=8), 85.93),
    Row(EXACT_H200, _u(2), replace(_PICTURES, forwards=8), 46.22),
    Row(SGLANG_H200, _u(8), _t2va(124), 39.67),
    Row(SGLANG_H200, _u(8), _t2va(124), 0.749, STEP),
    Row(SGLANG_H200, _u(8), _t2va(243), 112.44),
    Row(SGLANG_H200, _u(4), _t2va(124), 74.38),
    Row(SGLANG_H200, _u(2, 2), _t2va(124), 78.33),
    Row(SGLANG_H200, _u(8), _fl2va(124), 41.31),
    Row(SGLANG_H200, _u(8), _fl2va(243), 114.02),
    Row(DIFFUSERS_H200, _u(8), _t2va(124), 74.34),
    Row(DIFFUSERS_H200, _u(8), _t2va(243), 207.71),
    Row(DIFFUSERS_H200, _u(8), _fl2va(124), 80.44),
    Row(DIFFUSERS_H200, _u(8), _fl2va(243), 217.31),
    Row(VLLM_H200, _u(4), _t2va(124), 85.49),
    Row(VLLM_H200, _u(1, 1, "offload"), _t2va(209), 14.19, STEP, "CPU offload, an earlier build"),
    Row(SGLANG_B300, _u(1), _t2va(124), 129.9),
    *(Row(SGLANG_B300, _u(n), _t2va(f), s) for n, f, s in ((4, 124, 35.3), (8, 124, 18.25), (1, 243, 376.9), (4, 243, 100.4))),
    *(Row(SGLANG_B300, _u(n), _t2va(f), s) for n, f, s in ((8, 243, 50.7), (1, 345, 746.9), (4, 345, 194.9), (8, 345, 99.5))),
    Row(DIFFUSERS_B300, _u(1), _t2va(124), 159.5),
    *(Row(DIFFUSERS_B300, _u(n), _t2va(f), s) for n, f, s in ((4, 124, 48.6), (8, 124, 30.7), (1, 243, 442.5), (4, 243, 127.5))),
    *(Row(DIFFUSERS_B300, _u(n), _t2va(f), s) for n, f, s in ((8, 243, 71.3), (1, 345, 847.5), (4, 345, 237.2), (8, 345, 131.6))),
    Row(VLLM_B300, _u(8), _t2va(243), 56.92),
    Row(VLLM_B300, _u(8), _t2va(243), 1.057, STEP),
    Row(VLLM_B300, _u(4), _fl2va(209), 86.96),
    *(Row(VLLM_B300, _u(8), _t2va(f, 4), s, CLIP, "FastH3, 4 forwards") for f, s in ((124, 4.5), (243, 8.7), (345, 14.1))),
    Row(VLLM_PRO_6000, _u(4), _t2va(124), 172.3),
    Row(VLLM_PRO_6000, _u(4), _t2va(124), 3.38, STEP),
    Row(VLLM_PRO_6000, _u(2), _t2va(124), 284.8),
    Row(VLLM_PRO_6000, _u(8), _t2va(124), 90.5),
    Row(VLLM_PRO_6000, _u(8), _t2va(124), 1.76, STEP),
    Row(VLLM_PRO_5000, _u(4), _t2va(124), 284.0),
    Row(VLLM_PRO_5000, _u(8), _t2va(124), 163.2),
    Row(VLLM_PRO_5000, _u(2, 1, "fsdp"), _t2va(124), 515.6, CLIP, "layers distributed over two"),
    Row(RUNNINGHUB_6000D, _u(2, 2), _t2va(124), 348.8),
    Row(RUNNINGHUB_6000D, _u(2, 2), _t2va(124, 8), 60.0, CLIP, "Turbo, 8 forwards"),
    Row(VLLM_H20, _u(1, 2), _t2va(124), 637.9, CLIP, "length not visible, taken as 5 s"),
    Row(VLLM_H20, _u(2, 2), _t2va(124), 327.9, CLIP, "as above"),
    Row(VLLM_H20, _u(4, 2), _t2va(124), 168.1, CLIP, "as above"),
    Row(VLLM_H20, _u(8), _t2va(124), 167.0, CLIP, "as above"),
)


def predict(row: Row, factor: float) -> float:
    """The model's seconds for a row."""
    engine = row.engine
    device = Device(
        engine.name,
        factor,
        memory_gib=1e9,
        link=engine.link,
        decode_s=engine.decode_s,
        fixed_s=engine.fixed_s,
        is_decode_spread=engine.is_decode_spread,
        rest_s_per_row=engine.rest_s_per_row,
        packing_gbs=engine.packing_gbs,
    )
    cost = price(row.workload, device, row.layout, LINKS_GBS[engine.link])
    return cost.clip_s if row.what == CLIP else cost.forward_s


def calibrate(row: Row) -> float:
    """The factor with which the model gives this row exactly; the model is affine in it where no weights stream."""
    low, high = predict(replace(row, layout=replace(row.layout, weights="whole")), 0.0), predict(row, 1.0)
    return (row.seconds - low) / (high - low)


def check(rows: tuple[Row, ...] = ROWS) -> list[Checked]:
    """Every row with what the model says of it."""
    factors: dict[str, float] = {}
    checked = []
    for row in rows:
        is_calibration = row.engine.name not in factors
        factor = factors.setdefault(row.engine.name, calibrate(row) if is_calibration else 0.0)
        checked.append(Checked(row, predict(row, factor), is_calibration))
    return checked
