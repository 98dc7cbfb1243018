"""`videogen plan --workload h3-t2va-15s --gpus 8`: which layout of devices renders most clips, and which one clip fastest."""

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from videogen.errors import RequestError, bad, say
from videogen.parallel.plan import DEVICES, LINKS_GBS, WORKLOADS, Cost, layouts, link_gbs, rank
from videogen.parallel.published import Checked, check


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that ask for layouts in place of jobs."""
    many = parser.add_argument_group("layouts of devices (in place of jobs; a cost model, not a measurement)")
    many.add_argument("--workload", choices=WORKLOADS, help="the kind of clip, at 1344x768; --steps changes its forwards")
    many.add_argument("--gpus", type=int, default=8, metavar="N", help="devices (default: %(default)s)")
    many.add_argument("--gpu", choices=DEVICES, default="h200", help="which ones (default: %(default)s)")
    many.add_argument("--link", metavar="NAME", help=f"{', '.join(LINKS_GBS)}, or GB/s that one device sends (default: the GPU's usual)")
    many.add_argument("--memory-gib", type=float, metavar="G", help="memory of a device (default: the GPU's)")
    many.add_argument("--in-flight", type=int, default=16, metavar="Q", help="clips waiting at once (default: %(default)s)")
    many.add_argument("--check-model", action="store_true", help="the cost model against published timings, row by row")


def is_asked(args: argparse.Namespace) -> bool:
    """Whether layouts are asked for."""
    return getattr(args, "workload", None) is not None or getattr(args, "check_model", False)


def run(args: argparse.Namespace) -> int:
    """Print the layouts in order; exit code 0, or 2 where options contradict each other."""
    if args.jobs or args.prompt:
        raise RequestError(say("--workload", "jobs or prompts as well", "one of the two", "drop one"))
    if args.check_model:
        _print_check(check(), args)
        return 0
    for name, least in (("gpus", 1), ("in_flight", 1), ("memory_gib", 1)):
        value = getattr(args, name)
        if value is not None and not least <= value < 1e6:
            raise bad("--" + name.replace("_", "-"), value, f"a number of at least {least}", "change it")
    device, workload = DEVICES[args.gpu], WORKLOADS[args.workload]
    device = replace(device, memory_gib=args.memory_gib or device.memory_gib)
    workload = replace(workload, forwards=args.steps or workload.forwards)
    link = link_gbs(args.link or device.link)
    plan = rank(workload, device, layouts(args.gpus), link, args.in_flight)
    if args.json:
        told = {"workload": asdict(workload), "device": asdict(device), "link_gbs": link, "in_flight": args.in_flight}
        rows = {name: [_row(cost, args.in_flight) for cost in getattr(plan, name)] for name in ("throughput", "latency", "refused")}
        print(json.dumps({"schema": "videogen.layouts/1"} | told | rows | {"why": plan.why(args.in_flight)}))
        return 0
    print(f"{workload.name}, {workload.rows} rows, {workload.forwards} forwards; {args.gpus} x {device.name}, {link:g} GB/s, ", end="")
    print(f"{device.memory_gib:g} GiB a device, {args.in_flight} clips in flight. Modelled, not measured.")
    print(f"{'layout':<30} {'clips/h':>8} {'s a clip':>9} {'mean wait':>9} {'forward s':>9} {'exchange':>8} {'GiB':>5}")
    for cost in plan.throughput:
        row = _row(cost, args.in_flight)
        numbers = f"{row['clips_per_hour']:>8.1f} {row['clip_s']:>9.1f} {row['mean_wait_s']:>9.1f} {row['forward_s']:>9.3f}"
        print(f"{row['layout']:<30} {numbers} {cost.exchange_s / cost.forward_s:>8.1%} {row['memory_gib']:>5.0f}")
    print("\n".join(plan.why(args.in_flight)))
    return 0


def _row(cost: Cost, in_flight: int) -> dict[str, Any]:
    values = {name: round(getattr(cost, name), 4) for name in ("clip_s", "forward_s", "compute_s", "exchange_s", "stream_s", "memory_gib")}
    more = {"clips_per_hour": round(cost.clips_per_hour(in_flight), 3), "mean_wait_s": round(cost.mean_wait_s(in_flight), 2)}
    return {"layout": cost.label} | values | more


def _print_check(rows: list[Checked], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps([{"engine": each.row.engine.name, "error": each.error} for each in rows]))
        return
    print("| engine, device | layout | clip | forwards | published | model | error | |\n|---|---|---|---|---|---|---|---|")
    for each in rows:
        row, unit = each.row, "s a step" if each.row.what == "step s" else "s"
        error = "calibrates" if each.is_calibration else f"{each.error:+.1%}"
        numbers = f"{row.seconds:g} {unit} | {each.predicted:.2f} | {error}"
        layout = row.layout.label.removeprefix("1 x ")
        print(f"| {row.engine.name} | {layout} | {row.workload.name} | {row.workload.forwards} | {numbers} | {row.note} |")
    errors = sorted(abs(each.error) for each in rows if each.is_prediction)
    print(f"\n{len(errors)} predictions: median error {errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%}")
