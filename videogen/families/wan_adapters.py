"""Which expert of Wan 2.2 an adapter is for, as said or by the words of its file's name; and adapters put on both. Pairs are two files."""

import re
from collections.abc import Sequence
from typing import Any

from lora.apply import Use, attach, attached_to, identity_of, nowhere
from videogen.config import Adapters, AdapterUse
from videogen.errors import bad
from videogen.parallel.visits import send_home
from videogen.stored import stored_of

HIGH, LOW, BOTH = "high", "low", "both"


def expert_of(use: AdapterUse) -> str:
    """`high` (the first expert), `low` (the second), or `both` where nobody says one, and the name says neither or both."""
    if use.expert:
        return use.expert
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", use.name).lower())  # HighNoise is two words
    named = {word.removesuffix("noise") for word in words} & {HIGH, LOW}
    return named.pop() if len(named) == 1 else BOTH


def check_pairs(adapters: Adapters) -> list[str]:
    """Notes that say what goes where. Raises RequestError where one expert would stay as it is without a word."""
    experts = [expert_of(use) for use in adapters.uses]
    found = {expert for use, expert in zip(adapters.uses, experts) if not use.expert}  # what is said is meant
    if found & {HIGH, LOW} and not {HIGH, LOW} <= {*experts} and adapters.contract != "ignore":
        named = ", ".join(use.name for use, expert in zip(adapters.uses, experts) if expert != BOTH)
        advice = "add the other file, or pass --lora-contract=ignore to adapt one expert only"
        raise bad("adapter pair", f"only {named}", "a high and a low file: the model has two experts", advice)
    where = {HIGH: "the high-noise expert", LOW: "the low-noise expert", BOTH: "both experts"}
    return [f"{use.name}: on {where[expert]}" for use, expert in zip(adapters.uses, experts)]


def put_on_experts(transformers: Sequence[Any], adapters: Adapters, uses: Sequence[Use]) -> None:
    """Have exactly these adapters on the experts, each where it belongs; what is there already and the same stays."""
    for expert, transformer in zip((HIGH, LOW), transformers):
        own = [use for use, named in zip(uses, adapters.uses) if len(transformers) == 1 or expert_of(named) in (expert, BOTH)]
        current = attached_to(transformer)
        if current is not None and current.identity == identity_of(own, fuse=adapters.fuse):
            continue
        send_home(transformer)
        if current is not None:
            current.detach()
        if own:
            attach(transformer, own, fuse=adapters.fuse, origin=stored_of(transformer) or nowhere)
