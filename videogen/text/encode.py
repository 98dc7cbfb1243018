"""Prompts to embeddings, for families whose encoder is driven here: exact, kept by identity and content, the negative beside the prompt."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from videogen.text.identity import Watch
from videogen.transforms.encodings import Encodings
from videogen.transforms.text_cut import text_cut

MAX_KEPT = 256


@dataclass(frozen=True, slots=True)
class Embeds:
    """prompt_embeds (1, L, D) and their mask (1, L), 1 where a token is; and whether they were kept from before."""

    embeds: torch.Tensor
    mask: torch.Tensor
    was_kept: bool


@dataclass(slots=True)
class PromptEncoder:
    """One encoder with its tokenizer. `layer` is the hidden state that is read (None: the last, normed); `length` pads and cuts to it.

    A prompt met before costs a comparison of weights and a copy; prompts that give the same tokens are one.
    """

    encoder: Any
    tokenizer: Any
    layer: int | None = None
    length: int | None = None
    kept: Encodings = field(default_factory=Encodings)
    max_kept: int = MAX_KEPT
    _watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.encoder)

    def encode(self, prompt: str) -> Embeds:
        """The embeddings of one prompt."""
        ids, mask = self._tokens(prompt)
        key = ("prompt", self.layer, self._watch.look(), tuple(ids), tuple(mask))

        def compute() -> dict[str, torch.Tensor]:
            device = next(iter(self.encoder.parameters())).device
            shown = torch.tensor([mask], device=device)
            return {"embeds": self._run(torch.tensor([ids], device=device), shown), "mask": shown}

        values, was_kept = self.kept.take(key, self.max_kept, compute)
        return Embeds(values["embeds"], values["mask"], was_kept)

    def pair(self, prompt: str, negative: str = "") -> tuple[Embeds, Embeds]:
        """Prompt and negative prompt, each on its own: neither's padding reaches the other. The negative is usually the same all day."""
        return self.encode(prompt), self.encode(negative)

    def _tokens(self, prompt: str) -> tuple[Sequence[int], Sequence[int]]:
        how = {} if self.length is None else {"padding": "max_length", "truncation": True, "max_length": self.length}
        made = self.tokenizer(prompt, **how)
        return made["input_ids"], made["attention_mask"]

    @torch.no_grad()
    def _run(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.layer is None:
            states: torch.Tensor = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            return states
        stop: AbstractContextManager[Any] = text_cut(self.encoder, self.layer) if hasattr(self.encoder, "lm_head") else nullcontext()
        with stop:
            model = getattr(self.encoder, "model", self.encoder)
            out = model(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
            read: torch.Tensor = out.hidden_states[self.layer]
        return read
