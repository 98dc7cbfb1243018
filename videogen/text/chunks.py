"""Reuse beyond prefixes, opt-in and approximate: passages met before, at other places, with the tokens that deviate most computed again.

The idea is CacheBlend's (Yao et al., EuroSys 2025): keys are turned to their new positions; the first layers run in full and show how far
each cached token lies from what it should be here; the farthest are computed in every further layer, over the mixed cache. How far the
others lie is the drift that `caches.policy.decide` is given. For decoders whose every layer attends to everything (qwen3, qwen3_vl).
"""

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from caches.policy import Action, Budget, Decision, History, Step, decide
from caches.prefix_hook import packed
from videogen.errors import bad
from videogen.text.choose import BATCHING, choose
from videogen.text.forwarding import difference

SHARE, PROBE = 0.15, 1
MAX_CHUNKS = 64
CHUNK_BUDGET = Budget(lam=0.03, max_streak=3, first=16, warm_up=0.0)  # docs/text.md has what that costs
Pair = tuple[torch.Tensor, torch.Tensor]
Rule = Callable[[Budget, History, Step, Mapping[str, float]], Decision]


@dataclass(frozen=True, slots=True)
class Blended:
    """Logits (V) after the prompt, the cache behind them, the decision, and how many tokens were not computed past the first layers."""

    logits: torch.Tensor
    cache: Any
    decision: Decision
    reused: int


class _Collect:
    """Stands where a cache would: hands keys and values on, laid into what is known at `rows`, and keeps them by layer."""

    def __init__(self, known: Sequence[Pair] | None = None, rows: torch.Tensor | None = None) -> None:
        self.known, self.rows = known, rows
        self.made: dict[int, Pair] = {}

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> Pair:
        """One layer's keys and values, (1, H, S, D) each."""
        if self.known is not None and self.rows is not None:
            whole = [tensor.clone() for tensor in self.known[layer]]
            whole[0][:, :, self.rows], whole[1][:, :, self.rows] = keys, values
            keys, values = whole
        self.made[layer] = keys, values
        return keys, values


@dataclass(slots=True)
class ChunkReuse:
    """Passages of one model. `share` of the reused tokens are computed again; with a budget of 0 everything is."""

    model: Any
    budget: Budget
    share: float = SHARE
    rule: Rule = decide
    kept: OrderedDict[bytes, list[Pair]] = field(default_factory=OrderedDict)
    _stack: Any = field(init=False)
    _cache_name: str = field(init=False)

    def __post_init__(self) -> None:
        self._stack = getattr(self.model.model, "language_model", self.model.model)
        rotary = getattr(self._stack, "rotary_emb", None)
        kinds = set(getattr(self.model.config.get_text_config(), "layer_types", None) or ["full_attention"])
        is_plain = choose(self.model.config).engine == BATCHING and kinds == {"full_attention"}
        if not is_plain or getattr(rotary, "attention_scaling", None) != 1.0:
            raise bad("chunk reuse", type(self.model).__name__, "plain attention and rotary positions in every layer", "use prefixes only")
        if not 0 <= self.share <= 1:
            raise bad("chunk reuse share", self.share, "a share from 0 to 1", "change it")
        names = inspect.signature(type(self._stack.layers[0]).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def clear(self) -> None:
        """Forget every passage: the weights are others now."""
        self.kept.clear()

    @torch.no_grad()
    def learn(self, tokens: Sequence[int]) -> None:
        """Compute a passage alone and keep its keys and values; the least recently used goes when there are too many."""
        key = packed(tokens)
        if key in self.kept or not tokens or self.budget.lam == 0:
            return
        made = _Collect()
        self._run(self._embed(tokens), torch.arange(len(tokens), device=self._device), range(len(self._stack.layers)), made)
        self.kept[key] = [made.made[layer] for layer in range(len(self._stack.layers))]
        while len(self.kept) > MAX_CHUNKS:
            self.kept.popitem(last=False)

    @torch.no_grad()
    def prefill(self, tokens: Sequence[int], parts: Sequence[int]) -> Blended:
        """Prefill a prompt whose leading passages are `parts` tokens long each; those not known, and the rest, are computed."""
        length, layers = len(tokens), range(len(self._stack.layers))
        known, is_reused = self._known(tokens, parts)
        places, first = torch.arange(length, device=self._device), _Collect()
        hidden = self._run(self._embed(tokens), places, layers[: PROBE + 1], first)
        rows, drift = self._rows(first.made[PROBE], known, is_reused)
        decision = self.rule(self.budget, History(computed=length), Step(length - len(rows), length), {"chunk": drift})
        rows = rows if decision.action is Action.REUSE else places
        rest = _Collect(known, rows)
        hidden = self._run(hidden[:, rows], rows, layers[PROBE + 1 :], rest, length)
        logits = self.model.lm_head(self._stack.norm(hidden[:, -1:]))[0, -1].float()
        cache = DynamicCache(config=self.model.config.get_text_config())
        for layer in layers:
            cache.update(*(first.made | rest.made)[layer], layer)
        return Blended(logits, cache, decision, length - len(rows))

    def quality(self, tokens: Sequence[int], parts: Sequence[int], exact: torch.Tensor) -> dict[str, Any]:
        """What reuse costs on one prompt, against the logits (V) of its full prefill."""
        made = self.prefill(tokens, parts)
        divergence = torch.nn.functional.kl_div(made.logits.log_softmax(-1), exact.softmax(-1), reduction="sum")
        return {
            "reused": made.reused,
            "drift": made.decision.drift["chunk"],
            "reason": made.decision.reason,
            "error": difference(made.logits, exact),
            "divergence": float(divergence),
            "same_first_token": bool(made.logits.argmax() == exact.argmax()),
        }

    @property
    def _device(self) -> torch.device:
        return torch.device(self._stack.embed_tokens.weight.device)

    def _embed(self, tokens: Sequence[int]) -> torch.Tensor:
        embedded: torch.Tensor = self._stack.embed_tokens(torch.tensor([[*tokens]], device=self._device))
        return embedded

    def _run(self, hidden: torch.Tensor, rows: torch.Tensor, layers: range, cache: _Collect, length: int | None = None) -> torch.Tensor:
        """Layers over the rows (1, S, D) at these places, which see every place up to their own."""
        seen = torch.arange(len(rows) if length is None else length, device=rows.device)
        mask = torch.zeros(len(rows), len(seen), dtype=hidden.dtype, device=rows.device)
        mask.masked_fill_(seen[None] > rows[:, None], torch.finfo(hidden.dtype).min)
        where = {"position_embeddings": self._stack.rotary_emb(hidden, self._places(rows)), "position_ids": rows[None]}
        for layer in layers:
            out = self._stack.layers[layer](hidden, attention_mask=mask[None, None], **where, **{self._cache_name: cache})
            hidden = out[0] if isinstance(out, tuple) else out
        return hidden

    def _known(self, tokens: Sequence[int], parts: Sequence[int]) -> tuple[list[Pair], torch.Tensor]:
        """Keys and values of the whole length by layer, zero where nothing is known, and a mask (S) of where it is."""
        like = self._stack.layers[0].self_attn
        heads = self.model.config.get_text_config().num_key_value_heads
        shape = (1, heads, len(tokens), like.head_dim)
        dtype = self._stack.embed_tokens.weight.dtype
        known = [tuple(torch.zeros(shape, dtype=dtype, device=self._device) for _ in range(2)) for _ in self._stack.layers]
        is_reused = torch.zeros(len(tokens), dtype=torch.bool, device=self._device)
        begin = 0
        for part in parts:
            end, key = begin + part, packed(tokens[begin : begin + part])
            if (found := self.kept.get(key)) is not None:
                self.kept.move_to_end(key)
                is_reused[begin:end] = True
                for (keys, values), whole in zip(found, known):
                    whole[0][:, :, begin:end], whole[1][:, :, begin:end] = self._turned(keys, begin), values
            begin = end
        return [(keys, values) for keys, values in known], is_reused

    def _places(self, rows: torch.Tensor) -> torch.Tensor:
        """Positions as the rotation takes them: (1, S), or time, height and width alike, (3, 1, S), in a vision-language model."""
        return rows.expand(3, 1, -1) if hasattr(self.model.model, "language_model") else rows[None]

    def _turned(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Keys (1, H, n, D) moved `by` places on: rotations add up."""
        cos, sin = self._stack.rotary_emb(keys.float(), self._places(torch.tensor([by], device=keys.device)))
        wide = keys.float()
        halves = torch.cat([-wide[..., wide.shape[-1] // 2 :], wide[..., : wide.shape[-1] // 2]], dim=-1)
        turned: torch.Tensor = wide * cos[:, None] + halves * sin[:, None]
        return turned.to(keys.dtype)

    def _rows(self, exact: Pair, known: Sequence[Pair], is_reused: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The places to compute, ascending, and how far the others lie from what they should be: root mean square, relative."""
        off = sum(((a - b).float().pow(2).sum(dim=(0, 1, 3)) for a, b in zip(exact, known[PROBE])), start=torch.zeros(()))
        size = sum((a.float().pow(2).sum(dim=(0, 1, 3)) for a in exact), start=torch.zeros(()))
        deviation = torch.where(is_reused, off / size, torch.full_like(off, -1.0))
        again = deviation.topk(math.ceil(self.share * int(is_reused.sum()))).indices
        is_computed = ~is_reused
        is_computed[again] = True
        left = deviation[~is_computed]
        drift = float(left.mean().sqrt()) if len(left) else 0.0
        return is_computed.nonzero()[:, 0], drift
