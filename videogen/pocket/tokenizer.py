"""The tokenizer of pocket-h3: byte-level BPE in Qwen's form whose merges make every word of the captions one token."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2TokenizerFast

from videogen.pocket import captions
from videogen.pocket.sizes import VOCABULARY

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Qwen2's published splitting rule: a word keeps the space before it
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LABELS = ("<Picture {}>: ", "<Video {}>: ", "<Audio {}>: ")


def build_tokenizer() -> Any:
    """Train the tokenizer on the caption grammar; deterministic, a second."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    return Qwen2TokenizerFast(
        tokenizer_object=bpe, additional_special_tokens=list(SPECIALS[1:]), eos_token=SPECIALS[0], pad_token=SPECIALS[0]
    )


def save_tokenizer(folder: Path) -> Any:
    """Write `tokenizer/` and return it as it loads back."""
    build_tokenizer().save_pretrained(folder)
    return Qwen2TokenizerFast.from_pretrained(folder)


def _corpus() -> Iterator[str]:
    rng = random.Random(0)
    for label in _LABELS:
        yield from (label.format(index) for index in range(1, 10) for _ in range(20))
    for index in range(6000):
        scene = captions.draw_scene(rng, held_out=index % 2 == 0)
        for write in (captions.full, captions.short, captions.animate, captions.pictured):
            text = write(scene, rng)
            yield text
            yield text[0].upper() + text[1:]
        yield " " + captions.subject(scene)
        yield "user\n assistant\n"
