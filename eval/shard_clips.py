"""Whole clips an hour from the ranks of this launch: a clip on every rank, and one clip over all of them; rendered, not encoded.

`torchrun --nproc_per_node 2 -m eval.shard_clips --workload h3-t2va-5s --steps 8 --clips 2 --weights parked --out DIR`. Both layouts share
one set of weights and render the same requests, each after a short clip of the same shape; the first rank's video and sound are compared.
"""

import argparse
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.cases import Workload, find_workload, make_request
from eval.clip_check import broken_because
from eval.fingerprint import fingerprint
from eval.launch import gathered, launched, link_gbs
from eval.timing import WallClock, synchronizer
from videogen.config import DEVICES
from videogen.jobs.run import write_json, write_text
from videogen.parallel.comm import Peers
from videogen.parallel.plan import DEVICES as PRICED
from videogen.parallel.plan import WORKLOADS as PRICED_WORKLOADS
from videogen.parallel.plan import Layout, price
from videogen.parallel.probe import head_groups, measure
from videogen.parallel.sequence import Ulysses
from videogen.parallel.weights import Placement
from videogen.pipeline import Pipeline, open_pipeline
from videogen.recipes import find_recipe

logger = logging.getLogger(__name__)

SCHEMA, RESULT = "videogen.shard_clips/1", "shard_clips.json"
WARM_STEPS = 2
REPLICAS, OVER = "a clip on every rank", "one over all ranks"


@dataclass(slots=True)
class Bench:
    """The two layouts over one set of weights."""

    alone: Pipeline
    over: Pipeline
    peers: Peers

    @property
    def arms(self) -> dict[str, Pipeline]:
        """By name, replicas first: the other is compared with it."""
        return {REPLICAS: self.alone, OVER: self.over}

    def row(self, name: str, workload: Workload, clips: int) -> tuple[dict[str, Any], list[Any]]:
        """So many clips on this rank, all ranks begun together: the slowest rank's seconds; and what each clip's bytes hash to."""
        pipeline, clock, wait = self.arms[name], WallClock(), synchronizer(self.alone.device)
        pipeline.render(make_request(replace(workload, steps=WARM_STEPS), clips))
        wait()
        self.peers.any(False)
        began, made, broken = clock.now(), list[Any](), list[str]()
        for index in range(clips):
            result = pipeline.render(make_request(workload, index))
            made.append((result.record["output"]["frames_sha256"], result.record["output"]["audio_sha256"], result.record["stages_s"]))
            broken.append(broken_because(result, frames=workload.frames, size=workload.size, has_sound=True))
        wait()
        seconds = max(gathered(self.peers, clock.now() - began))
        count = clips * (self.peers.count if name == REPLICAS else 1)
        told = {
            "layout": name,
            "clips": count,
            "seconds": seconds,
            "seconds_a_clip": seconds / clips,
            "clips_per_hour": 3600 * count / seconds,
        }
        return told | {"stages_s": made[-1][2], "broken": next((each for each in broken if each), "")}, made

    def rows(self, workload: Workload, clips: int) -> Iterator[dict[str, Any]]:
        """A row a layout; whether video and sound are those of one rank, on every rank."""
        wanted: list[Any] = []
        for name in self.arms:
            row, made = self.row(name, workload, clips)
            wanted = wanted or made
            equal = [all(a[part] == b[part] for a, b in zip(made, wanted)) for part in (0, 1)]
            row |= {f"{what}_equal": all(gathered(self.peers, same)) for what, same in zip(("video", "sound"), equal)}
            logger.info("%s, %s: %.1f s a clip, %.1f clips an hour", workload.name, name, row["seconds_a_clip"], row["clips_per_hour"])
            yield row


def priced(workload: Workload, ranks: int, gbs: float, weights: str) -> dict[str, float] | None:
    """The planner's clips an hour on H200s for both layouts; None for a workload that it does not know."""
    known = PRICED_WORKLOADS.get(workload.name)
    if known is None or not gbs > 0:
        return None
    known = replace(known, forwards=workload.steps)
    one, over = (price(known, PRICED["h200"], Layout(1, count, weights=weights), gbs).clip_s for count in (1, ranks))
    return {REPLICAS: 3600 * ranks / one, OVER: 3600 / over}


def table(report: dict[str, Any]) -> str:
    """Every row, ready to paste."""
    lines = [f"{report['ranks']} ranks, recipe {report['recipe']}, weights {report['weights']}, {report['fingerprint']['gpus']}", ""]
    lines += [
        "| workload, forwards | layout | clips | s a clip | clips/h | planner | video, sound equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in report["workloads"]:
        for row in entry["rows"]:
            planner = "" if entry["planner"] is None else f"{entry['planner'][row['layout']]:.1f}"
            told = f"| {entry['name']}, {entry['steps']} | {row['layout']} | {row['clips']} | {row['seconds_a_clip']:.1f} "
            lines.append(f"{told}| {row['clips_per_hour']:.1f} | {planner} | {row['video_equal']}, {row['sound_equal']} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write `shard_clips.json` and `.md`, on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--workload", action="append", required=True)
    parser.add_argument("--steps", type=int, metavar="N", help="forwards, instead of the workload's")
    parser.add_argument("--clips", type=int, default=1, metavar="N", help="of each rank, and over all of them (default: %(default)s)")
    parser.add_argument("--model", help="default: the workloads' own")
    parser.add_argument("--recipe", default="exact", metavar="NAME")
    parser.add_argument("--weights", choices=("whole", "parked", "offload"), default="whole")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    workloads = [find_workload(name) for name in args.workload]
    workloads = [replace(each, steps=args.steps) for each in workloads] if args.steps else workloads
    launch = launched("eval.shard_clips", args.device, args.out, RESULT)
    report: dict[str, Any] = {"schema": SCHEMA, "ranks": launch.environment.world_size, "recipe": args.recipe, "weights": args.weights}
    report |= {"fingerprint": fingerprint(), "workloads": []}
    with launch.joined() as peers:
        link = measure(peers, launch.device, 1 if launch.device.type == "cuda" else 64)
        model, recipe, placement = args.model or workloads[0].model, find_recipe(args.recipe), Placement(args.weights)
        alone = open_pipeline(model, recipe, device=args.device, placement=placement)
        over = alone.sharing(alone.recipe, Ulysses(peers, head_groups(peers, launch.device)))
        for workload in workloads:
            planner = priced(workload, peers.count, link_gbs(link, workload.name), args.weights)
            entry = {"name": workload.name, "steps": workload.steps, "planner": planner}
            report["workloads"].append(entry | {"rows": [*Bench(alone, over, peers).rows(workload, args.clips)]})
            if launch.is_first:
                write_json(args.out / RESULT, report)
    if launch.is_first:
        write_text(args.out / "shard_clips.md", table(report))
        logger.info("\n%s", table(report))


if __name__ == "__main__":
    main()
