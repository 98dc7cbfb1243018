"""JSON files that commands read back: certificates, sidecars, journals, profiles, cards; keys lost, types changed, bytes broken."""

import json
import random
from typing import Any

from caches.calibrate import is_violation, learn_then_test
from caches.certificate import SCHEMA as CERTIFICATE
from eval.losses import Losses
from tests.fuzz.box import Box, Broken, certificate, must_be_finite
from tests.fuzz.command import run_main
from tests.fuzz.values import broken_bytes, number, text, value
from videogen.certificates import certified, open_certificate
from videogen.config import StepCache
from videogen.device_profile import read_profile
from videogen.jobs.journal import read_journal
from videogen.jobs.run import sweep

BOMBS = (
    b"[" * 100_000,
    b"{" * 1000,
    b'{"a":' * 50_000,
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b"\xff\xfe{",
    b"",
    b"null",
    b"[]",
    b'{"seed": 1e400}',
    b"-",
)
SIDECAR: dict[str, Any] = {
    "schema": "videogen.clip/1",
    "status": "completed",
    "resolved": {"prompt": "x", "workflow": "t2va", "width": 160, "height": 96, "frames": 124, "steps": 4, "seed": 5}
    | {"dtype": "float32", "recipe": "exact"},
    "model": {"source": "pocket", "identity": "0" * 64, "label": ""},
    "recipe": {"name": "exact", "adapters": {"uses": [], "contract": "apply", "stated": [], "fuse": False}},
    "forwards": 4,
    "cache": {"lambda": 0.1, "reused": 1, "steps": [{"action": "reuse"}], "reasons": {"x": 1}, "warning": "", "certificate": None},
    "attention": {"budget": 0.3},
    "adapters": {"attached": [], "contract": None},
    "inputs": [{"role": "image", "name": "a.png", "sha256": "0"}],
    "stages_s": {"load": 1.0},
    "software": {"torch": "2"},
    "expansion": {"original": "x", "source": "own", "outcome": "kept", "reason": ""},
}
JOURNAL = [
    {"event": "seed", "draft": "abc:0", "seed": 7},
    {"event": "start", "job": "j1", "name": "0001-x", "run": "1 2"},
    {"event": "done", "job": "j1", "file": "0001-x.mp4", "sha256": "0", "seconds": 1.5, "tflop": 2.0},
    {"event": "failed", "job": "j2", "error": "y"},
]
LOSS = {"lam": 0.5, "case": "t2va-1", "parts": {"lpips": 0.1, "sound": 0.2}, "reused": 0.4}
NAMES = ("../../inputs/good", "/tmp/x", "", ".", "..", "a" * 300, "a\0b", "\ud800")


def _mutated(rng: random.Random, record: Any) -> Any:
    """The record with one to three values lost, replaced, doubled or nested."""
    plain = json.loads(json.dumps(record))
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(list(_places(plain)))
        kind = rng.random()
        if kind < 0.25:
            del holder[key]
        elif kind < 0.45:
            holder[key] = number(rng)
        elif kind < 0.8:
            holder[key] = value(rng)
        elif isinstance(holder, dict):
            holder[text(rng)] = value(rng)
        if not plain:
            break
    return plain


def _places(plain: Any) -> Any:
    pairs = list(plain.items()) if isinstance(plain, dict) else list(enumerate(plain)) if isinstance(plain, list) else []
    for key, item in pairs:
        yield plain, key
        yield from _places(item)


def make(rng: random.Random, kind: str) -> bytes:
    """The bytes of such a file."""
    if rng.random() < 0.05:
        return rng.choice(BOMBS)
    if kind in ("journal", "losses"):
        known = JOURNAL if kind == "journal" else [LOSS]
        lines = [_mutated(rng, each) if rng.random() < 0.5 else each for each in rng.choices(known, k=rng.randint(1, 6))]
        lines = [{**each, rng.choice(["name", "file"]): rng.choice(NAMES)} if rng.random() < 0.3 else each for each in lines]
        data = "\n".join(json.dumps(each) for each in lines).encode() + b"\n"
        if rng.random() < 0.1:
            data += rng.choice(BOMBS) + b"\n"
    else:
        records = {"certificate": {"schema": CERTIFICATE} | certificate().to_plain(), "sidecar": SIDECAR}
        records["profile"] = {"schema": "videogen.device/1", "device": "x", "attention": "native", "matmul": None, "measured": {}}
        data = json.dumps(_mutated(rng, records[kind]) if rng.random() < 0.9 else records[kind]).encode()
    return broken_bytes(rng, data, BOMBS[1:2]) if rng.random() < 0.2 else data


def check_certificate(data: bytes, box: Box) -> None:
    """Opened as `--certificate` opens it, then asked for a request."""
    path = box.work / "certificate.json"
    path.write_bytes(data)
    found = open_certificate(path)
    options = StepCache(certificates=(found,), on_mismatch="compute")
    covered, _ = certified(options, found.fingerprint)
    if not covered.lam > 0:
        raise Broken("a certificate without a lambda")
    certified(options, certificate().fingerprint)
    must_be_finite([found, covered, found.promise])


def check_sidecar(data: bytes, box: Box) -> None:
    """Shown by `videogen inspect`, in its three forms."""
    path = box.work / "clip.json"
    path.write_bytes(data)
    for words in ([], ["--as-job"], ["--json"]):
        run_main(["inspect", str(path), *words])


def check_journal(data: bytes, box: Box) -> None:
    """Read, shown, and tidied up after, by what a resumed run does; nothing outside the folder is touched."""
    (box.out / "run.jsonl").write_bytes(data)
    journal = read_journal(box.out)
    sweep(journal)
    for job_id, known in journal.jobs.items():
        journal.is_done(job_id)
        if known.name and (box.out / f"{known.name}.mp4").parent.resolve() != box.out.resolve():
            raise Broken(f"a clip named {known.name!r}")
    must_be_finite([*journal.seeds.values(), *journal.rates])
    run_main(["status", str(box.out)])
    run_main(["plan", "--prompt", "x", "--output-dir", str(box.out), "--json"])


def check_losses(data: bytes, box: Box) -> None:
    """What a calibration measured before it was stopped: lines that say it are taken, others are measured again."""
    path = box.work / "losses.jsonl"
    path.write_bytes(data)
    tolerances = dict.fromkeys(("lpips", "sound"), 1.0)
    measured: dict[float, list[float]] = {}
    for row in Losses(path).rows.values():
        is_violation(max(row["parts"].get(name, 0) / tolerances[name] for name in tolerances))
        measured.setdefault(row["lam"], [max([0.0, *row["parts"].values()])])
    if measured and all(lam > 0 for lam in measured):
        learn_then_test(measured, alpha=0.5, delta=0.5)


def check_profile(data: bytes, box: Box) -> None:
    """A device profile is used or left out of account, never fatal."""
    from videogen.config import Environment
    from videogen.device_profile import profile_path
    from videogen.load import pick_device

    device, environment = pick_device("cpu"), Environment(device_profiles=str(box.work))
    path = profile_path(device, environment)
    assert path is not None
    path.write_bytes(data)
    read_profile(device, environment)
