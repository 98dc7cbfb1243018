"""A whole measurement of one text model as plain data, and the same as lines to read."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers

from videogen.text.bench import Engine, Load, check_settings, cold_and_warm, flood, loads, matmul_ceiling, opened, prefills
from videogen.text.context import supported_context
from videogen.text.loop import Paging
from videogen.text.model import TextModel
from videogen.text.opening import budget, chosen, open_engine

SCHEMA = "videogen.text_bench/1"
CPU_PRODUCT, CUDA_PRODUCT = 1024, 8192


def measure(
    text: TextModel,
    weights: str,
    engine: str,
    load: Load,
    paging: Paging,
    *,
    pairs: int,
    lengths: Sequence[int],
    levels: Sequence[float],
    mixes: Sequence[float],
    needles: Sequence[int] = (),
    reuse: bool = True,
    runs: int = 3,
    at_once: int = 100,
) -> dict[str, Any]:
    """Everything `videogen text bench` tells. Settings are checked before each part; the parts follow one another."""

    def open_leg(with_reuse: bool) -> Engine:
        found = open_engine(text, weights, engine, paging=paging, chunk=paging.prefill, budget=budget(reuse=with_reuse))
        check_settings(found, {"engine": chosen(text, engine).engine, "reuse": with_reuse})
        return found

    device, dtype = next(iter(text.model.parameters())).device, text.model.dtype
    ceiling = matmul_ceiling(device, dtype, CUDA_PRODUCT if device.type == "cuda" else CPU_PRODUCT)
    report: dict[str, Any] = {"schema": SCHEMA, "software": software(device), "engine": vars_of(chosen(text, engine))}
    report["matmul_tflop_per_s"] = ceiling / 1e12
    with opened(open_leg, False) as cold:
        report["settings"] = check_settings(cold, {"reuse": False})
        report["prefill"] = prefills(cold, lengths, load.write, runs, ceiling)
    with opened(open_leg, reuse) as warm:
        report["cold_and_warm"] = cold_and_warm(warm, load, pairs) if pairs else None
        report["context"] = supported_context(warm, needles)
        report["flood"] = flood(warm, at_once, 32, 2)
    report["loads"] = loads(open_leg, load, levels, mixes) if levels else []
    return report


def vars_of(choice: Any) -> dict[str, str]:
    """A choice as plain data."""
    return {"name": choice.engine, "reason": choice.reason}


def software(device: torch.device) -> dict[str, Any]:
    """What it ran on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"torch": torch.__version__, "transformers": transformers.__version__, "device": name, "threads": torch.get_num_threads()}


def _spread(value: Mapping[str, Any], digits: int = 4) -> str:
    if value["value"] is None:
        return "-"
    if value["is_max"]:
        return f"{value['value']:.{digits}f} (the largest of {value['n']})"
    return f"{value['value']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}] (n={value['n']})"


def _speeds(row: Mapping[str, Any]) -> str:
    decode = row["decode_tokens_per_s"]
    prefill = f"prefill {row['prefill_tokens_per_s_computed']:.0f} computed, {row['prefill_tokens_per_s_effective']:.0f} effective tokens/s"
    return prefill + ("" if decode is None else f"; decode {decode:.1f} tokens/s a request")


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report to read."""
    yield f"engine      {report['engine']['name']}: {report['engine']['reason']}"
    yield "settings    " + ", ".join(f"{name} {value}" for name, value in report["settings"].items())
    yield f"ceiling     {report['matmul_tflop_per_s']:.3f} TFLOP/s of matrix products, measured"
    for row in report["prefill"]:
        if "refused" in row:
            yield f"prefill     {row['length']} tokens: {row['refused']}"
            continue
        share = f"; {row['tflop_per_s']:.3f} TFLOP/s, {row['share_of_matmul']:.0%} of the ceiling" if "tflop_per_s" in row else ""
        yield f"prefill     {row['length']} tokens: {_speeds(row)}{share}"
    if pair := report["cold_and_warm"]:
        for name in ("cold", "warm"):
            times = f"TTFT P50 {_spread(pair[name]['ttft_p50_s'])} s, P95 {_spread(pair[name]['ttft_p95_s'])} s"
            yield f"{name}        {times}; {_speeds(pair[name])}"
        worst = f"the worst pair {pair['worst_warm_to_cold']:.4f}"
        yield f"warm/cold   {_spread(pair['warm_to_cold'])}, {worst}; cached {pair['cached_tokens']} tokens"
    context = report["context"]
    yield f"context     {context['tokens']} tokens: model {context['model_limit']}, cache {context['cache']}, needles {context['needles']}"
    yield f"at once     {report['flood']['answered']} of {report['flood']['sent']} answered in {report['flood']['seconds']:.2f} s"
    for row in report["loads"]:
        head = f"{row['loop']} loop, concurrency {row['concurrency']:g}, mix {row['mix']:g}, {'reuse' if row['reuse'] else 'no reuse'}"
        hand = f"{row['in_hand_at_arrival']:.1f} in hand at arrival" if row["loop"] == "open" else f"{row['wall_s']:.1f} s in all"
        yield f"load        {head}: TTFT P50 {_spread(row['ttft_p50_s'])} s, P95 {_spread(row['ttft_p95_s'])} s; {hand}; {_speeds(row)}"
