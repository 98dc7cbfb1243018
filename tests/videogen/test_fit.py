"""Where weights go by themselves: what was measured on a GPU is what is foretold, and every card gets the simplest place that fits."""

import logging
from typing import Any

import pytest
import torch

from videogen import fit
from videogen.config import Recipe, Request
from videogen.fit import fitted, needs, usual
from videogen.load import outline
from videogen.parallel.comm import Peers
from videogen.parallel.weights import AUTO, WHOLE, Placement
from videogen.pipeline import open_pipeline
from videogen.recipes import find_recipe
from videogen.source import ModelSource, find_model, open_family

CUDA, CPU, GIB = torch.device("cuda"), torch.device("cpu"), 2**30
EXACT = find_recipe("exact")
OUTLINES: dict[tuple[str, torch.dtype], dict[str, torch.nn.Module]] = {}


@pytest.fixture(autouse=True)
def _outlined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(source: ModelSource, workflow: str, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
        key = (source.name, dtype)
        return OUTLINES[key] if key in OUTLINES else OUTLINES.setdefault(key, outline(source, workflow, dtype))

    monkeypatch.setattr(fit, "outline", once)


def place(
    monkeypatch: pytest.MonkeyPatch, gib: float, asked: Placement = AUTO, model: str = "random:h3", **changes: Any
) -> tuple[str, str]:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (int(gib * GIB), 0))
    source = find_model(model)
    options = {"recipes": [EXACT], "device": CUDA, "is_alone": True} | changes
    found = fitted(asked, source, open_family(source), **options)
    assert found.peers is asked.peers
    return found.kind, found.text


def test_a_clip_of_released_size_takes_what_it_took_on_an_h200() -> None:
    source = find_model("random:h3")
    parts = outline(source, "t2va", torch.bfloat16)
    assert {parameter.device.type for module in parts.values() for parameter in module.parameters()} == {"meta"}
    found = [needs(parts, each, 37_836) / GIB for each in (WHOLE, Placement("offload", text="offload"))]
    assert found == [pytest.approx(122.1, rel=0.01), pytest.approx(9.85, rel=0.05)]  # docs/parallel.md
    assert needs(parts, WHOLE, 104_092) > needs(parts, WHOLE, 37_836) + 8 * GIB


@pytest.mark.parametrize(
    ("gib", "wanted"), [(141, ("whole", "resident")), (94, ("whole", "offload")), (60, ("parked", "offload")), (24, ("offload", "offload"))]
)
def test_every_card_gets_the_simplest_place_that_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gib: float, wanted: tuple[str, str]
) -> None:
    with caplog.at_level(logging.WARNING, logger="videogen"):
        assert place(monkeypatch, gib) == wanted
    told = f"weights: {wanted[0]}, text encoder: {wanted[1]}; a clip needs about"
    assert caplog.messages == [] if gib == 141 else told in caplog.messages[0]


def test_wan_keeps_an_expert_at_home_and_pocket_fits_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    wan = [place(monkeypatch, gib, model="random:wan22-t2v") for gib in (80, 52, 26, 16)]
    assert wan == [("whole", "resident"), ("offload-idle", "resident"), ("offload", "resident"), ("offload", "offload")]
    assert place(monkeypatch, 4, model="pocket") == ("whole", "resident")


def test_what_is_asked_for_stays_and_the_rest_is_fitted_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (
        Placement("whole", text="auto"),
        Placement("auto", text="resident"),
        Placement("auto", text="visiting"),
        Placement("parked", text="resident"),
    )
    found = [place(monkeypatch, 24, each) for each in asked]
    assert found == [("whole", "offload"), ("offload", "resident"), ("offload", "visiting"), ("parked", "resident")]
    assert [place(monkeypatch, 141, rows=rows) for rows in (None, 300_000)] == [("whole", "resident"), ("whole", "offload")]
    eight = [place(monkeypatch, gib, recipes=[EXACT, find_recipe("float8")]) for gib in (24, 141)]
    assert eight == [("parked", "offload"), ("whole", "offload")]  # 8-bit products do not visit, and take a byte a weight more


class Two(Peers):
    """Two ranks, of which the first took `first`."""

    first: int | None = None

    def same(self, value: int) -> int:
        return value if self.first is None else self.first


def test_ranks_that_share_a_clip_take_one_place_and_shard_before_they_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Placement("auto", Two(0, 2, None, None), "auto")
    found = [place(monkeypatch, gib, asked, is_alone=False) for gib in (141, 94, 60, 40, 16)]
    assert found == [("whole", "resident"), ("whole", "offload"), ("parked", "offload"), ("fsdp", "offload"), ("offload", "offload")]
    other = Two(1, 2, None, None)
    other.first = 5  # of whole, parked and fsdp, each with and without the text encoder
    assert place(monkeypatch, 141, Placement("auto", other, "auto"), is_alone=False) == ("fsdp", "offload")


def test_projections_without_tables_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [find_recipe("plain")]
    assert [place(monkeypatch, gib, recipes=plain) for gib in (94, 60, 40)] == [
        ("whole", "offload"),
        ("offload", "offload"),
        ("offload", "offload"),
    ]
    parts = fit.outline(find_model("random:h3"), "t2va", torch.bfloat16)
    small = Placement("offload", text="offload")
    assert needs(parts, small, 1, has_tables=False) - needs(parts, small, 1) == pytest.approx(13.01e9 * 2, rel=0.01)


def test_where_nothing_can_be_told_the_simplest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Placement("offload-idle", Two(0, 2, None, None), "auto")
    assert place(monkeypatch, 60, ranks, "random:wan22-t2v", is_alone=False) == ("offload-idle", "resident")
    assert place(monkeypatch, 60, Placement("parked", text="auto"), "random:wan22-t2v") == ("parked", "resident")  # the pipeline refuses it
    monkeypatch.setattr(fit, "outline", lambda *_: (_ for _ in ()).throw(OSError("no config")))
    assert place(monkeypatch, 4) == ("whole", "resident")


def test_no_card_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(_device: torch.device) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
    source = find_model("random:h3")
    family = open_family(source)
    several = Placement("auto", Peers(0, 2, None, None), "auto")
    assert fitted(AUTO, source, family, [EXACT], CPU, is_alone=True) == WHOLE
    assert fitted(several, source, family, [EXACT], CPU, is_alone=False) == Placement("whole", several.peers, "resident")
    assert fitted(AUTO, source, family, [EXACT], CUDA, is_alone=False) == WHOLE  # ranks that nobody named
    assert open_pipeline("pocket", Recipe(), device="cpu").placement == WHOLE
    assert usual(family) == Request("a clip")


def test_too_little_host_memory_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("videogen.fit._host_bytes", lambda: 60 * GIB)
    with caplog.at_level(logging.WARNING, logger="videogen"):
        place(monkeypatch, 24)
    assert "host memory may run short: 116 GiB of weights, 60 GiB free" in caplog.messages[0]
