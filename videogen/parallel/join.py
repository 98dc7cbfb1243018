"""From a launcher's environment to the ranks that share a clip; the process groups live as long as the scope."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from videogen.parallel.comm import Peers
from videogen.parallel.mesh import Place

TIMEOUT = timedelta(minutes=10)  # of one message: longer than any step, shorter than a night


@contextmanager
def joined(place: Place, device: torch.device, *, init_method: str | None = None) -> Iterator[Peers]:
    """The peers of this process's replica: NCCL on CUDA (and gloo for what hosts ask), gloo elsewhere.

    Every rank of the world enters it. `init_method` is where they meet, the launcher's own address by default.
    """
    dist.init_process_group("gloo", init_method=init_method, rank=place.rank, world_size=place.world_size, timeout=TIMEOUT)
    data: Any = None
    try:
        groups = [dist.new_group(list(ranks), backend="gloo", timeout=TIMEOUT) for ranks in place.seats]
        control = data = groups[place.replica]
        if device.type == "cuda":
            torch.cuda.set_device(device)
            data = [dist.new_group(list(ranks), backend="nccl", timeout=TIMEOUT) for ranks in place.seats][place.replica]
        yield Peers(place.seat, place.ulysses, data, control)
    except BaseException:
        if data is not None and dist.get_backend(data) == "nccl":
            data.abort()  # NCCL's orderly end waits for the other ranks, who need not come
        raise
    finally:
        dist.destroy_process_group()
