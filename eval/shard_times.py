"""One clip's forward and decode over the ranks of this launch, beside the same by each rank alone: seconds, the link's part, equality.

`torchrun --nproc_per_node 2 -m eval.shard_times --workload h3-t2va-5s --workload h3-t2va-15s --sparse 0.25 --out DIR`, savings of
`exact`. A share `without link` computes the same and carries nothing: what a sharded forward takes longer than it is exposed on the link.
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from eval.block_times import only_first_block
from eval.cases import find_workload, make_request
from eval.fingerprint import fingerprint
from eval.launch import gathered, launched, link_gbs
from eval.shard_overhead import NoLink
from eval.staged import Components, Loop, Meter, StagedClip, rows_put_back
from eval.timing import synchronizer, time_once
from videogen.attention.options import OFF, SparseAttention
from videogen.config import DEVICES, DTYPES, Recipe
from videogen.errors import bad
from videogen.families.h3_pipeline import attending_sparsely
from videogen.jobs.run import write_json, write_text
from videogen.load import pick_dtype
from videogen.parallel.comm import Peers
from videogen.parallel.plan import DEVICES as PRICED
from videogen.parallel.plan import WORKLOADS as PRICED_WORKLOADS
from videogen.parallel.plan import Layout, price
from videogen.parallel.probe import measure
from videogen.parallel.sequence import GROUPS, Ulysses
from videogen.parallel.sharding import ALONE, Sharding
from videogen.recipes import RECIPES
from videogen.source import find_model, open_family
from videogen.transforms.adaln import place_projections
from videogen.transforms.attach import Kept, Transforms
from videogen.transforms.settle import settled

logger = logging.getLogger(__name__)

SCHEMA = "videogen.shard_times/1"
RESULT = "shard_times.json"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run the forward; sparse budget 1 is dense."""

    name: str
    sharding: Sharding
    budget: float = 1.0
    is_real: bool = True


def arms(peers: Peers, sparse: float | None) -> list[Arm]:
    """Alone first: the others are compared with it."""
    unlinked = NoLink(peers.rank, peers.count, None, None)
    found = [Arm("alone", ALONE), Arm("without link", Ulysses(unlinked, 1), is_real=False)]
    found += [Arm(f"over ranks, {groups} head groups", Ulysses(peers, groups)) for groups in (1, GROUPS)]
    if sparse is not None:
        found += [
            Arm("alone, sparse", ALONE, sparse),
            Arm("without link, sparse", Ulysses(unlinked, 1), sparse, is_real=False),
            Arm("over ranks, sparse", Ulysses(peers, 1), sparse),
        ]
    return found


@dataclass(slots=True)
class Bench:
    """One workload's clip in front of its loop, on every rank."""

    clip: StagedClip
    loop: Loop
    meter: Meter
    peers: Peers
    dtype: torch.dtype

    @contextmanager
    def _around(self, arm: Arm) -> Iterator[tuple[Callable[[], torch.Tensor], dict[str, Any]]]:
        """The forward under an arm, and what attention says of itself afterwards; the rows lie as before then."""
        used, reasons = settled(RECIPES["exact"].savings, self.meter.device, self.dtype)
        place_projections(self.loop.transformer, self.meter.device)
        pipe, block, state, model = self.loop.pipe, self.loop.block, self.clip.state, self.loop.transformer
        rows = self.loop.num_rows
        options = OFF if arm.budget == 1 else SparseAttention(budget=arm.budget, dense_first=0.0, guard=None)
        with (
            rows_put_back(state),
            Transforms(used, Kept(), self.clip.resolved, dict(reasons)).around_loop(pipe, block, model, state),
            arm.sharding.attention(model, rows),
            attending_sparsely(pipe, state, options) as told,
            arm.sharding.stack(model, rows),
        ):
            loop = Loop(pipe, block, state)

            def forward() -> torch.Tensor:
                loop.forward()
                return torch.cat([loop.rows.noise_pred.flatten(), loop.rows.audio_noise_pred.flatten()])

            yield forward, told

    def forwards(self, arm: Arm, runs: int) -> tuple[dict[str, Any], torch.Tensor]:
        """Seconds of each rank's forwards, all begun together, after one of a single block; and the velocities of video and sound."""
        model = self.loop.transformer
        with only_first_block(model), self._around(arm) as (forward, _):
            forward()
        took, made = list[float](), list[torch.Tensor]()
        with self._around(arm) as (forward, told):
            self.meter.reset_peak()
            for _ in range(runs):
                self.peers.any(False)
                took.append(time_once(lambda: made.append(forward()), synchronize=self.meter.synchronize))
        row = {"arm": arm.name, "median_s": median(took), "all_s": took, "peak_gib": self.meter.peak_gib(), "attention": told}
        return row, made[-1].float().cpu()

    def measured(self, budget: float | None, runs: int) -> list[dict[str, Any]]:
        """A row an arm: the slowest rank's seconds, and how far its velocity is from that of one rank alone at the same budget."""
        rows, alone = list[dict[str, Any]](), dict[float, torch.Tensor]()
        for arm in arms(self.peers, budget):
            row, velocity = self.forwards(arm, runs)
            wanted = alone.setdefault(arm.budget, velocity)
            apart = float((velocity - wanted).norm() / wanted.norm()) if arm.is_real else None
            told = gathered(self.peers, {"row": row, "apart": apart, "sum": float(velocity.double().sum())})
            slowest = max(told, key=lambda each: each["row"]["median_s"])
            equal = len({each["sum"] for each in told}) == 1 if arm.is_real else None
            rows.append(slowest["row"] | {"l2_to_alone": apart, "ranks_equal": equal})
            logger.info("%s, %s: %.3f s, %s from alone", self.clip.name, arm.name, rows[-1]["median_s"], apart)
        return rows

    @torch.no_grad()
    def decode(self) -> list[dict[str, Any]]:
        """The video decode of `exact`, second call, alone and with a chunk's tiles dealt to the ranks; whether the frames are equal."""
        pipe, state = self.loop.pipe, self.clip.state
        pipe._blocks.sub_blocks["denoise.after_denoise"](pipe, state)
        used, reasons = settled(RECIPES["exact"].savings, self.meter.device, self.dtype)
        rows, made = list[dict[str, Any]](), list[Any]()
        for name, sharding in (("alone", ALONE), ("over ranks", Ulysses(self.peers))):
            transforms = Transforms(used, Kept(), self.clip.resolved, dict(reasons), sharding.tiles)
            call = self._decoding(transforms, pipe, made)
            call()
            self.peers.any(False)
            seconds = max(gathered(self.peers, time_once(call, synchronize=self.meter.synchronize)))
            apart = np.abs(made[-1].astype(np.int16) - made[0].astype(np.int16))
            rows.append({"decode": name, "seconds": seconds, "most": int(apart.max()), "mean": float(apart.mean())})
            logger.info("%s", rows[-1])
        return rows

    def _decoding(self, transforms: Transforms, pipe: Any, made: list[Any]) -> Callable[[], None]:
        def call() -> None:
            transforms.call("decode.video", pipe._blocks.sub_blocks["decode.video"], pipe, self.clip.state)
            made.append(np.asarray(self.clip.state.get("videos")[0]))

        return call


def priced(workload: str, ranks: int, gbs: float) -> dict[str, float] | None:
    """The planner's forward for one H200 alone and for ranks over this link, nothing hidden; None for a workload it does not know."""
    known = PRICED_WORKLOADS.get(workload)
    if known is None or not gbs > 0:
        return None
    alone, over = (price(known, PRICED["h200"], Layout(1, count), gbs) for count in (1, ranks))
    return {"alone_s": alone.forward_s, "over_ranks_s": over.forward_s, "exchange_s": over.exchange_s}


def table(report: dict[str, Any]) -> str:
    """Every row, ready to paste."""
    lines = [f"{report['ranks']} ranks, {report['dtype']}, link {report['link_gbs']} GB/s, {report['fingerprint']['gpus']}", ""]
    lines += ["| workload | arm | s/forward (n) | alone over it | peak GiB | L2 to alone |", "|---|---|---|---|---|---|"]
    for name, each in report["workloads"].items():
        alone = dict[str, float]()
        for row in each["forward"]:
            kind = "sparse" if "sparse" in row["arm"] else "dense"
            gain = alone.setdefault(kind, row["median_s"]) / row["median_s"]
            peak = "n/a" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
            timing = f"{row['median_s']:.3f} ({len(row['all_s'])})"
            lines.append(f"| {name} | {row['arm']} | {timing} | {gain:.3f} | {peak} | {row['l2_to_alone']} |")
        lines += [f"| {name} | decode {row['decode']} | {row['seconds']:.3f} (1) | | | most {row['most']} |" for row in each["decode"]]
        lines.append(f"| {name} | planner | {each['planner']} | | | |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: timed forwards of each workload, the budget of sparse attention (None: none), whether to decode the first."""

    runs: tuple[int, ...]
    sparse: float | None
    is_decoded: bool


def run_plan(plan: Plan, components: Components, clips: Sequence[StagedClip], peers: Peers, save: Callable[[Any], None]) -> dict[str, Any]:
    """Measure every clip on all ranks; `save` gets the report after each part."""
    device = components.device
    meter = Meter(device, synchronizer(device))
    for clip in clips:
        clip.prepare(components, meter, seed=0)
    link = measure(peers, device, 1 if device.type == "cuda" else 64)
    report: dict[str, Any] = {"schema": SCHEMA, "ranks": peers.count, "dtype": str(components.dtype).removeprefix("torch.")}
    report |= {"link_gbs": link, "fingerprint": fingerprint(), "workloads": {}}
    for index, clip in enumerate(clips):
        bench = Bench(clip, clip.open_loop(components), meter, peers, components.dtype)
        entry = {"rows": bench.loop.num_rows, "forward": bench.measured(plan.sparse, plan.runs[min(index, len(plan.runs) - 1)])}
        entry |= {"decode": [], "planner": priced(clip.name, peers.count, link_gbs(link, clip.name))}
        report["workloads"][clip.name] = entry
        save(report)
        if plan.is_decoded and index == 0:
            entry["decode"] = bench.decode()
            save(report)
    return report


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write `shard_times.json` and `.md`, on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--workload", action="append", required=True)
    parser.add_argument("--model", help="default: the workloads' own")
    parser.add_argument("--forwards", default="2", metavar="N[,N]", help="timed ones, for each workload (the last for the rest)")
    parser.add_argument("--sparse", type=float, metavar="F", help="also at this budget")
    parser.add_argument("--decode", action="store_true", help="also the first workload's video decode")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    runs = tuple(int(word) for word in args.forwards.split(",") if word.isdecimal() and int(word))
    if not runs or len(runs) != args.forwards.count(",") + 1:
        raise bad("--forwards", args.forwards, "whole numbers from 1 on separated by commas", "use 2,1")
    workloads = [find_workload(name) for name in args.workload]
    launch = launched("eval.shard_times", args.device, args.out, RESULT)
    source = find_model(args.model or workloads[0].model, offline=launch.environment.offline)
    components, family = Components(source, launch.device, pick_dtype(args.dtype, launch.device)), open_family(source)
    clips = [StagedClip(each.name, family.resolve(make_request(each, 0), Recipe())) for each in workloads]

    def save(report: dict[str, Any]) -> None:
        if launch.is_first:
            write_json(args.out / RESULT, report)

    with launch.joined() as peers:
        report = run_plan(Plan(runs, args.sparse, args.decode), components, clips, peers, save)
    if launch.is_first:
        write_text(args.out / "shard_times.md", table(report))
        logger.info("\n%s", table(report))


if __name__ == "__main__":
    main()
