"""What each saving is worth by itself: one forward, the resident weights and the video decode, lever after lever, in one process.

`python -m eval.ladder --workload h3-t2va-5s --out DIR`. Rows add up from the top; each says its gain over the row above and how
far its velocity is from diffusers'. Forwards are counted; nothing is projected.
"""

import argparse
import logging
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eval.cases import find_workload, make_request
from eval.fingerprint import fingerprint
from eval.report_folder import check_free, make_folder
from eval.staged import Components, Loop, Meter, StagedClip, rows_put_back
from eval.timing import Timing, synchronizer, time_once
from videogen.attention.options import OFF, SparseAttention
from videogen.config import DEVICES, DTYPES, Recipe, read_environment
from videogen.families.h3_pipeline import attending_sparsely
from videogen.jobs.run import write_json, write_text
from videogen.kernels.ops import FUSED, Ops
from videogen.load import pick_device, pick_dtype
from videogen.media import to_uint8
from videogen.recipes import RECIPES
from videogen.source import find_model, open_family
from videogen.transforms.adaln import place_projections
from videogen.transforms.attach import Kept, Transforms
from videogen.transforms.decode import stream_video
from videogen.transforms.fused_decoder import fused_decoder
from videogen.transforms.options import Savings
from videogen.transforms.settle import settled

logger = logging.getLogger(__name__)

SCHEMA = "videogen.ladder/1"
RESULT = "ladder.json"
LEVERS = ("rope_tables", "refined_text", "lean_loop", "adaln_tables", "park_adaln", "kernels", "matmul", "float8")
_GIB = 2**30


def rungs() -> list[tuple[str, Savings]]:
    """The levers of a forward, each on top of those before it."""
    found, fields = [("plain diffusers", Savings())], dict[str, Any]()
    for name in LEVERS:
        fields |= {"matmul": "auto" if name == "matmul" else name} if name in ("matmul", "float8") else {name: True}
        found.append((f"+ {name}", Savings(**fields)))
    return found


@dataclass(slots=True)
class Ladder:
    """One workload's clip in front of its loop."""

    clip: StagedClip
    loop: Loop
    meter: Meter
    dtype: torch.dtype
    forwards: int

    def row(self, name: str, savings: Savings, wanted: torch.Tensor | None) -> tuple[dict[str, Any], torch.Tensor]:
        """The seconds of a forward under these savings, after one that is not timed, and the velocity it gives.

        `begin_s` is what a request pays first: tables made, parts attached.
        """
        device = self.meter.device
        used, reasons = settled(savings, device, self.dtype)
        if not used.park_adaln:
            place_projections(self.loop.transformer, device)
        transforms = Transforms(used, Kept(), self.clip.resolved, dict(reasons))
        with ExitStack() as stack:
            around = transforms.around_loop(self.loop.pipe, self.loop.block, self.loop.transformer, self.clip.state)
            begin_s = time_once(lambda: stack.enter_context(around), synchronize=self.meter.synchronize)
            self.loop.forward()
            resident = torch.cuda.memory_allocated(device) / _GIB if device.type == "cuda" else None
            self.meter.reset_peak()
            timing = Timing(tuple(time_once(self.loop.forward, synchronize=self.meter.synchronize) for _ in range(self.forwards)), 1)
        velocity = self.loop.rows.noise_pred.float().cpu()
        apart = 0.0 if wanted is None else float((velocity - wanted).norm() / wanted.norm())
        found = {"lever": name, "begin_s": begin_s, "resident_gib": resident, "peak_gib": self.meter.peak_gib(), "l2_to_plain": apart}
        return found | timing.row() | {"told": transforms.told}, velocity

    def climb(self) -> list[dict[str, Any]]:
        """Every rung; a lever that changes nothing on this device says why and is not timed."""
        rows: list[dict[str, Any]] = []
        wanted: torch.Tensor | None = None
        before: Savings | None = None
        for name, savings in rungs():
            used, reasons = settled(savings, self.meter.device, self.dtype)
            if used == before:
                rows.append({"lever": name, "reason": reasons.get(name.removeprefix("+ "), "off on this device")})
                continue
            row, velocity = self.row(name, savings, wanted)
            wanted, before = velocity if wanted is None else wanted, used
            rows.append(row)
            logger.info("%s: %.3f s per forward, %.1e from plain", name, row["median_s"], row["l2_to_plain"])
        return rows

    def sparse(self, budgets: Sequence[float]) -> list[dict[str, Any]]:
        """Sparse attention on top of `exact`, from the first forward on.

        Its guard is off: heads of random weights attend to everything alike, and it would rightly put every layer to dense.
        """
        used, reasons = settled(RECIPES["exact"].savings, self.meter.device, self.dtype)
        place_projections(self.loop.transformer, self.meter.device)
        rows, pipe, state = list[dict[str, Any]](), self.loop.pipe, self.clip.state
        for budget in (1.0, *budgets):
            transforms = Transforms(used, Kept(), self.clip.resolved, dict(reasons))
            options = SparseAttention(budget=budget, dense_first=0.0, guard=None) if budget < 1 else OFF
            around = transforms.around_loop(pipe, self.loop.block, self.loop.transformer, state)
            with rows_put_back(state), around, attending_sparsely(pipe, state, options) as told:
                self.loop = loop = Loop(pipe, self.loop.block, state)  # the rows as they lie now
                loop.forward()
                self.meter.reset_peak()
                timing = Timing(tuple(time_once(loop.forward, synchronize=self.meter.synchronize) for _ in range(self.forwards)), 1)
            rows.append({"budget": budget, "peak_gib": self.meter.peak_gib()} | timing.row() | {"told": told})
            logger.info("budget %g: %.3f s per forward, %s", budget, timing.median_s, told)
        return rows

    @torch.no_grad()
    def decode(self, batches: Sequence[int]) -> list[dict[str, Any]]:
        """Diffusers' decode block, then the streamed one with so many tiles a call; most and mean difference in steps of 255."""
        self.loop.close()
        pipe, state, rows = self.loop.pipe, self.clip.state, list[dict[str, Any]]()
        pipe._blocks.sub_blocks["denoise.after_denoise"](pipe, state)
        latents, made = state.get("latents"), list[Any]()

        def stock() -> None:
            pipe._blocks.sub_blocks["decode.video"](pipe, state)
            made.append(to_uint8(state.get("videos")[0]))

        fusing = FUSED if settled(Savings(kernels=True), self.meter.device, self.dtype)[0].kernels else None
        runs = [(0, None), *((batch, None) for batch in batches), *((batch, fusing) for batch in batches if fusing)]
        for batch, ops in runs:
            call = partial(_append, made, pipe, latents, batch, ops) if batch else stock
            if ops is not None:
                call()  # compiles
                made.pop()
            self.meter.reset_peak()
            seconds = time_once(call, synchronize=self.meter.synchronize)
            apart = (torch.from_numpy(made[-1]).short() - torch.from_numpy(made[0]).short()).abs()
            name = f"{batch} tiles a call, streamed{', kernels' if ops else ''}" if batch else "plain diffusers"
            rows.append({"decode": name, "seconds": seconds, "peak_gib": self.meter.peak_gib()})
            rows[-1] |= {"most": int(apart.max()), "mean": float(apart.float().mean())}
            logger.info("%s", rows[-1])
        return rows


def _append(made: list[Any], pipe: Any, latents: torch.Tensor, batch: int, ops: Ops | None) -> None:
    with fused_decoder(pipe.vae, ops) if ops else nullcontext():
        made.append(stream_video(pipe, latents, batch))


def table(report: dict[str, Any]) -> str:
    """Both ladders, ready to paste."""
    head = (
        f"{report['workload']}, {report['rows']} rows, {report['dtype']}, {report['fingerprint']['gpus'] or report['fingerprint']['cpu']}"
    )
    lines = [
        head,
        "",
        "| lever | s/forward (n, spread) | gain | once s | resident GiB | peak GiB | from plain |",
        "|---|---|---|---|---|---|---|",
    ]
    before = None
    for row in report["forward"]:
        if "reason" in row:
            lines.append(f"| {row['lever']} | {row['reason']} | | | | | |")
            continue
        gain = "" if before is None else f"{before / row['median_s']:.3f}x"
        memory = " | ".join("n/a" if row[name] is None else f"{row[name]:.1f}" for name in ("resident_gib", "peak_gib"))
        timing = f"{row['median_s']:.3f} ({row['runs']}, {row['spread']:.1%})"
        lines.append(f"| {row['lever']} | {timing} | {gain} | {row['begin_s']:.2f} | {memory} | {row['l2_to_plain']:.1e} |")
        before = row["median_s"]
    if report.get("sparse"):
        dense = report["sparse"][0]["median_s"]
        lines += ["", "| budget on exact | s/forward (n, spread) | gain | peak GiB |", "|---|---|---|---|"]
    for row in report.get("sparse", []):
        peak = "n/a" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        timing = f"{row['median_s']:.3f} ({row['runs']}, {row['spread']:.1%})"
        lines.append(f"| {row['budget']:g} | {timing} | {dense / row['median_s']:.2f}x | {peak} |")
    lines += ["", "| video decode | s (once) | peak GiB | most, mean difference of 255 |", "|---|---|---|---|"]
    for row in report["decode"]:
        peak = "n/a" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        lines.append(f"| {row['decode']} | {row['seconds']:.2f} | {peak} | {row['most']}, {row['mean']:.4f} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write `ladder.json` and `.md`; the table is the last thing logged."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--model", help="default: the workload's own")
    parser.add_argument("--forwards", type=int, default=3)
    parser.add_argument("--decode", default="1,4,14,28", metavar="N[,N]", help="tiles a call (default: %(default)s); '' for none")
    parser.add_argument("--sparse", default="", metavar="F[,F]", help="budgets of sparse attention on top of exact")
    parser.add_argument("--only-sparse", action="store_true", help="no other rung")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    check_free(args.out, RESULT, overwrite=False, option="--out")
    make_folder(args.out)
    workload, device = find_workload(args.workload), pick_device(args.device)
    source = find_model(args.model or workload.model, offline=read_environment().offline)
    components = Components(source, device, pick_dtype(args.dtype, device))
    meter = Meter(device, synchronizer(device))
    clip = StagedClip(workload.name, open_family(source).resolve(make_request(workload, 0), Recipe()))
    clip.prepare(components, meter, seed=0)
    loop = clip.open_loop(components)
    ladder = Ladder(clip, loop, meter, components.dtype, args.forwards)
    report: dict[str, Any] = {"schema": SCHEMA, "workload": workload.name, "rows": loop.num_rows, "fingerprint": fingerprint()}
    report |= {"dtype": str(components.dtype).removeprefix("torch."), "stages": {k: v.row() for k, v in clip.stages.items()}}
    report["forward"] = [] if args.only_sparse else ladder.climb()
    report["sparse"] = ladder.sparse([float(each) for each in args.sparse.split(",") if each]) if args.sparse else []
    write_json(args.out / RESULT, report | {"decode": []})
    report["decode"] = ladder.decode([int(each) for each in args.decode.split(",") if each])
    write_json(args.out / RESULT, report)
    write_text(args.out / "ladder.md", table(report))
    logger.info("\n%s", table(report))


if __name__ == "__main__":
    main()
