"""What is decided on plain values: options, implementations, the guard's ladder."""

import math
from dataclasses import replace
from typing import Any

import pytest

from videogen.attention.guard import Verdict, is_probed, judge, judge_request
from videogen.attention.options import Guard, SparseAttention
from videogen.attention.select import Machine, choose
from videogen.errors import EnvironmentFault, RequestError

ON, GUARD = SparseAttention(budget=0.25), Guard()
H200 = Machine("cuda", (9, 0), True, "bfloat16", 128, 56)
CPU = Machine("cpu", None, True, "float32", 64, 4)
REAL: dict[str, Any] = {"first": 444, "rows": 444 + 37 * 24 * 42, "grid": (37, 24, 42)}
POCKET: dict[str, Any] = {"first": 420, "rows": 420 + 2220, "grid": (37, 6, 10)}

CHOICES = [
    (ON, H200, REAL, "triton", ""),
    (replace(ON, backend="flex"), H200, REAL, "flex", ""),
    (ON, CPU, POCKET, "gather", ""),
    (SparseAttention(), H200, REAL, "dense", "off"),
    (ON, H200, POCKET, "dense", "short: 2640 rows, worth it from 16384"),
    (ON, CPU, {"first": 86, "rows": 86 + 112, "grid": (7, 4, 4)}, "dense", "short: 198 rows, worth it from 1024"),
    (replace(ON, min_rows=0), CPU, {"first": 86, "rows": 86 + 112, "grid": (7, 4, 4)}, "dense", "fewer than 8 key blocks"),
    (ON, H200, REAL | {"rows": 40_000}, "dense", "no grid of 37x24x42"),
    (ON, replace(H200, ring=2), REAL, "dense", "ring attention over 2 devices"),
    (ON, replace(H200, ulysses=3), REAL, "dense", "56 heads over 3 devices"),
    (ON, replace(H200, ulysses=8), REAL, "triton", ""),
    (ON, replace(H200, has_triton=False), REAL, "dense", "triton is not installed"),
    (ON, replace(H200, capability=(7, 5)), REAL, "dense", "needs compute capability 8.0"),
    (ON, replace(H200, dtype="float32"), REAL, "dense", "needs float16 or bfloat16"),
    (ON, replace(H200, head_dim=96), REAL, "dense", "power of two"),
    (replace(ON, block=(100, 64)), H200, REAL, "dense", "blocks (100, 64)"),
    (replace(ON, backend="flex", block=(64, 64)), H200, REAL, "dense", "flex with blocks (64, 64)"),
    (replace(ON, backend="triton"), CPU, POCKET, "dense", "needs compute capability 8.0"),
    (ON, replace(CPU, device="mps"), POCKET, "dense", "mps: untried"),
    (ON, replace(H200, processor="Odd"), REAL, "dense", "attention processor Odd"),
]


@pytest.mark.parametrize(("options", "machine", "layout", "backend", "reason"), CHOICES)
def test_the_choice_and_its_reason(options: SparseAttention, machine: Machine, layout: dict[str, Any], backend: str, reason: str) -> None:
    choice = choose(options, machine, **layout)
    assert choice.backend == backend and reason in choice.reason and bool(choice.reason) == (backend == "dense")
    strict = replace(options, on_unsupported="error")
    if backend == "dense" and choice.reason != "off" and not choice.reason.startswith("short"):
        with pytest.raises(EnvironmentFault, match=r"sparse attention: got .*, expected .*; "):
            choose(strict, machine, **layout)
    else:
        assert choose(strict, machine, **layout) == choice


def test_a_block_is_as_wide_as_is_fast_on_the_device() -> None:
    assert choose(ON, H200, **REAL).block == (128, 128) and choose(ON, replace(H200, capability=(12, 0)), **REAL).block == (128, 64)


def test_flex_gets_whole_blocks_of_sinks() -> None:
    assert choose(ON, H200, **REAL).first == 444 and choose(replace(ON, backend="flex"), H200, **REAL).first == 512


@pytest.mark.parametrize(
    "options",
    [
        *({"budget": value} for value in (0, -0.1, 1.5, math.nan, True, "much")),
        *({"tail": "median"}, {"tile": (4, 4)}, {"tile": (4, 4, 0)}, {"block": (128, 64.0)}, {"refresh": 0}, {"dense_first": 2}),
        *({"dense_last": -1}, {"backend": "cuda"}, {"on_unsupported": "warn"}, {"min_rows": -1}),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"sparse .*: got .*, expected .*; change"):
        SparseAttention(**options)


@pytest.mark.parametrize("options", [{"every": 0}, {"rows": 0}, {"head": -1}, {"layer": math.inf}])
def test_a_wrong_guard_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="sparse guard"):
        Guard(**options)


LADDER = [
    ([0.1, 0.2, 0.1], set(), Verdict()),
    ([0.1, 0.3, 0.1], set(), Verdict(widen=(1,))),
    ([0.1, 0.3, 0.1], {1}, Verdict(dense=(1,))),
    ([0.1, 0.3, 0.26], {1}, Verdict(layer="mean error 0.220 above 0.2")),
    ([0.4, 0.1, 0.3], set(), Verdict(widen=(0, 2))),  # on average too far, but heads are widened first
    ([0.22, 0.21, 0.2], set(), Verdict(layer="mean error 0.210 above 0.2")),  # no head to blame
    ([0.1, math.nan, 0.1], set(), Verdict(layer="not finite")),
]


@pytest.mark.parametrize(("errors", "widened", "verdict"), LADDER)
def test_the_ladder(errors: list[float], widened: set[int], verdict: Verdict) -> None:
    assert judge(errors, frozenset(widened), frozenset(), GUARD) == verdict


def test_a_dense_head_is_not_judged_again() -> None:
    assert judge([0.1, 0.3, 0.1], frozenset({1}), frozenset({1}), GUARD).is_calm


def test_the_request_follows_its_layers_and_every_layer_is_looked_at_in_turn() -> None:
    assert judge_request({1: "x", 4: "x"}, 10, GUARD) == ""
    assert judge_request({1: "x", 4: "x", 5: "x"}, 10, GUARD) == "3 of 10 layers dense, more than 20%"
    seen = [sum(is_probed(layer, forward, GUARD) for forward in range(25)) for layer in range(50)]
    assert seen == [1] * 50
