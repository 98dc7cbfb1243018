"""Embeddings: exact, kept by what they depend on, stopped at the layer that is read; negative prompts only where they do something."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import UMT5Config, UMT5EncoderModel

from tests.conftest import TINY
from tests.videogen.text.models import text_model
from videogen.cli.main import main
from videogen.config import Request
from videogen.families.h3_pipeline import open_state
from videogen.pipeline import Pipeline
from videogen.text.encode import PromptEncoder
from videogen.text.identity import Watch


class Letters:
    """One token a letter."""

    def __call__(self, text: str, max_length: int | None = None, **_: Any) -> dict[str, list[int]]:
        ids = [2 + ord(letter) % 100 for letter in text] + [1]
        if max_length is None:
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        padding = max_length - len(ids)
        return {"input_ids": [*ids[:max_length], *[0] * padding], "attention_mask": [*[1] * len(ids), *[0] * padding][:max_length]}


@pytest.fixture
def umt5() -> Iterator[PromptEncoder]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"vocab_size": 128, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
        yield PromptEncoder(UMT5EncoderModel(UMT5Config(**sizes)).eval(), Letters(), length=24)


def test_the_negative_is_computed_once_and_nothing_leaks_between_the_two(umt5: PromptEncoder) -> None:
    calls: list[int] = []
    umt5.encoder.register_forward_hook(lambda *_: calls.append(1))
    first, negative = umt5.pair("a fox", "blurry")
    with torch.no_grad():
        alone = umt5.encoder(input_ids=torch.tensor([umt5._tokens("a fox")[0]]), attention_mask=first.mask).last_hidden_state
    assert torch.equal(first.embeds, alone) and first.embeds.shape == (1, 24, 16) and int(first.mask.sum()) == 6
    second, again = umt5.pair("a cat", "blurry")
    assert [each.was_kept for each in (first, negative, second, again)] == [False, False, False, True] and len(calls) == 4
    assert torch.equal(negative.embeds, again.embeds) and not torch.equal(second.embeds, first.embeds)
    again.embeds.zero_()
    assert torch.equal(umt5.encode("blurry").embeds, negative.embeds)


def test_other_weights_another_layer_or_another_length_are_another_encoding(umt5: PromptEncoder) -> None:
    before = umt5.encode("a fox")
    with torch.no_grad():
        next(umt5.encoder.encoder.block.parameters()).mul_(1.5)
    after = umt5.encode("a fox")
    assert not after.was_kept and not torch.equal(after.embeds, before.embeds)
    assert not replace(umt5, length=30).encode("a fox").was_kept and umt5.encode("a fox").was_kept


def test_a_decoder_is_stopped_at_the_layer_and_the_state_is_the_same() -> None:
    text = text_model("qwen3_vl", num_hidden_layers=4)
    ran: list[int] = []
    for index, layer in enumerate(text.model.model.language_model.layers):
        layer.self_attn.register_forward_hook(lambda *_, index=index: ran.append(index))
    got = PromptEncoder(text.model, Letters(), layer=2).encode("a fox")
    assert ran == [0, 1]
    with torch.no_grad():
        states = text.model(input_ids=torch.tensor([Letters()("a fox")["input_ids"]]), output_hidden_states=True).hidden_states
    assert torch.equal(got.embeds, states[2])


def test_a_repeated_prompt_is_not_computed_and_new_weights_are_noticed(tiny_pipeline: Pipeline) -> None:
    resolved = tiny_pipeline.family.resolve(Request("a fox of its own", **TINY), tiny_pipeline.recipe)  # type: ignore[arg-type]
    pipe = tiny_pipeline.load("t2va")

    def encode() -> tuple[str, torch.Tensor]:
        transforms, state = tiny_pipeline.transforms_for(resolved), open_state(pipe, resolved, 0)
        transforms.call("text_encoder", pipe._blocks.sub_blocks["text_encoder"], pipe, state)
        return transforms.told["encodings text_encoder"], state.get("prompt_embeds")

    with torch.no_grad():
        told, first = encode()
        again, second = encode()
        assert (told, again) == ("computed", "kept") and torch.equal(first, second)
        weight = next(pipe.text_encoder.model.language_model.layers.parameters())
        watch = Watch(pipe.text_encoder)
        before, seen = weight.clone(), watch.look()
        weight.mul_(1.5)
        try:
            told, third = encode()
            assert told == "computed" and not torch.equal(first, third) and watch.look() != seen
        finally:
            weight.copy_(before)
        assert torch.equal(encode()[1], first)


def test_h3_says_that_it_has_no_negative_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--prompt", "a fox", "--negative-prompt", "blur"]) == 2
    assert "guidance is distilled into MiniMax-H3" in capsys.readouterr().err
