"""Tiny random text models, and what a model without any cache across requests answers."""

from collections.abc import Sequence
from typing import Any

import torch

from videogen.text.model import TextModel
from videogen.text.shapes import random_model

CPU = torch.device("cpu")


class Words:
    """A tokenizer in name only."""

    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {"word": 1}


def text_model(name: str = "qwen3", **changes: Any) -> TextModel:
    return TextModel(random_model(name, CPU, torch.float32, **changes), Words())


def prompts(count: int, shared: int, own: int = 20, seed: int = 1) -> list[tuple[int, ...]]:
    """Prompts that share their first tokens; the own part is one token longer each time."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(2, 128, (shared,), generator=generator).tolist()
    return [(*common, *torch.randint(2, 128, (own + index,), generator=generator).tolist()) for index in range(count)]


@torch.no_grad()
def answer(model: Any, tokens: Sequence[int], limit: int) -> list[int]:
    """What `generate()` makes of it."""
    out = model.generate(torch.tensor([[*tokens]]), max_new_tokens=limit, do_sample=False, eos_token_id=None, pad_token_id=0)
    return list(map(int, out[0, len(tokens) :]))
