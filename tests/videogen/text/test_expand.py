"""Prompt expansion: the user's words stay first and unchanged, guards hold, the same seed gives the same text."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

from tests.conftest import TINY
from videogen.cli.main import main
from videogen.config import Request
from videogen.errors import RequestError
from videogen.pipeline import Pipeline
from videogen.text.expand import ATTEMPTS, Expander, Form
from videogen.text.film import ASPECTS, EXCLUSIVE, KNOWN_WORDS, FilmForm
from videogen.text.grammar import GrammarForm, stated
from videogen.text.guards import contradiction, drifted, malformed, repetitive, tidy
from videogen.text.source import OWN, TEMPLATE, TextSource, find_text_source

REMOTE = TextSource("test", "remote", identity="test")
GOOD = "The camera follows the fox slowly. Cold light falls on the snow. It moves gently. Quiet wind is heard."


class Script:
    """Answers from a list; keeps what it was asked."""

    sees = False

    def __init__(self, *answers: str, gain: float | None = None) -> None:
        self.answers, self.gain, self.seeds = list(answers), gain, []  # type: ignore[var-annotated]

    def write(self, messages: Sequence[dict[str, Any]], seed: int, *, limit: int, pictures: Sequence[Any] = ()) -> str:
        self.seeds.append(seed)
        return self.answers[min(len(self.seeds), len(self.answers)) - 1]

    def likelihood(self, messages: Sequence[dict[str, Any]], answer: str) -> float | None:
        return None if self.gain is None else (-1.0 if "fox" in messages[-1]["content"] else -1.0 - self.gain)


def expander(form: Form, writer: Script) -> Expander:
    made = Expander(form, torch.device("cpu"), torch.float32)
    made._writers["test"] = writer
    return made


def nobody() -> str:
    return "no text encoder here"


@pytest.mark.parametrize(
    ("answer", "gain", "reason"),
    [
        (GOOD, None, ""),
        (GOOD, 0.2, ""),
        (GOOD, -0.1, "no likelier after the prompt"),
        ("A purple dragon invades the crowded supermarket. Politicians discuss inflation.", None, "drifts"),
        ("The camera moves slowly past the fox. The camera moves slowly past the snow.", None, "repeats"),
        ("Bright noon sunlight fills the snow around the fox.", None, "contradicts"),
        ("Nice fox.", None, "too short"),
        ("See https://example.org for the snow and the fox.", None, "markup"),
        ("", None, "too short"),
    ],
)
def test_an_answer_stands_or_the_template_does_and_says_why(answer: str, gain: float | None, reason: str) -> None:
    prompt = "a fox in the snow at night"
    writer = Script(answer, gain=gain)
    made = expander(FilmForm(), writer).expand(REMOTE, prompt, 5, own=nobody)
    assert made.text.startswith(f"{prompt}. ") and made.original == prompt
    assert made.outcome == ("template" if reason else "written") and reason in made.reason
    assert len(writer.seeds) == (ATTEMPTS if reason else 1)
    assert ("follows the fox" in made.text) == (not reason)
    assert all(aspect.said.search(made.text) for aspect in ASPECTS)  # what the model left out, the template says
    assert made.record()["original"] == prompt and made.record()["text"] == made.text


def test_a_second_answer_is_asked_for_with_another_seed() -> None:
    writer = Script("Nope.", GOOD)
    assert expander(FilmForm(), writer).expand(REMOTE, "a fox in the snow", 5, own=nobody).outcome == "written"
    assert writer.seeds == [5, 6]


def test_the_same_clip_again_has_the_same_words_whoever_could_write_them_now() -> None:
    writer, refusals = Script(GOOD, "Nope."), list[str]()
    made = expander(FilmForm(), writer)
    first = made.expand(OWN, "a fox in the snow", 5, own=lambda: writer)  # type: ignore[arg-type, return-value]
    again = made.expand(OWN, "a fox in the snow", 5, own=lambda: refusals.append("no") or "no")  # type: ignore[func-returns-value]
    assert again is first and first.outcome == "written" and refusals == []
    for prompt, seed in (("a fox in the snow", 6), ("a fox in the grass", 6)):
        assert made.expand(OWN, prompt, seed, own=lambda: "no luck").reason == "no luck"
    assert made.expand(OWN, "a fox in the grass", 6, own=lambda: Script(GOOD)).outcome == "written"  # type: ignore[arg-type, return-value]


def test_who_sees_the_pictures_may_name_what_they_show() -> None:
    class Sees(Script):
        sees = True

        def write(self, messages: Sequence[dict[str, Any]], seed: int, *, limit: int, pictures: Sequence[Any] = ()) -> str:
            self.shown = (messages[0]["content"], list(pictures))
            return super().write(messages, seed, limit=limit, pictures=pictures)

    answer, prompt = "A grey ceramic elephant stands on a wooden table. The camera moves slowly.", "the figure turns around"
    writer = Sees(answer, gain=-1.0)
    picture = Image.new("RGB", (8, 8))
    made = expander(FilmForm(), writer).expand(REMOTE, prompt, 5, own=nobody, pictures=[picture])
    assert (made.outcome, made.pictures_seen) == ("written", 1) and "ceramic elephant" in made.text
    assert writer.shown[1] == [picture] and "describe in the first sentence" in writer.shown[0]
    assert "elephant" not in expander(FilmForm(), Script(answer)).expand(REMOTE, prompt, 5, own=nobody, pictures=[picture]).text


def test_the_template_is_the_seeds_alone_and_leaves_out_what_is_said() -> None:
    make = expander(FilmForm(), Script("")).expand
    texts = {make(TEMPLATE, "a fox", seed, own=nobody).text for seed in range(12)}
    assert len(texts) > 6 and make(TEMPLATE, "a fox", 3, own=nobody).text in texts
    full = "a fox walks, static camera, soft light, no sound"
    assert make(TEMPLATE, full, 1, own=nobody).text == full and make(TEMPLATE, full, 1, own=nobody).outcome == "unchanged"
    assert make(OWN, "a fox", 1, own=nobody).reason == "no text encoder here"
    for prompt in ("a street at night", "a sunny field in silence", "a room, inside", "dusk over hills"):
        for seed in range(8):
            added = make(TEMPLATE, prompt, seed, own=nobody).text[len(prompt) :]
            assert not contradiction(prompt, added, EXCLUSIVE), (prompt, added)


def test_the_guards_cut_and_find() -> None:
    assert tidy('Sure! Here it is. "A fox" runs on. and then', "a cat") == '"A fox" runs on.'
    assert tidy("a cat sits. A cat sits. The light is soft.", "a cat sits") == "The light is soft."
    assert malformed("Камера медленно следует за лисой.") == "another script"
    assert repetitive("the sea " * 9) and not repetitive("The sea is calm and the light is low.")
    assert drifted("a boat on a lake", "Accountants argue about taxes.", KNOWN_WORDS)
    assert not drifted("a boat on a lake", "The boat turns slowly in soft light.", KNOWN_WORDS)


_CASES = """
two red circles | two red circles move up on a navy background, a low tone | two red circles move up on a navy background, a low tone in the centre
a blue ring on a gray background | a small blue ring sinks, silence | a blue ring on a gray background moves down, silence
One red cross. | a red cross rests on a black background, no tone | One red cross. It stays still on a black background, silence.
a low tone, a red cross | a low tone, a red cross rises on a brown background | a low tone, a red cross, it moves up on a brown background
two red circles | two blue circles move up on a navy background, silence | contradicts the prompt (colour)
two red circles | three red circles move up on a navy background, silence | contradicts the prompt (count)
two red circles | two red circles on a navy background | leaves open motion, sound
"""  # noqa: E501


@pytest.mark.parametrize(("prompt", "answer", "expected"), [line.split(" | ") for line in _CASES.strip().splitlines()])
def test_pockets_grammar_is_continued_with_what_is_open(prompt: str, answer: str, expected: str) -> None:
    form = GrammarForm()
    addition, reason = form.judge(prompt, answer)
    assert reason == expected if reason else form.join(prompt, addition) == expected
    told = form.join(prompt, form.template(prompt, random.Random(1)))
    assert told.startswith(prompt) and {"motion", "background", "sound"} <= stated(told).keys()
    assert stated(told).items() >= stated(prompt).items()


def test_a_clip_from_an_expanded_prompt_is_the_clip_from_that_text(tiny_pipeline: Pipeline) -> None:
    asked = Request("two red circles", seed=3, **TINY)  # type: ignore[arg-type]
    expanded = tiny_pipeline.render(replace(asked, expand=OWN))
    told = expanded.record["expansion"]
    assert (told["original"], told["outcome"]) == ("two red circles", "written") and told["text"].startswith("two red circles ")
    assert expanded.record["resolved"]["prompt"] == told["text"] and expanded.record["stages_s"]["expand"] > 0
    same = tiny_pipeline.render(Request(told["text"], seed=3, **TINY))  # type: ignore[arg-type]
    assert (same.frames == expanded.frames).all() and same.record["expansion"] is None
    torch.rand(7)  # nobody else's draws decide
    again = Expander(GrammarForm(), torch.device("cpu"), torch.float32).expand(find_text_source("pocket"), "two red circles", 3, own=nobody)
    assert again.text == told["text"]  # pocket's own encoder, loaded apart


def test_the_command_line_and_job_files_take_a_source(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = tmp_path / "jobs.jsonl"
    rows = [
        {"prompt": "a ring", "seed": 1},
        {"prompt": "a ring", "seed": 1, "expand": True},
        {"prompt": "a ring", "seed": 1, "expand": "template"},
    ]
    jobs.write_text("\n".join(json.dumps(row) for row in rows))
    assert main(["plan", str(jobs), "--json", "-o", str(tmp_path / "o")]) == 0
    assert len({clip["job_id"] for clip in json.loads(capsys.readouterr().out)["clips"]}) == 3
    assert main(["plan", str(jobs), "--expand=template", "--json", "-o", str(tmp_path / "o")]) == 0
    assert len(json.loads(capsys.readouterr().out)["clips"]) == 1
    assert main(["plan", "--prompt", "a ring", "--expand", "not/there/at/all"]) == 2
    with pytest.raises(RequestError, match="TextSource"):
        Request("a ring", expand="template")  # type: ignore[arg-type]
