"""The same clips with weights in different places: seconds, device and host memory, and whether every byte is the same.

`python -m eval.placements --workload h3-t2va-5s --steps 8 --weights whole,resident --weights offload,offload --out DIR`; rendered, not
encoded. `--memory-gib` lets torch have no more than that of the device, as on a smaller card (what CUDA itself takes comes on top).
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eval.cases import Workload, find_workload, make_request
from eval.fingerprint import fingerprint
from eval.report_folder import check_free, make_folder
from eval.timing import synchronizer, time_once
from videogen.config import DEVICES
from videogen.errors import VideogenError, bad
from videogen.jobs.run import write_json, write_text
from videogen.load import pick_device
from videogen.machine import memory_in_use_mb
from videogen.memory import collect
from videogen.parallel.weights import Placement
from videogen.pipeline import Pipeline, open_pipeline
from videogen.result import Result

logger = logging.getLogger(__name__)

SCHEMA, RESULT = "videogen.placements/1", "placements.json"
WARM_STEPS, GIB = 2, 2**30


def placement_of(word: str) -> Placement:
    """`WEIGHTS,TEXT` as `videogen render` names them."""
    weights, _, text = word.partition(",")
    return Placement(weights, text=text or "resident")


@dataclass(slots=True)
class Bench:
    """One workload on one device."""

    workload: Workload
    device: torch.device
    recipe: str
    memory_gib: float | None = None

    def row(self, placement: Placement) -> dict[str, Any]:
        """Load, render a short clip, then two whole ones of other words; the second finds the tables of the schedule."""
        self._limit(None)
        pipeline = open_pipeline(self.workload.model, self.recipe, device=self.device.type, placement=placement)
        load_s = self._timed(lambda: pipeline.load(self.workload.workflow))
        self._limit(self.memory_gib)  # random weights are drawn with all of it
        pipeline.render(make_request(replace(self.workload, steps=WARM_STEPS), 0))
        return {
            "weights": pipeline.placement.kind,
            "text_encoder": pipeline.placement.text,
            "load_s": load_s,
            "clips": [self._clip(pipeline, index) for index in range(2)],
        }

    def _clip(self, pipeline: Pipeline, index: int) -> dict[str, Any]:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        made = list[Result]()
        request = make_request(self.workload, index)
        request = replace(request, prompt=f"{request.prompt} Part {index + 1}.")  # a text that is not kept
        seconds = self._timed(lambda: made.append(pipeline.render(request)))
        record = made[0].record
        if record.get("memory"):
            raise MemoryError(f"made in less memory, at the second attempt: {record['memory']['first']}")
        return {"seconds": seconds, "stages_s": record["stages_s"], **record["output"], **self._memory()}

    def _limit(self, gib: float | None) -> None:
        """Let torch have no more than that of the device; all of it with None."""
        if self.device.type == "cuda":
            share = 1.0 if gib is None else gib * GIB / torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(share, self.device)

    def _timed(self, call: Callable[[], object]) -> float:
        return time_once(call, synchronize=synchronizer(self.device))

    def _memory(self) -> dict[str, float | None]:
        is_cuda = self.device.type == "cuda"
        used = (torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)) if is_cuda else (None, None)
        told = {name: None if value is None else value / GIB for name, value in zip(("allocated_gib", "reserved_gib"), used)}
        return told | {"host_gib": memory_in_use_mb() * 1e6 / GIB}


def table(report: dict[str, Any]) -> str:
    """Every row, ready to paste: the second clip's figures, whose schedule's tables are kept."""
    lines = [f"{report['workload']}, {report['steps']} forwards, recipe {report['recipe']}, {report['fingerprint']['gpus']}", ""]
    columns = (
        "weights, text encoder",
        "load s",
        "s a clip: first, second",
        "denoise, decode, text s",
        "GiB allocated, reserved",
        "host GiB",
    )
    lines += [f"| {' | '.join(columns)} | equal |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in report["rows"]:
        if "error" in row:
            lines.append(f"| {row['weights']}, {row['text_encoder']} | | {row['error']} | | | | |")
            continue
        first, second = row["clips"]
        stages = ", ".join(f"{second['stages_s'].get(name, 0):.2f}" for name in ("denoise", "decode", "text"))
        held = ", ".join("n/a" if second[name] is None else f"{second[name]:.2f}" for name in ("allocated_gib", "reserved_gib"))
        told = f"| {row['weights']}, {row['text_encoder']} | {row['load_s']:.1f} | {first['seconds']:.1f}, {second['seconds']:.1f} "
        lines.append(f"{told}| {stages} | {held} | {second['host_gib']:.1f} | {row['is_equal']} |")
    return "\n".join(lines) + "\n"


def outputs(row: dict[str, Any]) -> list[tuple[str, str]]:
    """What the bytes of every clip's video and sound hash to."""
    return [(clip["frames_sha256"], clip["audio_sha256"]) for clip in row["clips"]]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write `placements.json` and `.md`; a placement that fails is told and the others go on."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--steps", type=int, metavar="N", help="forwards, instead of the workload's")
    parser.add_argument("--model", help="default: the workload's own")
    parser.add_argument("--recipe", default="exact", metavar="NAME")
    parser.add_argument(
        "--weights", action="append", required=True, metavar="KIND[,TEXT]", help="the first is what the others are compared with"
    )
    parser.add_argument("--memory-gib", type=float, metavar="G", help="the most that torch may have of the device")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    workload, device, placements = find_workload(args.workload), pick_device(args.device), [placement_of(word) for word in args.weights]
    workload = replace(workload, steps=args.steps or workload.steps, model=args.model or workload.model)
    most = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    if args.memory_gib is not None and not 0 < args.memory_gib * GIB <= most:
        raise bad("--memory-gib", args.memory_gib, "more than 0 and at most what a CUDA device has", "change --memory-gib or --device")
    check_free(args.out, RESULT, overwrite=False, option="--out")
    make_folder(args.out)
    bench = Bench(workload, device, args.recipe, args.memory_gib)
    report: dict[str, Any] = {"schema": SCHEMA, "workload": workload.name, "steps": workload.steps, "recipe": args.recipe}
    report |= {"memory_gib": args.memory_gib, "fingerprint": fingerprint(), "rows": []}
    for placement in placements:
        collect()
        try:
            row = bench.row(placement)
        except (VideogenError, RuntimeError, MemoryError) as error:  # out of memory, above all
            row = {"weights": placement.kind, "text_encoder": placement.text, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        else:
            first = next((each for each in report["rows"] if "clips" in each), row)
            row["is_equal"] = outputs(row) == outputs(first)
        report["rows"].append(row)
        logger.info("%s", row)
        write_json(args.out / RESULT, report)
    write_text(args.out / "placements.md", table(report))
    logger.info("\n%s", table(report))


if __name__ == "__main__":
    main()
