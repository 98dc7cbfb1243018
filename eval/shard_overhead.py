"""What sharding a sequence costs beside the exchange itself, on one device: a world of one rank, and one rank's share of several.

`python -m eval.shard_overhead --model random:h3 --workload h3-t2va-5s --pairs 3 --ranks 2,4,8 --out DIR`. The world of one is real (NCCL
on CUDA). A share of several runs with a link that carries nothing, so its outputs mean nothing and its time is computing and copying.
"""

import argparse
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from eval.cache_overhead import Forward, summary, timed
from eval.cases import find_workload
from eval.fingerprint import fingerprint
from eval.timing import WallClock
from videogen.config import DEVICES, DTYPES
from videogen.errors import bad
from videogen.jobs.run import write_json
from videogen.load import pick_device, pick_dtype
from videogen.parallel.comm import Peers, Work
from videogen.parallel.join import joined
from videogen.parallel.mesh import Part, Place
from videogen.parallel.sequence import GROUPS, Ulysses
from videogen.parallel.weights import stream
from videogen.source import find_model
from videogen.transforms.adaln import place_projections

logger = logging.getLogger(__name__)

SCHEMA = "videogen.shard-overhead/1"


class _Arrived:
    def wait(self) -> None:
        """It is there."""


class NoLink(Peers):
    """One rank of several whose messages are never carried: it receives its own, over and over. (Zeros may draw less power.)"""

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, takes: list[int], gives: list[int]) -> Work:
        """Nothing is sent."""
        for part in torch.split(received, len(sent)):
            part.copy_(sent[: len(part)])
        return _Arrived()

    def gather(self, tensor: torch.Tensor, part: Part) -> torch.Tensor:
        """This rank's rows in everyone's place."""
        return torch.cat([tensor[:, :1].expand(-1, size, -1) for size in part.sizes], 1)


@contextmanager
def sharded(forward: Forward, peers: Peers, groups: int = GROUPS) -> Iterator[None]:
    """The transformer over these peers."""
    sharding, rows = Ulysses(peers, groups), sum(forward.rows.values())
    with sharding.attention(forward.model, rows), sharding.stack(forward.model, rows):
        yield


def world_of_one(forward: Forward, device: torch.device, pairs: int, store: Path) -> dict[str, Any]:
    """Plain and sharded in turns A B B A; the ratio of each pair and its median."""
    took: dict[str, list[float]] = {"plain": [], "sharded": []}
    with joined(Place(), device, init_method=f"file://{store}") as peers:

        def run(kind: str) -> None:
            if kind == "plain":
                took[kind].append(timed(lambda: forward(0), device))
                return
            with sharded(forward, peers):
                took[kind].append(timed(lambda: forward(0), device))

        for pair in range(pairs + 1):  # the first warms up
            for kind in ("plain", "sharded") if pair % 2 else ("sharded", "plain"):
                run(kind)
    plain, over = took["plain"][1:], took["sharded"][1:]
    ratios = [b / a for a, b in zip(plain, over)]
    return {"plain": summary(plain), "sharded": summary(over), "ratios": ratios, "median_ratio": median(ratios)}


def shares(forward: Forward, device: torch.device, ranks: list[int], runs: int) -> list[dict[str, Any]]:
    """One forward of the first rank of several, in one head group and in as many as usual."""
    found = []
    for count in ranks:
        for groups in (1, GROUPS):
            with sharded(forward, NoLink(0, count, None, None), groups):
                took = [timed(lambda: forward(0), device) for _ in range(runs + 1)][1:]
            found.append({"ranks": count, "head_groups": groups} | summary(took))
    return found


def visiting(forward: Forward, device: torch.device, runs: int) -> dict[str, Any]:
    """A forward with the blocks in host memory; the model stays so afterwards."""
    if device.type == "cuda":
        forward.model.to("cpu")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    stream(forward.model, device)
    place_projections(forward.model, device)
    took = [timed(lambda: forward(0), device) for _ in range(runs + 1)][1:]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return summary(took) | {"peak_bytes": peak}


def _counts(text: str) -> list[int]:
    numbers = [int(word) for word in text.split(",") if word.strip().isdecimal()]
    if not numbers or min(numbers) < 1:
        raise bad("--ranks", text, "whole numbers separated by commas", "use 2,4,8")
    return numbers


def main() -> None:
    """`python -m eval.shard_overhead`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:h3")
    parser.add_argument("--workload", default="h3-t2va-5s")
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="plain and sharded forwards, after one of each")
    parser.add_argument("--ranks", default="2,4,8", help="whose share is timed without a link")
    parser.add_argument("--offload", action="store_true", help="also a forward with the blocks in host memory")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/shard-overhead"))
    args = parser.parse_args()
    workload, device, ranks = find_workload(args.workload), pick_device(args.device), _counts(args.ranks)
    dtype, clock = pick_dtype(args.dtype, device), WallClock()
    device = torch.device("cuda", 0) if device.type == "cuda" else device
    args.out.mkdir(parents=True, exist_ok=True)
    store = args.out / "store"
    store.unlink(missing_ok=True)
    began = clock.now()
    forward = Forward(find_model(args.model), workload, 4, device, dtype)
    report: dict[str, Any] = {"schema": SCHEMA, "model": args.model, "workload": workload.name, "rows": sum(forward.rows.values())}
    report |= {"dtype": str(dtype), "load_s": round(clock.now() - began, 1), "machine": fingerprint()}
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("world_of_one", lambda: world_of_one(forward, device, args.pairs, store.absolute())),
        ("shares", lambda: shares(forward, device, ranks, args.pairs)),
    ]
    steps += [("offload", lambda: visiting(forward, device, args.pairs))] if args.offload else []
    for name, step in steps:
        report[name] = step()
        write_json(args.out / "shard-overhead.json", report)
        logger.info("%s: %s", name, report[name])


if __name__ == "__main__":
    main()
