"""The forwards of one request: prefill in chunks over a cache, and single tokens; the cache's class is the model's own."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from videogen.text.asks import Ask


class Forward:
    """One model's forward under the names this transformers gives its arguments. `chunk`: tokens a prefill forward takes."""

    def __init__(self, model: Any, chunk: int) -> None:
        self.model, self.chunk = model, chunk
        names = inspect.signature(type(model).forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self.device = next(iter(model.parameters())).device

    def __call__(self, tokens: Sequence[int], cache: Any) -> tuple[torch.Tensor, Any]:
        """(logits (V) after the last token in float32, cache that holds these tokens too); `cache` None begins one, else it is changed."""
        ids = torch.tensor([[*tokens]], device=self.device)
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self.cache_name: cache})
        return out.logits[0, -1].float(), out.past_key_values

    def prefill(self, tokens: Sequence[int], cache: Any, each: Callable[[], bool] = lambda: True) -> tuple[torch.Tensor | None, Any]:
        """The same over many tokens, a chunk a forward; stops early, without logits, when `each` says so before a chunk."""
        logits: torch.Tensor | None = None
        for begin in range(0, len(tokens), self.chunk):
            if not each():
                return None, cache
            logits, cache = self(tokens[begin : begin + self.chunk], cache)
        return logits, cache

    def forget_pictures(self) -> None:
        """Vision-language models remember the last picture's positions, and would lay them over a text-only prompt."""
        for part in filter(None, (self.model, getattr(self.model, "model", None))):
            if hasattr(part, "rope_deltas"):
                part.rope_deltas = None


def duplicate(cache: Any) -> Any:
    """A cache of its own with the same content: generation writes into what it is given."""
    return copy.deepcopy(cache)


def cache_bytes(cache: Any) -> int:
    """What the tensors of a cache hold, each counted once."""
    seen: dict[int, int] = {}
    stack, known = [cache], set()
    while stack:
        item = stack.pop()
        if id(item) in known:
            continue
        known.add(id(item))
        if isinstance(item, torch.Tensor):
            seen[item.data_ptr()] = item.nbytes
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif type(item).__module__.startswith("transformers."):
            stack.extend(vars(item).values())
    return sum(seen.values())


def pick(logits: torch.Tensor, ask: Ask, generator: torch.Generator) -> int:
    """The next token: the likeliest, or one drawn on the CPU from the smallest set of likelihood `top_p`."""
    if ask.temperature == 0:
        return int(logits.argmax())
    shares = (logits.cpu() / ask.temperature).softmax(-1)
    ordered, index = shares.sort(descending=True)
    ordered[ordered.cumsum(0) - ordered >= ask.top_p] = 0
    return int(index[torch.multinomial(ordered, 1, generator=generator)])


def difference(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error of logits (V), relative to their own spread; NaN where either is not finite."""
    spread = float((exact - exact.mean()).abs().max())
    return float((got - exact).abs().max()) / spread if spread else float("nan")
