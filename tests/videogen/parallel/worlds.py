"""Gloo ranks forked from the test process, so that nothing is imported again; each hands back what it found."""

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from videogen.parallel.comm import Peers
from videogen.parallel.join import joined
from videogen.parallel.mesh import Place

CPU = torch.device("cpu")


def in_world(folder: Path, rank: int, size: int, job: Callable[[Peers], Any], ulysses: int | None = None) -> Any:
    """Join a world of `size` ranks that share a clip (or groups of `ulysses`) and do the job."""
    store = folder / f"store-{size}-{ulysses}"
    with joined(Place(rank, rank, size, ulysses or size), CPU, init_method=f"file://{store}") as peers:
        return job(peers)


def _rank(job: Callable[[int], Any], rank: int, path: Path) -> None:
    torch.set_num_threads(1)  # a forked process has no threads of its parent's pools
    try:
        found = job(rank)
    except BaseException:
        path.write_bytes(pickle.dumps(traceback.format_exc()))
        raise
    path.write_bytes(pickle.dumps(found))


def forked(folder: Path, size: int, job: Callable[[int], Any], timeout_s: float = 60) -> list[Any]:
    """What `job(rank)` returns in each of `size` processes; raises what a rank raised, as text."""
    context = multiprocessing.get_context("fork")
    paths = [folder / f"rank-{rank}.pickle" for rank in range(size)]
    processes = [context.Process(target=_rank, args=(job, rank, path)) for rank, path in enumerate(paths)]
    for process in processes:
        process.start()
    end = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
    found = [pickle.loads(path.read_bytes()) if path.is_file() else "rank killed: no answer in time" for path in paths]
    errors = [each for each in found if isinstance(each, str)]
    assert not errors, "\n".join(errors)
    return found
