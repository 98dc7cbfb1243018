"""The fused kernels on a GPU, at a model's own shapes: each against float32 and against torch, timed; then one whole block.

`python -m eval.kernel_check --out DIR` reads the released sizes; nothing but one block of random weights is in memory. On a
machine without Triton's back end, and where a kernel is further from float32 than its bound, it says so and fails.
"""

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed, MiniMaxH3TransformerBlock

from eval.fingerprint import fingerprint
from eval.kernel_profile import as_text, profile_call
from eval.report_folder import check_free, make_folder
from eval.timing import synchronizer, time_call, time_once
from videogen.config import read_environment
from videogen.errors import EnvironmentFault, say
from videogen.jobs.run import write_json, write_text
from videogen.kernels.check import BOUNDS, FAILS, Shape, arguments, exact, relative_l2
from videogen.kernels.fused import refusal
from videogen.kernels.ops import FUSED, TORCH
from videogen.load import pick_device, pick_dtype
from videogen.source import find_model
from videogen.transforms.fused_blocks import fused_blocks

logger = logging.getLogger(__name__)

SCHEMA = "videogen.kernel_check/1"
RESULT, PROFILE = "kernel_check.json", "block-kernels.txt"


@dataclass(frozen=True, slots=True)
class Place:
    """Where and in what."""

    device: torch.device
    dtype: torch.dtype
    runs: int

    def milliseconds(self, call: Callable[[], object]) -> float:
        """The median of the runs."""
        timing = time_call(call, runs=self.runs, min_runs=1, warmup=2, synchronize=synchronizer(self.device))
        return 1e3 * timing.median_s


def shape_of(config: dict[str, Any], rows: int) -> Shape:
    """One block's operands at a model's sizes, for text and video at one timestep and sound at another."""
    rotated = 6 * config["rope_freq_dim"]
    sizes = (config["hidden_size"], config["num_attention_heads"], config["attention_head_dim"], rotated, config["ffn_dim"])
    return Shape(1, rows, *sizes, timesteps=2)


def moved_bytes(name: str, given: tuple[Any, ...], made: torch.Tensor) -> int:
    """What the operation must read and write once, tables apart: they stay in cache."""
    streams: list[torch.Tensor] = [*given[: 2 if name == "gated_add" else 1], made]
    return sum(each.numel() * each.element_size() for each in streams)


def check_operations(shape: Shape, place: Place) -> list[dict[str, Any]]:
    """A row per operation: distance from float32 of torch and of the kernel, milliseconds of both, bytes a second of the kernel."""
    rows = []
    for name in arguments(replace(shape, rows=1), place.dtype, place.device):
        given = arguments(shape, place.dtype, place.device)[name]  # one operation's operands at a time
        wanted, torch_op, kernel = exact(name, given), getattr(TORCH, name), getattr(FUSED, name)
        row: dict[str, Any] = {"operation": name, "torch_l2": relative_l2(torch_op(*given), wanted), "bound": BOUNDS[place.dtype]}
        row["torch_ms"] = place.milliseconds(partial(torch_op, *given))
        try:
            made = kernel(*given)
            row["kernel_l2"] = relative_l2(made, wanted)
            row["kernel_ms"] = place.milliseconds(partial(kernel, *given))
        except FAILS as error:
            rows.append(row | {"error": f"{type(error).__name__}: {str(error)[:300]}"})
            continue
        row |= {"speed_up": row["torch_ms"] / row["kernel_ms"], "gb_per_s": moved_bytes(name, given, made) / row["kernel_ms"] / 1e6}
        rows.append(row | {"is_right": row["kernel_l2"] <= row["bound"]})
        logger.info("%s", row)
    return rows


class _Stack(torch.nn.Module):
    """One block as `fused_blocks` expects a transformer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        names = ("hidden_size", "num_attention_heads", "attention_head_dim", "ffn_dim", "time_embed_dim", "norm_eps", "qk_norm_eps")
        self.transformer_blocks = torch.nn.ModuleList([MiniMaxH3TransformerBlock(**{name: config[name] for name in names})])


@torch.no_grad()
def check_block(config: dict[str, Any], rows: int, place: Place, *, compiled: bool, profile_to: Path) -> list[dict[str, Any]]:
    """A row per way to run one block: stock, compiled, through the kernels; update against the stock one's. The kernels of the last
    go to a file."""
    torch.manual_seed(0)
    with place.device:
        stack = _Stack(config).to(place.dtype).eval()
        rope = MiniMaxH3RotaryPosEmbed(config["rope_freq_dim"], config["rope_theta"])(torch.rand(rows, 3) * 40)
        hidden = torch.randn(1, rows, config["hidden_size"]).to(place.dtype)
        temb, which = torch.randn(2, config["time_embed_dim"]), torch.arange(rows) % 6
    block, found = stack.transformer_blocks[0], []
    wanted = (block(hidden, temb, which, rope) - hidden).float()

    def measure(name: str, call: Callable[[], torch.Tensor]) -> None:
        first_s = time_once(call, synchronize=synchronizer(place.device))
        apart = float(((call() - hidden).float() - wanted).norm() / wanted.norm())
        found.append({"block": name, "ms": place.milliseconds(call), "first_s": first_s, "l2_to_stock": apart})
        logger.info("%s", found[-1])

    measure("stock", lambda: block(hidden, temb, which, rope))
    with fused_blocks(stack, FUSED if not refusal(place.device, place.dtype) else TORCH):
        measure("kernels", lambda: block(hidden, temb, which, rope))
        write_text(profile_to, as_text(profile_call(lambda: block(hidden, temb, which, rope), place.device)))
    if compiled:
        quick = torch.compile(block)
        measure("torch.compile", lambda: quick(hidden, temb, which, rope))
    return found


def table(report: dict[str, Any]) -> str:
    """Two tables, ready to paste."""
    lines = [
        f"{report['rows']} rows, {report['dtype']}, {report['fingerprint']['gpus'] or report['fingerprint']['cpu']}",
        "",
        "| operation | torch ms | kernel ms | gain | GB/s | torch from float32 | kernel from float32 | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["operations"]:
        if "error" in row:
            lines.append(f"| {row['operation']} | {row['torch_ms']:.3f} | failed: {row['error']} | | | {row['torch_l2']:.1e} | | |")
            continue
        told = f"{row['torch_ms']:.3f} | {row['kernel_ms']:.3f} | {row['speed_up']:.2f}x | {row['gb_per_s']:.0f}"
        lines.append(f"| {row['operation']} | {told} | {row['torch_l2']:.1e} | {row['kernel_l2']:.1e} | {row['bound']:.0e} |")
    lines += ["", "| one block | ms | first call s | from stock |", "|---|---|---|---|"]
    lines += [f"| {row['block']} | {row['ms']:.2f} | {row['first_s']:.2f} | {row['l2_to_stock']:.1e} |" for row in report["blocks"]]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write `kernel_check.json` and `.md`.

    Raises EnvironmentFault where the kernels cannot run, RuntimeError when one is wrong.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="random:h3", help="whose sizes (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=37836, help="packed rows: 37836 is 5 s from text, 104092 is 15 s")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="a torch.compile row for the block: tens of seconds once")
    parser.add_argument("--block-only", action="store_true", help="no operations, as where Triton has no back end")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    place = Place(device, pick_dtype(args.dtype, device), args.runs)
    if (reason := refusal(device, place.dtype)) and not args.block_only:
        raise EnvironmentFault(say("kernels", reason, "a GPU that Triton compiles for", "pass --block-only, or run this on one"))
    check_free(args.out, RESULT, overwrite=False, option="--out")
    make_folder(args.out)
    source = find_model(args.model, offline=read_environment().offline)
    config = json.loads((source.folder / "transformer" / "config.json").read_text())
    report = {"schema": SCHEMA, "rows": args.rows, "dtype": args.dtype, "fingerprint": fingerprint()}
    report["operations"] = [] if args.block_only else check_operations(shape_of(config, args.rows), place)
    report["blocks"] = check_block(config, args.rows, place, compiled=args.compile, profile_to=args.out / PROFILE)
    write_json(args.out / RESULT, report)
    write_text(args.out / "kernel_check.md", table(report))
    logger.info("\n%s", table(report))
    if wrong := [row["operation"] for row in report["operations"] if not row.get("is_right")]:
        raise RuntimeError(say("kernels", ", ".join(wrong), "each within its bound of float32", "leave Savings.kernels off here"))


if __name__ == "__main__":
    main()
