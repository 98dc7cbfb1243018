"""How fast ranks exchange what one H3 layer sends, with and without peer-to-peer, over which transport; and what follows for them.

Each setting runs in processes of its own, because NCCL reads its environment once. `python -m videogen.parallel.probe` is one rank.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from videogen.config import child_environment
from videogen.doctor.link import Measured, transports
from videogen.errors import EnvironmentFault, say
from videogen.parallel.comm import Peers, PeersLost
from videogen.parallel.join import joined
from videogen.parallel.mesh import Place
from videogen.parallel.plan import LAYERS, WORKLOADS, Layout, exchange_gb
from videogen.parallel.sequence import GROUPS

RUNS, WARM_UP, LIMIT_S = 7, 2, 240.0
FAST_LINK_GBS = 100.0  # from here on cutting an exchange costs more than it hides: on two H200s over NVLink 2 and 6 % of a forward


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run the ranks: its name and what it changes in the environment."""

    name: str
    changes: tuple[tuple[str, str], ...] = ()


GPU_SETTINGS = (Setting("peer to peer", (("NCCL_P2P_DISABLE", "0"),)), Setting("through host memory", (("NCCL_P2P_DISABLE", "1"),)))
CPU_SETTINGS = (Setting("gloo"),)


def message_bytes(ranks: int, shrink: int = 1) -> dict[str, int]:
    """What one rank sends to the others for one layer's queries, keys, values and outputs, by workload."""
    names = ("h3-t2va-5s", "h3-t2va-15s")
    return {name: int(exchange_gb(WORKLOADS[name], Layout(1, ranks)) * 1e9 / LAYERS) // shrink for name in names}


def probe(ranks: int, *, is_cuda: bool, shrink: int = 1) -> list[Measured]:
    """Every setting in turn. `shrink` divides the messages. Raises EnvironmentFault where ranks do not come to an end."""
    return [_run(setting, ranks, is_cuda, shrink) for setting in (GPU_SETTINGS if is_cuda else CPU_SETTINGS)]


def _run(setting: Setting, ranks: int, is_cuda: bool, shrink: int) -> Measured:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,P2P", "NCCL_DEBUG_FILE": str(folder / "nccl.%p.log")}
        environment = child_environment(**(dict(setting.changes) | (log if is_cuda else {})))
        words = [sys.executable, "-m", "videogen.parallel.probe", str(folder), str(ranks), str(int(is_cuda)), str(shrink)]
        errors = (folder / "errors").open("w+b")
        with errors:
            running = [subprocess.Popen([*words, str(rank)], env=environment, stdout=errors, stderr=errors) for rank in range(ranks)]
            _wait(running)
            if any(each.returncode for each in running):
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().split("\n")[-1][:300]
                raise EnvironmentFault(say(f"link probe, {setting.name}", said, "ranks that reach each other", "check the driver"))
        told = json.loads((folder / "result").read_text(encoding="utf-8"))
        logs = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*.log")))
    return Measured(setting.name, dict(setting.changes), ranks, told, transports(logs) if is_cuda else ("gloo",))


def _wait(running: Sequence["subprocess.Popen[bytes]"]) -> None:
    end = time.monotonic() + LIMIT_S
    try:
        for each in running:
            each.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(say("link probe", f"no end in {LIMIT_S:.0f} s", "ranks that reach each other", "check the driver")) from None
    finally:
        for each in running:
            each.kill()


def exchange_gbs(peers: Peers, device: torch.device, size: int) -> float:
    """Gigabytes a second that this rank sends where it sends `size` bytes in all; the median of exchanges timed one by one."""
    each = max(1, size // max(peers.count - 1, 1) // 2)  # elements for every other rank
    counts = [each] * peers.count
    sent = torch.zeros(each * peers.count, dtype=torch.bfloat16, device=device)
    received, seconds = torch.empty_like(sent), list[float]()
    for run in range(WARM_UP + RUNS):
        peers.any(False)  # all begin together
        began = time.perf_counter()
        peers.exchange(received, sent, counts, counts).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if run >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    return 2 * each * (peers.count - 1) / statistics.median(seconds) / 1e9


def measure(peers: Peers, device: torch.device, shrink: int) -> dict[str, float]:
    """Gigabytes a second that this rank sends, by workload."""
    return {name: exchange_gbs(peers, device, size) for name, size in message_bytes(peers.count, shrink).items()}


def head_groups(peers: Peers, device: torch.device) -> int:
    """Into how many head groups these ranks cut an exchange, by the first one's measurement: one on a fast link, else `GROUPS`.

    Raises PeersLost where a rank is gone, or has no room for one exchange.
    """
    if peers.count == 1:
        return 1
    size = message_bytes(peers.count, 1 if device.type == "cuda" else 64)["h3-t2va-5s"]
    try:
        speed = exchange_gbs(peers, device, size)
    except RuntimeError as error:
        expected = f"all of them, each with {2 * size * peers.count / (peers.count - 1) / 1e9:.2g} GB free"
        raise PeersLost(say("ranks of one clip", str(error)[:200], expected, "run it again")) from error
    return peers.same(1 if speed >= FAST_LINK_GBS else GROUPS)


def _rank(folder: Path, ranks: int, is_cuda: bool, shrink: int, rank: int) -> None:
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    with joined(Place(rank, rank, ranks, ranks), device, init_method=f"file://{folder}/store") as peers:
        told = measure(peers, device, shrink)
    if rank == 0:
        (folder / "result").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", int(sys.argv[4]), int(sys.argv[5]))
