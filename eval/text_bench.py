"""The text engines at released sizes with random weights on one device: prefill, time to first token, longest context, arithmetic.

`python -m eval.text_bench --device cuda --out DIR`. Models one after the other; DIR/text_bench.json is written after every part, so a
run that is cut short keeps what it has. `--toy` runs every part on tiny models, to try the command itself.
"""

import argparse
import gc
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from eval.report_folder import check_free, make_folder
from videogen.config import DEVICES
from videogen.errors import VideogenError
from videogen.jobs.run import write_json
from videogen.load import pick_device
from videogen.text.bench import Engine, Load, check_settings, loads, matmul_ceiling, opened, prefills, settings
from videogen.text.context import ceiling
from videogen.text.loop import Paging
from videogen.text.opening import budget, chosen, open_engine, open_text
from videogen.text.report import software, vars_of
from videogen.text.shapes import parameters

logger = logging.getLogger(__name__)

SCHEMA, RESULT = "videogen.text_real_size/1", "text_bench.json"
FAILS = (RuntimeError, ValueError, MemoryError, VideogenError)  # of one part; the others still run


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured of one model. prefill: tokens a prefill forward takes; loads and growth are left out where 0 or empty."""

    model: str
    lengths: tuple[int, ...]
    prefill: int
    load: Load
    levels: tuple[float, ...]
    most: int
    paging: Paging
    engine: str = "auto"
    runs: int = 3


_BIG, _CUT = Load(shared=4096, own=128, write=16, requests=20), Load(shared=4096, own=128, write=8, requests=20)
_LONG = (8192, 32768, 131072)
PARTS = (
    Part("qwen3-vl-32b", _LONG, 131072, _BIG, (), 262144, Paging(256, 560, 131072), "snapshots", runs=2),
    Part("qwen3-vl-32b", (8192, 32768), 8192, _BIG, (1, 4, 16), 0, Paging(256, 560, 8192)),
    Part("deepseek-v4-cut", _LONG, 1024, _CUT, (1, 4, 16), 262144, Paging(), runs=2),
    Part("glm-dsa-cut", _LONG, 1024, _CUT, (1, 4, 16), 202752, Paging(), runs=2),
)
_TOY, _PAGES = Load(shared=64, own=8, write=4, requests=4), Paging(16, 128, 64)
TOYS = (
    Part("qwen3_vl", (32, 64, 8192), 64, _TOY, (), 1024, _PAGES, "snapshots", runs=1),
    Part("qwen3_vl", (32, 64), 64, _TOY, (1, 4), 0, _PAGES),
    Part("deepseek_v4", (32, 64), 32, _TOY, (1, 2), 256, _PAGES, runs=1),
    Part("glm_moe_dsa", (32, 64), 32, _TOY, (1,), 256, _PAGES, runs=1),
)


def _peak(device: torch.device) -> float | None:
    """Most device memory in use so far, in GB; None on a CPU."""
    return round(torch.cuda.max_memory_allocated(device) / 1e9, 2) if device.type == "cuda" else None


def _tried(row: dict[str, Any], name: str, call: Callable[[], Any]) -> None:
    """Enter a part's result, or what stopped it."""
    began = time.perf_counter()
    try:
        row[name] = call()
    except FAILS as error:
        row[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    row.setdefault("seconds", {})[name] = round(time.perf_counter() - began, 1)
    logger.info("%s: %s in %.0f s", row["model"], name, row["seconds"][name])


def measure(part: Part, device: torch.device, dtype: torch.dtype, keep: Callable[[dict[str, Any]], None]) -> None:
    """One part; `keep` gets the row again after each step."""
    row: dict[str, Any] = {"model": part.model, "dtype": str(dtype).removeprefix("torch.")}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        text, weights = open_text(f"random:{part.model}", device, dtype)
        wanted = chosen(text, part.engine)
    except FAILS as error:
        keep(row | {"error": f"{type(error).__name__}: {str(error)[:300]}"})
        return
    row |= {
        "parameters": parameters(text.model),
        "layers": text.model.config.get_text_config().num_hidden_layers,
        "engine": vars_of(wanted),
    }
    row["weights_gb"] = round(sum(p.nbytes for p in text.model.parameters()) / 1e9, 2)

    def open_leg(reuse: bool) -> Engine:
        engine = open_engine(text, weights, part.engine, paging=part.paging, chunk=part.prefill, budget=budget(reuse=reuse))
        check_settings(engine, {"engine": wanted.engine, "reuse": reuse, "dtype": row["dtype"]})
        return engine

    def speeds() -> Any:
        with opened(open_leg, False) as engine:
            row["settings"] = settings(engine)
            return prefills(engine, part.lengths, part.load.write, part.runs, row["matmul_tflop_per_s"] * 1e12)

    def growth() -> Any:
        with opened(open_leg, False) as engine:
            return ceiling(engine, part.most // 4, part.most, halvings=2)

    size = 8192 if device.type == "cuda" else 512
    row["matmul_tflop_per_s"] = matmul_ceiling(device, dtype, size) / 1e12
    steps: list[tuple[str, Callable[[], Any]]] = [("prefill", speeds)]
    steps += [("loads", lambda: loads(open_leg, part.load, part.levels, (1.0,)))] if part.levels else []
    steps += [("growth", growth)] if part.most else []
    for name, call in steps:
        _tried(row, name, call)
        row["peak_gb"] = _peak(device)
        keep(row)


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows as Markdown."""
    yield "| model | what | result |\n|---|---|---|"
    for row in rows:
        head = f"| {row['model']}, {row.get('layers')} layers, {row['dtype']}, {row.get('engine', {}).get('name', '')} |"
        if "error" in row:
            yield f"{head} | {row['error']} |"
        for each in _listed(row.get("prefill")):
            if "tflop_per_s" not in each:
                yield f"{head} prefill {each.get('length', '')} | {each.get('refused') or each.get('error')} |"
                continue
            speed = f"{each['prefill_tokens_per_s_computed']:.0f} tokens/s computed (n={each['n']})"
            share = f"{each['tflop_per_s']:.3g} TFLOP/s, {each['share_of_matmul']:.1%} of {row['matmul_tflop_per_s']:.3g}"
            yield f"{head} prefill {each['length']}, {row['settings']['prefill']} a forward | {speed}; {share} |"
        for each in _listed(row.get("loads")):
            if "error" in each:
                yield f"{head} loads | {each['error']} |"
                continue
            p50, p95 = each["ttft_p50_s"], each["ttft_p95_s"]
            what = f"{each['loop']} loop, concurrency {each['concurrency']:g}, {'reuse' if each['reuse'] else 'no reuse'}"
            named = "the largest" if p95["is_max"] else f"[{p95['low']:.3f}, {p95['high']:.3f}]"
            yield f"{head} {what} | TTFT P50 {p50['value']:.3f} s, P95 {p95['value']:.3f} s {named} (n={p95['n']}) |"
        if "growth" in row:
            found = row["growth"]
            reason = found.get("stopped_by", found.get("error"))
            yield f"{head} longest prompt | {found.get('tokens')}: {reason}; peak {row.get('peak_gb')} GB |"


def _listed(value: Any) -> list[dict[str, Any]]:
    return value if isinstance(value, list) else [] if value is None else [value]


def run(parts: Sequence[Part], device: torch.device, dtype: torch.dtype, folder: Path) -> list[dict[str, Any]]:
    """Every part in turn; returns the rows as they were written."""
    rows: list[dict[str, Any]] = []
    for part in parts:
        index = len(rows)

        def keep(row: dict[str, Any], index: int = index) -> None:
            rows[index:] = [json.loads(json.dumps(row))]
            write_json(folder / RESULT, {"schema": SCHEMA, "software": software(device), "rows": rows})

        measure(part, device, dtype, keep)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    """`python -m eval.text_bench`."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--toy", action="store_true", help="tiny models, seconds")
    parser.add_argument(
        "--part", action="append", type=int, choices=range(len(PARTS)), metavar="N", help="only part N, from 0 (repeatable)"
    )
    parser.add_argument("--engine", choices=("batching", "snapshots"), help="instead of what the layers allow")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    check_free(args.out, RESULT, overwrite=args.overwrite, option="--out")
    make_folder(args.out)
    device = pick_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" or not args.toy else torch.float32
    parts = [part for index, part in enumerate(TOYS if args.toy else PARTS) if not args.part or index in args.part]
    parts = [replace(part, engine=args.engine) if args.engine else part for part in parts]
    text = "\n".join(table(run(parts, device, dtype, args.out)))
    (args.out / "text_bench.md").write_text(text + "\n", encoding="utf-8")
    logger.info("%s", text)


if __name__ == "__main__":
    main()
