"""From the keys of a file to places in a model: every naming rule scored against the model's own names. No tensor is read."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lora.errors import bad, listed
from lora.names import Place, rules_for
from lora.refusals import refuse_by_name
from lora.target import Target

PARTITIONS = ("transformer", "transformer_ref")
_PREFIXES = (
    *("transformer_ref.", "transformer.", "model.diffusion_model.", "diffusion_model.", "base_model.model.", "model."),
    *("dit.", "unet.", "lora_unet_", "lora_transformer_", "lycoris_"),
)
_KEY = re.compile(
    r"(?P<stem>.+?)(?:\.lora_(?P<half>A|B|down|up)(?:\.(?P<infix>(?!weight$)[^.]+))?(?:\.weight)?"
    r"|\.lora\.(?P<old>down|up)\.weight|(?P<alpha>\.lora\.alpha|\.alpha)|\.(?P<payload>diff|diff_b|diff_m|set_weight|set_bias))"
)
_HALVES = {"A": "down", "B": "up", "down": "down", "up": "up"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key, taken apart. `part` is down, up, alpha, diff, diff_b, set_weight or set_bias."""

    text: str
    stem: str
    part: str
    infix: str | None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every key belongs: `groups` maps a place to its keys by part. `has_infix` means peft's `.default.` was there."""

    name: str
    groups: Mapping[Place, Mapping[str, Key]]
    partition: str | None
    has_infix: bool


def parse_key(text: str) -> Key | None:
    """Take a key apart, or None when it ends like no adapter key."""
    found = _KEY.fullmatch(text)
    if found is None:
        return None
    if found["payload"] == "diff_m":  # Wan's extractors write the difference of `X.modulation` so
        return Key(text, f"{found['stem']}.modulation", "diff", None)
    half = found["half"] or found["old"]
    part = _HALVES[half] if half else "alpha" if found["alpha"] else found["payload"]
    return Key(text, found["stem"], part, found["infix"])


def _stripped(stem: str) -> Iterator[tuple[str, str | None, str]]:
    """The stem without 0, 1, 2, ... of its known prefixes, with the partition they name and the prefixes taken off."""
    partition, taken = None, ""
    yield stem, partition, taken
    while prefix := next((each for each in _PREFIXES if stem.startswith(each)), None):
        stem, taken = stem.removeprefix(prefix), taken + prefix
        partition = prefix[:-1] if prefix[:-1] in PARTITIONS else partition
        yield stem, partition, taken


def _match(rule: Mapping[str, Place], stem: str) -> tuple[Place, str | None, str] | None:
    return next(((rule[name], partition, taken) for name, partition, taken in _stripped(stem) if name in rule), None)


def decide_layout(names: Iterable[str], target: Target, partition: str | None = None) -> Layout:
    """Score every rule against the model and place every key; the order of keys has no effect.

    `partition` chooses where the file holds both. Raises ValueError, naming up to five keys, the closest layout and what
    to do, unless all keys find a place, each once.
    """
    texts = sorted(names)
    refuse_by_name(texts)
    keys = {text: parse_key(text) for text in texts}
    rules = rules_for(target)
    scores = {name: sum(1 for key in keys.values() if key and _match(rule, key.stem)) for name, rule in rules.items()}
    best = max(scores, key=lambda name: scores[name])
    name, rule = best, rules[best]
    if scores[best] < len(texts):
        rule = {stem: place for other in rules.values() for stem, place in other.items()}
        name = " + ".join(other for other in rules if any(key and _match(rules[other], key.stem) for key in keys.values()))
    lost = [text for text, key in keys.items() if key is None or _match(rule, key.stem) is None]
    if lost:
        raise _unmatched(lost, texts, keys, rule, f"{best} ({scores[best]} of {len(texts)} keys)")
    return _place(name, rule, [key for key in keys.values() if key], partition)


def _place(name: str, rule: Mapping[str, Place], keys: list[Key], partition: str | None) -> Layout:
    infixes = sorted({key.infix for key in keys if key.infix})
    if len(infixes) > 1:
        raise bad("adapter file", f"adapters named {listed(infixes)}", "one adapter", "save each to its own file")
    placed = [(key, *found) for key in keys if (found := _match(rule, key.stem))]
    present = {own for _, _, own, _ in placed if own}
    if len(present) == 2 and partition is None:
        raise bad("adapter file", "keys of transformer and of transformer_ref", "one partition", "say which partition to load")
    mine = partition if len(present) == 2 else next(iter(present), None)
    groups: dict[tuple[str | None, Place], dict[str, Key]] = {}
    for key, place, own, _ in placed:
        parts = groups.setdefault((own or mine, place), {})
        if key.part in parts:
            raise bad("adapter keys", f"{key.text} and {parts[key.part].text}", "each matrix once", "remove one of them")
        parts[key.part] = key
    prefixes = sorted({taken for *_, taken in placed if taken})
    parts_of_name = [name, *(f"prefix {prefix}" for prefix in prefixes), *(f"infix {infix}" for infix in infixes)]
    chosen = {place: parts for (own, place), parts in groups.items() if own == mine}
    _check_overlap(chosen)
    return Layout(", ".join(parts_of_name), chosen, mine, bool(infixes))


def _check_overlap(groups: Mapping[Place, Mapping[str, Key]]) -> None:
    """A fused q/k/v matrix and a split one of the same block would both apply."""
    owner: dict[tuple[str, str], Key] = {}
    for place, parts in groups.items():
        for module in place.modules:
            for part, key in parts.items():
                other = owner.setdefault((module, part), key)
                if other is not key:
                    raise bad("adapter keys", f"{other.text} and {key.text}", "one matrix for each module", "remove one of them")


def _unmatched(lost: list[str], texts: list[str], keys: Mapping[str, Key | None], rule: Mapping[str, Place], closest: str) -> ValueError:
    known = {re.sub(r"\d+", "#", name) for name in rule}
    stems = [key.stem for text in lost if (key := keys[text])]
    if stems and all(any(re.sub(r"\d+", "#", name) in known for name, *_ in _stripped(stem)) for stem in stems):
        advice = "the file is for a model with more blocks: use the model it was trained on"
    elif all(text.endswith((".weight", ".bias")) and keys[text] is None for text in texts):
        advice = "this looks like a full checkpoint: load it as a model"
    else:
        advice = "check that the file is for this model; nothing was loaded"
    return bad(
        "adapter keys", f"{len(lost)} of {len(texts)} without a place ({listed(lost)})", f"all placed; closest layout: {closest}", advice
    )
