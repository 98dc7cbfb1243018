"""Adapter kinds that are refused by name, each with its reason; a pure look at keys and at peft's config."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lora.errors import bad, listed

_REFUSED = (
    (
        r"(^|[._])(text_encoder|lora_te\d?|te\d?|text_model|conditioner)[._]",
        "text-encoder keys",
        "keys of the transformer only (the text encoder runs unchanged here, and dropping them would change what was trained)",
        "remove them and save again",
    ),
    (
        r"\.(dora_scale|lora_magnitude_vector)\b",
        "a DoRA",
        "plain low-rank factors (DoRA rescales whole weights; as a plain LoRA it has the wrong magnitude)",
        "merge it into its base with the tool that made it, or ask for a plain LoRA",
    ),
    (r"\.lokr_", "a LoKr", "plain low-rank factors (Kronecker factors are not supported)", "extract a plain LoRA from it"),
    (r"\.(hada_|oft_)", "a LoHa or OFT", "plain low-rank factors", "extract a plain LoRA from it"),
    (
        r"adaln_t_table",
        "an adapter of a pruned base (it carries an AdaLN table)",
        "an adapter of the full base (the two are not interchangeable)",
        "use the file made for the full base",
    ),
    (
        r"to_gate_compress",
        "an adapter with gates of variable sparse attention",
        "an adapter for dense attention (without its own back end it under-denoises)",
        "use the dense twin of the file",
    ),
)


def refuse_by_name(keys: Sequence[str]) -> None:
    """Raise ValueError with the reason when a key names a kind that cannot be exact here."""
    for pattern, kind, expected, advice in _REFUSED:
        hits = [key for key in keys if re.search(pattern, key)]
        if hits:
            raise bad("adapter", f"{kind}: {listed(hits)}", expected, advice)


def refuse_by_config(config: Mapping[str, Any], where: str) -> None:
    """Raise ValueError when peft's config says that the factors alone are not the update.

    PiSSA, OLoRA, CorDA and LoftQ train against a base that their initialisation has changed.
    """
    kind = str(config.get("peft_type", "LORA"))
    start = str(config.get("init_lora_weights", "")).lower()
    if config.get("use_dora"):
        kind = "DoRA"
    elif start.startswith(("pissa", "olora", "corda", "loftq")):
        kind = f"factors for a changed base (init_lora_weights {start})"
    elif config.get("fan_in_fan_out"):
        kind = "transposed factors (fan_in_fan_out)"
    if kind != "LORA":
        raise bad("adapter", f"{kind} by {where}", "a plain LoRA", "convert it with the tool that made it, or ask for a plain LoRA")
