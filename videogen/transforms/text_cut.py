"""The text encoder stopped after the layer whose output is read: the others and their weights never decide a clip."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from videogen.transforms.scope import Forward, forward_as


def _hand_on(_stock: Forward) -> Forward:
    def forward(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states

    return forward


@contextmanager
def text_cut(text_encoder: Any, layer: int) -> Iterator[int]:
    """Inside the scope the decoder layers from number `layer` on hand their input on; yields how many those are.

    `hidden_states[layer]`, the output of `layer` layers, is as before; later ones and the logits are not. The stack keeps
    its length: transformers hooks every layer once, and its last hidden state is post-norm.
    """
    idle = text_encoder.model.language_model.layers[layer:]
    with ExitStack() as stack:
        for each in idle:
            stack.enter_context(forward_as(each, _hand_on))
        yield len(idle)
