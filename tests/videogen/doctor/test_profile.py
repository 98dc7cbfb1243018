"""A device profile: kept by dtype and rows, used for requests near what was measured, and never the reason why a clip fails."""

import json
from pathlib import Path

import pytest
import torch

from videogen.config import Environment
from videogen.device_profile import SCHEMA, DeviceProfile, Winners, as_text, device_key, profile_path, read_profile
from videogen.transforms import settle
from videogen.transforms.options import Savings
from videogen.transforms.settle import settled

CPU, AUTO = torch.device("cpu"), Savings(matmul="auto", attention="auto")
SMALL, LARGE = Winners("float32", 256, "_native_flash", "model"), Winners("float32", 2648, None, "bfloat16")
PROFILE = DeviceProfile("here", (SMALL, LARGE, Winners("bfloat16", 256, "_native_flash")))


@pytest.mark.parametrize(
    ("rows", "matmul", "attention", "why"),
    [
        (128, "model", "_native_flash", ""),
        (512, "model", "_native_flash", ""),
        (513, "bfloat16", "model", "nothing near 513 rows in float32"),
        (1324, "bfloat16", "model", ""),
        (37000, "bfloat16", "model", "nothing near 37000 rows in float32"),
        (None, "bfloat16", "model", "not yet known"),
    ],
)
def test_a_winner_is_used_near_the_rows_it_was_measured_at(
    monkeypatch: pytest.MonkeyPatch, rows: int | None, matmul: str, attention: str, why: str
) -> None:
    monkeypatch.setattr(settle, "has_fast_bfloat16", lambda: True)
    used, reasons = settled(AUTO, CPU, torch.float32, (), PROFILE, rows)
    assert (used.matmul, used.attention) == (matmul, attention)
    assert why in reasons.get("attention", "") and why in reasons.get("matmul", "") and ("attention" in reasons) is bool(why)
    monkeypatch.setattr(settle, "has_fast_bfloat16", lambda: False)
    assert settled(AUTO, CPU, torch.float32, (), PROFILE, rows)[0].matmul == ("bfloat16" if rows == 1324 else "model")


def test_a_winner_of_another_dtype_is_none() -> None:
    half = settled(AUTO, CPU, torch.bfloat16, (), PROFILE, 256)
    assert half[0].attention == "_native_flash" and half[0].matmul == "model"
    used, reasons = settled(AUTO, CPU, torch.float16, (), PROFILE, 256)
    assert used.attention == "model" and "in float16" in reasons["attention"]
    assert settled(Savings(), CPU, torch.float32, (), PROFILE, 256) == (Savings(), {})


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("flash_4_hub", "would be downloaded"),
        ("flash", "missing package"),
        ("gone_since", "not a valid AttentionBackendName"),
        ("_native_cudnn", "which is not to be had"),
    ],
)
def test_a_back_end_that_cannot_attend_leaves_the_models_own(backend: str, why: str) -> None:
    profile = DeviceProfile("here", (Winners("float32", 256, backend),))
    used, reasons = settled(Savings(attention="auto"), CPU, torch.float32, (), profile, 256)
    assert used.attention == "model" and reasons["attention"].startswith(f"model: the device profile names {backend}, ")
    assert why in reasons["attention"]


def test_the_nearest_entry_counts_and_a_new_one_replaces_its_like() -> None:
    near = DeviceProfile("here", (Winners("float32", 1000, "a"), Winners("float32", 2000, "b")))
    assert [getattr(near.at("float32", rows), "attention", None) for rows in (499, 500, 1400, 1430, 4000, 4001)] == [
        None,
        "a",
        "a",
        "b",
        "b",
        None,
    ]
    kept = near.keeping(Winners("float32", 1100, "c")).keeping(Winners("bfloat16", 1000, "d"))
    assert [(each.dtype, each.rows, each.attention) for each in kept.entries] == [
        ("bfloat16", 1000, "d"),
        ("float32", 1100, "c"),
        ("float32", 2000, "b"),
    ]


def test_a_file_that_is_no_profile_of_here_is_not_used(tmp_path: Path) -> None:
    environment = Environment(device_profiles=str(tmp_path))
    path = profile_path(CPU, environment)
    assert path is not None and read_profile(CPU, environment) is None
    sound = DeviceProfile(device_key(CPU), (SMALL, LARGE))
    path.write_text(as_text(sound))
    assert read_profile(CPU, environment) == sound
    plain = json.loads(as_text(sound))
    entry = plain["entries"][0]
    wrong = [{"rows": 0}, {"rows": True}, {"rows": "256"}, {"matmul": "float8"}, {"attention": 3}, {"dtype": None}, {"measured": []}]
    for changed in (
        {"schema": "videogen.device/1", "device": device_key(CPU), "attention": "_native_flash", "matmul": "model", "measured": {}},
        plain | {"device": "another"},
        plain | {"entries": 5},
        *(plain | {"entries": [entry | each]} for each in wrong),
        *(plain | {"entries": [entry | {"more": 1}]},),
    ):
        path.write_text(json.dumps(changed))
        assert read_profile(CPU, environment) is None, changed
    path.write_text("{")
    assert read_profile(CPU, environment) is None and SCHEMA.endswith("/2")
