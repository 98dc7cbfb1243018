"""A certificate survives its file, and holds for its own stratum only."""

import json
from dataclasses import fields, replace

import pytest

from caches.certificate import Certificate, Fingerprint, read_certificate

PRINT = Fingerprint("w" * 64, "", "t2va", "160x96x124", 49, "4.0/3.0", "float32", "cpu", "1", "0.1.0")
CERTIFICATE = Certificate(PRINT, 0.1, 3, 1, 1, 0.1, 0.1, {"video": 0.05, "audio": 0.5}, 52, 2, 0.4, "c" * 64)


def test_a_certificate_survives_its_file() -> None:
    assert read_certificate(CERTIFICATE.to_json(), "x.json") == CERTIFICATE
    assert "P(loss > audio 0.5, video 0.05) <= 0.1 with confidence 0.9 (2 of 52" in CERTIFICATE.promise


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
