"""Which engine a text model gets, from its config alone, and why; imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PAGED_LAYERS = frozenset({"full_attention", "sliding_attention"})
BATCHING, SNAPSHOTS = "continuous batching", "prefix snapshots"


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine's name and the reason."""

    engine: str
    reason: str


def choose(config: Any, *, can_page: bool = True) -> Choice:
    """Continuous batching where every layer keeps plain keys and values, prefix snapshots for any other decoder.

    `config` is a transformers config, or config.json as a mapping. `can_page` says whether this transformers has the batching loop.
    """
    text = _text(config)
    kinds = _get(text, "layer_types")
    odd = sorted({str(kind) for kind in kinds or ()} - PAGED_LAYERS)
    if odd:
        return Choice(SNAPSHOTS, f"layers of kind {', '.join(odd)} do not page")
    hidden = _named(text, ("linear_num_value_heads", "kv_lora_rank", "index_n_heads", "ssm_state_size", "compress_rates"))
    if hidden and not kinds:
        return Choice(SNAPSHOTS, f"the config names {hidden}: its layers keep more than keys and values")
    if not can_page:
        return Choice(SNAPSHOTS, "this transformers has no continuous batching")
    told = ", ".join(sorted({str(kind) for kind in kinds})) if kinds else "full_attention by default"
    return Choice(BATCHING, f"every layer pages ({told})")


def _text(config: Any) -> Any:
    inner = _get(config, "text_config")
    return config if inner is None else inner


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _named(config: Any, names: Iterable[str]) -> str:
    return next((name for name in names if _get(config, name)), "")
