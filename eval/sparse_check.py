"""Sparse attention on a GPU: whether every implementation is right, then its time at H3's sizes beside dense and compiled flex.

`python -m eval.sparse_check --out DIR`; the table is the last thing logged, and what was measured so far is always on disk. Without
a GPU it checks what runs there at toy size: `--device cpu --layouts 700:7x8x10 --heads 2`, and under TRITON_INTERPRET=1 the
kernel itself.
"""

import argparse
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed, MiniMaxH3TransformerBlock

from eval import sparse_exact
from eval.fingerprint import fingerprint
from eval.report_folder import check_free, make_folder
from eval.sparse_times import Cut, Layer, Place, attempt
from videogen.attention import gather, triton_kernels, triton_sparse
from videogen.attention.install import settle, sparse_attention
from videogen.attention.options import SparseAttention
from videogen.errors import bad
from videogen.jobs.run import write_json, write_text
from videogen.load import pick_device, pick_dtype

logger = logging.getLogger(__name__)

SCHEMA, RESULT = "videogen.sparse_check/1", "sparse_check.json"
LAYOUTS = "37836:37x24x42,104092:102x24x42"  # rows:latent frames x rows x columns; 5 s and 14.4 s at 1344x768
RELEASED = {"hidden_size": 5376, "num_attention_heads": 56, "attention_head_dim": 128, "ffn_dim": 14336, "time_embed_dim": 2688}
_PARTS = ("pool_ms", "select_ms", "kernel_ms", "kernel_without_tail_ms", "sinks_ms", "probe_ms")
_COLUMNS = {"attention": (*_PARTS, "tflops", "tflops_without_tail", "from_definition"), "blocks": ("peak_gib",), "sweep": ("tflops",)}
Grid = tuple[int, int, int]
Part = Callable[[], Iterator[dict[str, Any]]]


def check_all(place: Place, *, is_interpreted: bool) -> Iterator[dict[str, Any]]:
    """Every implementation that runs here against the definition."""
    device, dtype = place.device, place.dtype
    parts: list[Part] = [lambda: sparse_exact.gather_rows(device, torch.float32)]
    if is_interpreted:
        launches = [triton_sparse.Launch(16, 4, 1, tail=(16, 1)), triton_sparse.Launch(32, 4, 1, paired=False, has_tma=True, tail=(16, 1))]
        parts.append(lambda: sparse_exact.kernel_rows(device, torch.float32, launches, small=True))
    elif place.is_triton:
        launches = [*triton_sparse.LAUNCHES.values(), *triton_sparse.CANDIDATES]
        parts.append(lambda: sparse_exact.kernel_rows(device, dtype, launches, small=False))
        parts.append(lambda: iter([sparse_exact.compiled_row(device, dtype)]))
        parts.append(lambda: sparse_exact.flex_rows(device, dtype))
    attend = triton_sparse.attend if place.is_triton else gather.attend
    parts.append(lambda: iter([sparse_exact.whole_budget_rows(attend, device, dtype)]))
    for part in parts:
        found: dict[str, Any] = {}
        try:
            for found in part():
                logger.info("%s", found)
                yield found
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            logger.exception("a check failed to run")
            told = f"{type(error).__name__}: {str(error).strip()[:300]}"
            yield {"check": f"after {found.get('check', 'the start of a part')}", "is_right": False, "reason": told}


class _Stack(torch.nn.Module):
    """One block as a transformer."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.transformer_blocks = torch.nn.ModuleList([MiniMaxH3TransformerBlock(**sizes, norm_eps=1e-5, qk_norm_eps=1e-5)])
        self.proj_out = torch.nn.Linear(1, 1)  # says where the model lives

    def forward(self, *args: Any) -> Any:
        """The block."""
        return self.transformer_blocks[0](*args)


@torch.no_grad()
def block_rows(rows: int, grid: Grid, densities: Sequence[float], backends: Sequence[str], place: Place) -> Iterator[dict[str, Any]]:
    """One block of the released size with random weights, dense under each back end, then sparse: time only."""
    with place.device:
        stack: Any = _Stack(RELEASED).to(place.dtype).eval()
        rope = MiniMaxH3RotaryPosEmbed()(torch.rand(rows, 3) * 40)
        hidden = torch.randn(1, rows, RELEASED["hidden_size"]).to(place.dtype)
        args = (hidden, torch.randn(2, RELEASED["time_embed_dim"]), torch.arange(rows) % 6, rope)
    attn = stack.transformer_blocks[0].attn
    for backend in backends:
        attn.processor._attention_backend = AttentionBackendName(backend)
        row = {"block": f"dense, {backend}", "rows": rows, "density": 1.0}
        yield attempt(row, lambda: {"ms": place.milliseconds(lambda: stack(*args)), "peak_gib": _peak(place)})
    for density in densities:
        options = SparseAttention(budget=density, dense_first=0.0, per_head=False, guard=None)
        choice = settle(options, stack, first=rows - math.prod(grid), rows=rows, grid=grid)
        if not choice.is_sparse:
            yield {"block": f"sparse, {choice.reason}", "rows": rows, "density": density, "error": choice.reason}
            continue
        with sparse_attention(stack, options, choice, rows, 10_000):
            row = {"block": f"sparse, {choice.backend}", "rows": rows, "density": density}
            yield attempt(row, lambda: {"ms": place.milliseconds(lambda: stack(*args)), "peak_gib": _peak(place)})


def _peak(place: Place) -> float | None:
    if place.device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(place.device) / 2**30
    torch.cuda.reset_peak_memory_stats(place.device)
    return peak


def time_layout(rows: int, grid: Grid, args: argparse.Namespace, place: Place) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a layout, with the table they belong to."""
    tile, block = ((4, 4, 4), (128, 64)) if place.is_triton else ((8, 2, 2), (32, 16))
    layer = Layer(grid, rows, args.heads, tile, place)
    yield from (("attention", row) for row in layer.dense_rows())
    for density in args.densities:
        cut = Cut(layer, block, density, aligned=False)
        yield "attention", cut.row()
        if args.sweep and density == args.densities[len(args.densities) // 2]:
            yield from (("sweep", row) for row in cut.sweep())
        if place.is_triton:
            wide = Cut(layer, (128, 128), density, aligned=True)
            yield "attention", wide.row()
            if not args.no_flex:
                yield "attention", wide.flex_row()
            if args.sweep and density == args.densities[len(args.densities) // 2]:
                yield from (("sweep", row) for row in wide.sweep())
    del layer
    if not args.no_block:
        yield from (("blocks", row) for row in block_rows(rows, grid, args.densities, args.backends, place))


def table(report: dict[str, Any]) -> str:
    """The tables, ready to paste; gains are over the fastest dense row of the same length."""
    wrong = [row for row in report["checks"] if not row["is_right"]]
    gpus = ", ".join(gpu["name"] for gpu in report["fingerprint"]["gpus"]) or report["fingerprint"]["cpu"]
    software = report["fingerprint"]["software"]
    lines = [f"{gpus}, torch {software['torch']}, {report['dtype']}, {report['heads']} heads, median of {report['runs']}", ""]
    lines += [f"checks: {len(report['checks']) - len(wrong)} of {len(report['checks'])} right", *(f"WRONG: {row}" for row in wrong), ""]
    for name, columns in _COLUMNS.items():
        lines += _table(report[name], columns)
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    if not rows:
        return []
    named = next(iter(rows[0]))
    lines = [f"| {named} | rows | density | ms | gain | " + " | ".join(columns) + " |", "|---" * (5 + len(columns)) + "|"]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row[named]} | {row['rows']} | {row['density']:g} | failed: {row['error']} |")
            continue
        dense = min((each["ms"] for each in rows if each["density"] == 1.0 and each["rows"] == row["rows"] and "ms" in each), default=0.0)
        cells = [f"{row[column]:.3g}" if row.get(column) is not None else "" for column in columns]
        told = (row[named], row["rows"], f"{row['density']:g}", f"{row['ms']:.2f}", f"{dense / row['ms']:.2f}x", *cells)
        lines.append("| " + " | ".join(map(str, told)) + " |")
    return [*lines, ""]


def _layouts(text: str) -> list[tuple[int, Grid]]:
    found = []
    for part in text.split(","):
        rows, _, grid = part.partition(":")
        sizes = [int(each) for each in grid.split("x")]
        if len(sizes) != 3 or int(rows) <= math.prod(sizes):
            raise bad("--layouts", part, "ROWS:TxHxW with more rows than the grid", "correct it")
        found.append((int(rows), (sizes[0], sizes[1], sizes[2])))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Check, measure, and write `sparse_check.json` and `.md`; raises RuntimeError when a check is wrong."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--layouts", type=_layouts, default=LAYOUTS, metavar="ROWS:TxHxW[,...]", help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=56)
    parser.add_argument("--densities", type=lambda text: [float(part) for part in text.split(",")], default="0.125,0.25,0.5")
    parser.add_argument("--backends", type=lambda text: text.split(","), default="_native_cudnn,_native_flash", help="dense, for the block")
    parser.add_argument("--sweep", action="store_true", help="also every candidate launch of the kernel, at the middle density")
    parser.add_argument("--no-flex", action="store_true", help="compiling it takes a minute")
    parser.add_argument("--no-block", action="store_true", help="no whole block of the released size")
    parser.add_argument("--no-times", action="store_true", help="checks only")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args(argv)
    check_free(args.out, RESULT, overwrite=args.overwrite, option="--out")
    make_folder(args.out)
    device = pick_device(args.device)
    place = Place(device, pick_dtype(args.dtype, device), args.runs, device.type == "cuda" and triton_kernels.IS_AVAILABLE)
    report: dict[str, Any] = {"schema": SCHEMA, "fingerprint": fingerprint(), "dtype": str(place.dtype).removeprefix("torch.")}
    report |= {"heads": args.heads, "runs": args.runs, "checks": [], "attention": [], "blocks": [], "sweep": []}
    for row in check_all(place, is_interpreted=triton_kernels.IS_INTERPRETED):
        report["checks"].append(row)
    for rows, grid in [] if args.no_times else args.layouts:
        for name, row in time_layout(rows, grid, args, place):
            report[name].append(row)
            write_json(args.out / RESULT, report)
    write_json(args.out / RESULT, report)
    write_text(args.out / "sparse_check.md", table(report))
    logger.info("\n%s", table(report))
    if wrong := [row["check"] for row in report["checks"] if not row["is_right"]]:
        raise RuntimeError(f"sparse attention: got {wrong}, expected what the definition says; do not use it here")


if __name__ == "__main__":
    main()
