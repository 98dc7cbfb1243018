"""The link between ranks: measured over gloo, told with the transport NCCL names, and the faster setting kept."""

import json
from pathlib import Path

import pytest

from tests.videogen.parallel.worlds import CPU, forked, in_world
from videogen.cli import fleet
from videogen.cli.main import main
from videogen.doctor.link import Measured, as_text, best, check, transports
from videogen.parallel.launch import Launch, worker_commands
from videogen.parallel.probe import measure, message_bytes

LOG = """host:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
host:1:1 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
host:1:1 [0] NCCL INFO Channel 00 : 1[1] -> 2[2] via SHM/direct/direct
host:1:1 [0] NCCL INFO Connected all rings"""


def settings(peer: float, host: float) -> list[Measured]:
    on = Measured("peer to peer", {"NCCL_P2P_DISABLE": "0"}, 2, {"h3-t2va-5s": peer, "h3-t2va-15s": peer + 1}, ("P2P/CUMEM",))
    return [on, Measured("through host memory", {"NCCL_P2P_DISABLE": "1"}, 2, {"h3-t2va-5s": host}, ("SHM/direct/direct",))]


def test_the_transport_is_read_and_never_guessed() -> None:
    assert transports(LOG) == ("P2P/CUMEM", "SHM/direct/direct") and transports("nothing of the kind") == ("unknown",)


@pytest.mark.parametrize(
    ("peer", "host", "in_force", "is_slow", "kept"),
    [
        (45.0, 20.0, "peer to peer", False, "0"),
        (12.0, 20.0, "peer to peer", True, "1"),  # across root complexes
        (20.5, 20.0, "through host memory", False, "1"),  # within noise: what is in force stays
    ],
)
def test_the_faster_setting_is_kept(peer: float, host: float, in_force: str, is_slow: bool, kept: str) -> None:
    measured = settings(peer, host)
    row = check(measured, in_force)
    assert row.is_slow == is_slow and best(measured, in_force).changes == {"NCCL_P2P_DISABLE": kept}
    assert ("export NCCL_P2P_DISABLE=1" in row.fix) == is_slow and "videogen plan --link" in row.fix
    assert json.loads(as_text(measured, in_force))["use"] == {"NCCL_P2P_DISABLE": kept}


def test_messages_are_those_of_a_layer() -> None:
    assert message_bytes(8)["h3-t2va-5s"] == pytest.approx(237e6, rel=0.01) and message_bytes(8)["h3-t2va-15s"] > 650e6


def test_gloo_ranks_are_timed(tmp_path: Path) -> None:
    found = forked(tmp_path, 2, lambda rank: in_world(tmp_path, rank, 2, lambda peers: measure(peers, CPU, 8192)))
    assert all(set(told) == set(message_bytes(2)) and min(told.values()) > 0 for told in found)


def test_what_was_saved_reaches_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VIDEOGEN_DEVICE_PROFILES", str(tmp_path))
    (tmp_path / "link-2.json").write_text(as_text(settings(12, 20), "peer to peer"))
    (command, _) = worker_commands(Launch(2, 1, ("0", "1")), ["render"], "r", "", fleet._link_settings(2))
    assert command.environment["NCCL_P2P_DISABLE"] == "1" and fleet._link_settings(4) == {}
    (tmp_path / "link-4.json").write_text("[]")
    assert fleet._link_settings(4) == {}
    assert main(["doctor", "--link", "1"]) == 2
