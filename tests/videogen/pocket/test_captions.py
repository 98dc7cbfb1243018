"""Captions say what the scene holds, in words the tokenizer knows whole."""

import random
from dataclasses import asdict

import pytest

from videogen.pocket import captions
from videogen.pocket.tokenizer import build_tokenizer


@pytest.mark.parametrize("held_out", [False, True])
def test_full_captions_name_every_attribute(held_out: bool) -> None:
    rng = random.Random(3)
    for _ in range(200):
        scene = captions.draw_scene(rng, held_out=held_out)
        assert captions.is_held_out(scene) == held_out
        text = captions.full(scene, rng).lower()
        for word in (captions.COLOURS[scene.colour], captions.SHAPES[scene.shape][:5], captions.BACKGROUNDS[scene.background]):
            assert word in text
        assert ("tone" in text and "no tone" not in text) == (scene.pitch != captions.SILENT)


def test_about_a_tenth_is_held_out_and_every_word_is_trained() -> None:
    rng = random.Random(4)
    drawn = [captions.draw_scene(rng, held_out=False) for _ in range(2000)]
    for field in asdict(drawn[0]):
        assert len({getattr(scene, field) for scene in drawn}) == len({getattr(s, field) for s in drawn[:400]})
    every = [
        captions.Scene(n, s, c, k, m, b, 0, 1)
        for n in range(3)
        for s in range(2)
        for c in range(8)
        for k in range(5)
        for m in range(5)
        for b in range(4)
    ]
    share = sum(map(captions.is_held_out, every)) / len(every)
    assert 0.07 < share < 0.13


def test_plain_is_the_canonical_wording() -> None:
    scene = captions.Scene(0, 1, 0, 0, 1, 2, 0, 0)
    assert captions.plain(scene) == "a large red circle moves right on a navy background, a low tone on the left"


def test_words_are_single_tokens_and_any_text_survives() -> None:
    tokenizer = build_tokenizer()
    text = captions.plain(captions.Scene(2, 0, 4, 3, 3, 1, 2, 2))
    assert len(tokenizer(text)["input_ids"]) == len(text.replace(",", " ,").split())
    odd = "Zwei naïve 猫 🚀 <|im_end"
    assert tokenizer.decode(tokenizer(odd)["input_ids"]) == odd


def test_expansions_repeat_what_the_short_prompt_says() -> None:
    rng = random.Random(5)
    for _ in range(100):
        scene = captions.draw_scene(rng, held_out=False)
        given, learnt = captions.expansion(scene, rng)
        assert captions.COLOURS[scene.colour] in given and captions.COLOURS[scene.colour] in learnt
