"""Head groups hide the exchange behind attention: less exposed time than in one piece, the same output."""

import time
from pathlib import Path

import pytest
import torch

from tests.videogen.parallel.slow_link import Ticks, exposed, uneven
from tests.videogen.parallel.worlds import forked, in_world
from videogen.parallel.comm import Peers, PeersLost
from videogen.parallel.probe import head_groups
from videogen.parallel.sequence import GROUPS

BYTES = 4 * 16 * 4 * 16 * 4  # that leave one of two ranks: queries, keys, values, output
CARRY_S = 1.0


def test_head_groups_expose_less_of_a_slow_link(tmp_path: Path) -> None:
    def job(peers: Peers) -> list[tuple[float, int, bool]]:
        assert max(uneven(peers, 1), uneven(peers, 2)) < 1e-6
        runs = [exposed(peers, Ticks(), groups, attend_s=3.0, bytes_per_s=BYTES / CARRY_S) for groups in (1, 2, 4)]
        return [(seconds, messages, torch.allclose(out, runs[0][2], atol=1e-6)) for seconds, messages, out in runs]

    for plain, halves, quarters in forked(tmp_path, 2, lambda rank: in_world(tmp_path, rank, 2, job)):
        assert plain == (CARRY_S, 4, True)  # in one piece all of it is waited for
        assert halves[1:] == (8, True) and quarters[1:] == (16, True)
        # the first group's queries, keys and values, and the last group's output
        assert abs(halves[0] / plain[0] - 1 / 2) < 1e-6 and abs(quarters[0] / plain[0] - 1 / 4) < 1e-6


def test_a_fast_link_is_not_cut_and_every_rank_does_as_the_first(tmp_path: Path) -> None:
    class Arrived:
        def wait(self) -> None:
            pass

    def full(*_: object) -> Arrived:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def job(peers: Peers) -> list[int]:
        found = [head_groups(peers, torch.device("cpu"))]
        if peers.rank == 0:  # the second rank still finds a slow one
            peers.send = lambda *_: Arrived()
        else:
            peers.send = lambda *_: (time.sleep(0.01), Arrived())[1]
        found.append(head_groups(peers, torch.device("cpu")))
        peers.send = full if peers.rank == 0 else None
        with pytest.raises(PeersLost, match="run it again"):
            head_groups(peers, torch.device("cpu"))
        return found

    assert forked(tmp_path, 2, lambda rank: in_world(tmp_path, rank, 2, job)) == [[GROUPS, 1], [GROUPS, 1]]
    assert head_groups(Peers(0, 1, None, None), torch.device("cpu")) == 1
