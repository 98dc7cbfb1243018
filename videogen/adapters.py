"""Adapters in a rendering: files read against the model's configs before a weight loads, put onto its transformer, recorded."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel, WanTransformer3DModel
from safetensors import SafetensorError
from torch import nn

from lora.adapter import Adapter
from lora.apply import Attachment, Use, attach, attached_to, identity_of, nowhere
from lora.contract import Contract, parse_value, resolve_contract
from lora.convert import ReadOptions, load_adapter
from lora.target import Target, target_of
from videogen.config import SHIPPED, Adapters, AdapterUse, Recipe, as_plain
from videogen.errors import EnvironmentFault, RequestError, bad, say
from videogen.families.wan_adapters import check_pairs, expert_of, put_on_experts
from videogen.identity import hash_settings
from videogen.parallel.visits import send_home
from videogen.places import user_path
from videogen.source import ModelSource, open_family
from videogen.stored import stored_of

_KEPT = 2
_SAMPLING = ("forwards", "shift_video", "shift_audio", "sigmas", "partition")  # what adapters used together must agree on


@contextmanager
def adapter_errors() -> Iterator[None]:
    """Faults of an adapter file become bad input, faults of the disk a lacking environment."""
    try:
        yield
    except (RequestError, EnvironmentFault):
        raise
    except ValueError as error:
        raise RequestError(str(error)) from error
    except (OSError, SafetensorError) as error:
        raise EnvironmentFault(say("adapter file", str(error), "a readable file and space to write", "check the disk")) from error


def model_target(source: ModelSource) -> Target:
    """Names and shapes of a model's transformer, from its config, on the meta device; both partitions or experts have the same."""
    logger = logging.getLogger("diffusers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with torch.device("meta"):
            kind = WanTransformer3DModel if source.is_wan else MiniMaxH3Transformer3DModel
            return target_of(kind.from_config(kind.load_config(source.folder, subfolder="transformer")))
    finally:
        logger.setLevel(before)


def find_file(use: AdapterUse, source: ModelSource) -> Path:
    """The file of a use. Raises RequestError when the model ships none of that name."""
    if not use.file.startswith(SHIPPED):
        return user_path("adapter file", use.file)
    path = source.adapters_folder / f"{use.file.removeprefix(SHIPPED)}.safetensors"
    if not path.is_file():
        advice = "pass one with --lora FILE and the recipe exact, or choose another recipe"
        raise bad(f"model {source.name}", f"no adapter {path.stem}", f"a file {path.parent.name}/{path.name} beside its weights", advice)
    return path


def settle(recipe: Recipe, source: ModelSource) -> Recipe:
    """The recipe with its adapter files read and their contracts resolved; a new value, complete and JSON-ready.

    Adapters at strength 0 are dropped, contract and all. Raises RequestError for a file that does not fit the model, and
    for adapters whose contracts contradict each other.
    """
    asked = recipe.adapters
    if asked.is_settled:
        return recipe
    with adapter_errors():
        found = [(use, find_file(use, source)) for use in asked.uses]
        target, stated, is_ignored = model_target(source), _stated(asked.stated), asked.contract == "ignore"
        uses: list[AdapterUse] = []
        read: list[Use] = []
        contracts: list[tuple[str, Contract]] = []
        notes: list[str] = []
        for use, path in found:
            adapter = load_adapter(path, target, _options(asked))
            contract = _contract(path, adapter, stated, is_ignored=is_ignored)
            strength = (contract.strength or 1.0) if use.strength is None else float(use.strength)
            if strength == 0:
                notes.append(f"{use.name}: strength 0, off")
                continue
            uses.append(replace(use, strength=strength, digest=adapter.digest))
            read.append(Use(adapter, strength))
            contracts.append((use.name, contract))
            notes.append(describe(use.name, strength, contract) + ("; what the file says is ignored" if is_ignored else ""))
            notes += [f"{use.name}: {note}" for note in (*adapter.notes, *contract.notes)]
        terms = together(contracts)
    settled = replace(asked, uses=tuple(uses), terms=terms, identity=identity_of(read, fuse=asked.fuse), notes=tuple(notes))
    has_two_experts = source.is_wan and bool(uses) and open_family(source).geometry.has_two_experts
    if (said := [use.name for use in uses if use.expert]) and not has_two_experts:
        raise bad("adapter expert", f"one for {', '.join(said)}", "none: this model has one expert", "drop :high, :low or :both")
    if has_two_experts:
        where = check_pairs(settled)
        settled = replace(settled, notes=(*notes, *where), identity=hash_settings([settled.identity, [expert_of(use) for use in uses]]))
    return replace(recipe, adapters=settled)


def _stated(words: Sequence[str]) -> dict[str, object]:
    """`FIELD=VALUE` words as values. Raises RequestError for a field said twice, ValueError for one that cannot be read."""
    found: dict[str, object] = {}
    for name, _, text in (word.partition("=") for word in words):
        if name in found:
            raise bad("adapter contract", name, "each field once", "drop one --lora-contract")
        found[name] = parse_value(name, text)
    return found


def _options(adapters: Adapters) -> ReadOptions:
    partition = _stated(adapters.stated).get("partition")
    return ReadOptions(partition=None if partition is None else str(partition))


def _contract(path: Path, adapter: Adapter, stated: Mapping[str, object], *, is_ignored: bool) -> Contract:
    if is_ignored:
        return resolve_contract("", {}, flags=stated)
    return resolve_contract(str(path), adapter.metadata, partition=adapter.partition, flags=stated)


def together(contracts: Sequence[tuple[str, Contract]]) -> Contract:
    """What adapters, each with the name of its file, ask of one request: each field from whoever states it.

    Raises RequestError when two state different values.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for file, contract in contracts:
        for name in _SAMPLING:
            value = getattr(contract, name)
            if value is None:
                continue
            origin = contract.sources[name] if contract.sources[name] == "flag" else f"{contract.sources[name]} of {file}"
            if values.setdefault(name, value) != value:
                given = f"{name} {values[name]} by {sources[name]} and {value} by {origin}"
                raise bad("adapters together", given, "one contract", "drop one of them, or pass --lora-contract=ignore")
            sources.setdefault(name, origin)
    return Contract(**values, sources=sources)


def describe(file: str, strength: float, contract: Contract) -> str:
    """One line: what was set from an adapter's contract, and by what."""
    told: list[tuple[str, str]] = []
    if contract.forwards is not None:
        told.append((f"{contract.forwards} forwards", contract.sources["forwards"]))
    if contract.sigmas is not None:
        told.append(("sigmas " + " ".join(f"{sigma:g}" for sigma in contract.sigmas), contract.sources["sigmas"]))
    if contract.shift_video is not None and contract.shift_audio is not None:
        told.append((f"shifts {contract.shift_video:g}/{contract.shift_audio:g}", contract.sources["shift_video"]))
    if contract.partition is not None:
        told.append((f"for {contract.partition}", contract.sources["partition"]))
    if contract.strength == strength:
        told.append((f"strength {strength:g}", contract.sources["strength"]))
    origins = dict.fromkeys(origin for _, origin in told)
    grouped = [f"{', '.join(text for text, by in told if by == origin)} (by {origin})" for origin in origins]
    if contract.strength != strength:
        trained = "" if contract.strength is None else f" where it was trained for {contract.strength:g}"
        grouped.append(f"strength {strength:g}{trained}")
    return f"{file}: " + ", ".join(grouped if told else ["no contract of its own", *grouped])


class Shelf:
    """The adapters read last, by identity, so that two recipes in turn do not read their files at every clip."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._kept: dict[str, list[Use]] = {}

    def take(self, adapters: Adapters, target: Target) -> list[Use]:
        """The adapters as read. Raises RequestError when a file is no longer the one that was settled."""
        uses = self._kept.pop(adapters.identity, None)
        if uses is None:
            uses = [_read_again(use, self.source, target, adapters) for use in adapters.uses]
        self._kept[adapters.identity] = uses
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return uses


def put_on_wan(parts: Any, adapters: Adapters, shelf: Shelf) -> None:
    """As `put_on`, for the experts of a Wan model."""
    with adapter_errors():
        uses = shelf.take(adapters, target_of(parts.transformers[0])) if adapters.uses else []
        put_on_experts(parts.transformers, adapters, uses)


def put_on(model: nn.Module, adapters: Adapters, shelf: Shelf) -> Attachment | None:
    """Have exactly these adapters on a transformer; what is there already and the same stays, anything else goes.

    Raises RequestError when a file is no longer the one that was settled, or does not fit; the model is then bare.
    """
    current = attached_to(model)
    if current is not None and current.identity == adapters.identity:
        return current
    send_home(model)  # weights are written where they live
    if current is not None:
        current.detach()
    if not adapters.uses:
        return None
    with adapter_errors():
        return attach(model, shelf.take(adapters, target_of(model)), fuse=adapters.fuse, origin=stored_of(model) or nowhere)


def _read_again(use: AdapterUse, source: ModelSource, target: Target, adapters: Adapters) -> Use:
    adapter = load_adapter(find_file(use, source), target, _options(adapters))
    if use.strength is None or adapter.digest != use.digest:
        raise bad(f"adapter {use.name}", "another content than when the job was planned", "an unchanged file", "start again")
    return Use(adapter, use.strength)


def adapters_record(adapters: Adapters, attachments: Sequence[Attachment | None]) -> dict[str, Any]:
    """The sidecar's `adapters` entry: what is on the transformer or on both experts, and the contract with who said what."""
    terms = {field.name: as_plain(getattr(adapters.terms, field.name)) for field in fields(Contract)}
    kept = {name: value for name, value in terms.items() if value not in (None, [], {})}
    contract = {"mode": adapters.contract, "stated": list(adapters.stated)} | kept
    return {
        "identity": adapters.identity,
        "attached": [row for each in attachments if each is not None for row in each.record()],
        "contract": contract if adapters.uses else None,
    }
