"""A certificate survives its file, and holds for its own stratum only."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from caches.certificate import PARTS, Certificate, Fingerprint, read_certificate
from eval.cache_loss import Tolerances
from videogen import certificates

PRINT = Fingerprint("w" * 64, "", "t2va", "160x96x124", 49, "4.0/3.0", "float32", "cpu", "1", "0.1.0")
CERTIFICATE = Certificate(PRINT, 0.1, 3, 1, 1, 0.1, 0.1, {"video": 0.05, "level": 0.5}, 52, 2, 0.4, "c" * 64)


def test_a_certificate_survives_its_file() -> None:
    assert read_certificate(CERTIFICATE.to_json(), "x.json") == CERTIFICATE
    assert "P(loss > level 0.5, video 0.05) <= 0.1 with confidence 0.9 (2 of 52" in CERTIFICATE.promise


@pytest.mark.parametrize("name", [field.name for field in fields(Fingerprint)])
def test_every_difference_is_named(name: str) -> None:
    other = replace(PRINT, **{name: 12 if name == "steps" else "other"})  # type: ignore[arg-type]
    differences = PRINT.differences(other)
    assert len(differences) == 1 and differences[0].startswith(f"{name} ") and "instead of" in differences[0]
    assert PRINT.differences(PRINT) == []


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "videogen.certificate/0"},
        {"extra": 1},
        {"lam": None},
        {"fingerprint": {"weights": "x"}},
        {"fingerprint": 5},
        {"alpha": 2.0},
        {"lam": 0.0},
        {"violations": 99},
        {"violations": 52},
        {"violations": 3},  # P(X <= 3 of 52 at 0.1) is 0.23, delta 0.1
        {"n": 0, "violations": 0},
        {"n": 10**9},
        {"n": 21, "violations": 0},
        {"violations": -1},
        {"tolerances": {}},
        {"tolerances": {"video": 0.0}},
        {"tolerances": {"video": -0.05, "level": 0.5}},
        {"tolerances": {"video": 0.05, "taste": 0.5}},
    ],
)
def test_a_wrong_file_is_refused(change: dict[str, object]) -> None:
    value = json.loads(CERTIFICATE.to_json()) | change
    if change == {"lam": None}:
        del value["lam"]
    with pytest.raises(ValueError, match=r"certificate .*: got .*, expected .*; "):
        read_certificate(json.dumps(value), "x.json")
    with pytest.raises(ValueError, match="expected JSON"):
        read_certificate("{", "x.json")


def test_what_refutes_itself_is_refused_at_the_exact_count() -> None:
    assert replace(CERTIFICATE, n=22, violations=0).n == 22
    with pytest.raises(ValueError, match=r"got 0 of 21 at alpha 0.1, which has probability 0.1094, expected at most delta 0.1;"):
        replace(CERTIFICATE, n=21, violations=0)
    with pytest.raises(ValueError, match="violations: got 45 of 45"):
        replace(CERTIFICATE, n=45, violations=45)


def test_what_ships_passes_and_the_parts_are_the_losses() -> None:
    shipped = sorted(Path(certificates.__file__).parent.glob("pocket/certificates/*.json"))
    assert len(shipped) == 8 and all(certificates.open_certificate(path).lam > 0 for path in shipped)
    assert tuple(field.name for field in fields(Tolerances)) == PARTS
