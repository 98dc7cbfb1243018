"""Three hundred seeded inputs and every one that ever broke something; `python -m tests.fuzz` is the long run."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.box import Box, Broken, must_be_finite
from tests.fuzz.command import run_main
from tests.fuzz.seeds import SEEDS
from tests.fuzz.trial import KINDS, QUICK, REFUSED, VIOLATION, Kind, draw, try_case
from videogen.errors import RequestError


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(logging.root.manager, "disable", logging.CRITICAL)
        yield Box(tmp_path_factory.mktemp("fuzz"))


def test_three_hundred_inputs_are_taken_or_refused_in_our_words(box: Box) -> None:
    broken = []
    for index in range(300):
        name, rng = draw(0, index, QUICK)
        outcome = try_case(name, KINDS[name].make(rng, box), box)
        broken += [f"{index}: {outcome.kind}: {outcome.told}"] if outcome.verdict == VIOLATION else []
    assert not broken, "\n".join(broken)


def test_what_once_broke_something_does_not_any_more(box: Box) -> None:
    outcomes = [try_case(name, case, box) for name, case in SEEDS]
    assert not [f"{name}: {outcome.told}" for (name, _), outcome in zip(SEEDS, outcomes) if outcome.verdict == VIOLATION]
    assert sum(outcome.verdict == REFUSED for outcome in outcomes) > len(SEEDS) // 2


def test_an_input_is_the_same_for_the_same_seed(box: Box) -> None:
    for index in range(30):
        (name, one), (again, two) = draw(5, index), draw(5, index)
        assert name == again and repr(KINDS[name].make(one, box)) == repr(KINDS[name].make(two, box))


def test_every_kind_of_violation_is_seen(box: Box, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def endless(_case: object, _box: Box) -> None:
        while True:
            pass

    def careless(_case: object, _box: Box) -> None:
        (tmp_path / "stray").write_text("x")

    def blind(_case: object, _box: Box) -> None:
        must_be_finite({"a": [float("nan")]})

    def odd(_case: object, _box: Box) -> None:
        run_main(["plan", "--prompt", "x", "--name", "{nope}"])
        raise Broken("accepted")

    def curt(_case: object, _box: Box) -> None:
        raise RequestError("no")

    monkeypatch.setattr("tests.fuzz.watch.DEADLINE_S", 0.05)
    told = {}
    for check in (endless, careless, blind, odd, curt):
        monkeypatch.setitem(KINDS, "bad", Kind(1, lambda _rng, _box: None, check))
        outcome = try_case("bad", None, box)
        told[check.__name__] = (outcome.verdict, outcome.told)
    assert told.pop("odd")[0] == REFUSED
    assert {name: verdict for name, (verdict, _) in told.items()} == dict.fromkeys(told, VIOLATION)
    assert "hang" in told["endless"][1] and "wrote" in told["careless"][1] and "nan" in told["blind"][1] and "form" in told["curt"][1]
