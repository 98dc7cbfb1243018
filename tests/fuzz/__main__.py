"""`python -m tests.fuzz --number 20000 --seed 0 --out DIR`: the long run. DIR gets report.json and every violation with its input."""

import argparse
import json
import logging
import os
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.fuzz.box import Box
from tests.fuzz.trial import ACCEPTED, KINDS, SHARES, VIOLATION, Outcome, draw, try_case
from tests.fuzz.watch import peak_mb

SHOWN = 400


def main() -> int:
    """Exit code 1 when there was a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--number", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="begin with this one, to repeat one")
    parser.add_argument("--only", choices=tuple(KINDS), nargs="*", help="these kinds only (another sequence)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VIDEOGEN_DEVICE_PROFILES": ""}
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    args.out.mkdir(parents=True, exist_ok=True)
    box, began = Box(args.out.absolute() / "box"), time.perf_counter()
    found: dict[str, list[Outcome]] = defaultdict(list)
    shares = {name: SHARES[name] for name in args.only or KINDS}
    for index in range(args.first, args.first + args.number):
        if (index + 1) % 500 == 0:
            save(args.out, args.seed, found, began)
        name, rng = draw(args.seed, index, shares)
        case = KINDS[name].make(rng, box)
        (args.out / "current.txt").write_text(
            f"--seed {args.seed} --first {index} --number 1: {name}\n"
        )  # should it take the process along
        outcome = try_case(name, case, box)
        found[name].append(outcome)
        if outcome.verdict == VIOLATION:
            path = args.out / f"violation-{args.seed}-{index}.txt"
            path.write_text(f"{name}\n{outcome.told}\n{repr(case)[:200_000]}\n", "utf-8", "backslashreplace")
            print(f"{index} {name}: {outcome.told.strip().splitlines()[-1][:SHOWN]}", flush=True)  # noqa: T201
    report, whole, took = save(args.out, args.seed, found, began)
    for name, each in [*report.items(), ("all", whole)]:
        print(f"{name:<18} " + ", ".join(f"{key} {value}" for key, value in each.items()))  # noqa: T201
    print(took)  # noqa: T201
    return 1 if whole.get(VIOLATION) else 0


def save(out: Path, seed: int, found: dict[str, list[Outcome]], began: float) -> tuple[Any, Any, Any]:
    """Write report.json: the counts so far, by kind and in all."""
    report = {name: row(outcomes) for name, outcomes in sorted(found.items())}
    whole = row([outcome for outcomes in found.values() for outcome in outcomes])
    took = {"seconds": round(time.perf_counter() - began, 1), "cpu_s": round(time.process_time(), 1), "peak_mb": round(peak_mb())}
    (out / "report.json").write_text(json.dumps({"seed": seed, "all": whole, "kinds": report} | took, indent=1) + "\n")
    return report, whole, took


def row(outcomes: list[Outcome]) -> dict[str, float]:
    """Counts by verdict, the slowest and the largest growth."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    numbers = {"inputs": len(outcomes), ACCEPTED: counts[ACCEPTED], "refused": counts["refused"], VIOLATION: counts[VIOLATION]}
    slowest, largest = max(each.seconds for each in outcomes), max(each.growth_mb for each in outcomes)
    total = sum(each.seconds for each in outcomes)
    return numbers | {"total_s": round(total, 1), "slowest_s": round(slowest, 2), "largest_mb": round(largest)}


if __name__ == "__main__":
    raise SystemExit(main())
