"""The scale of each module by the stated precedence of its sources, or a refusal; pure, no torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lora.errors import bad

_METADATA_KEYS = ("alpha", "lora_alpha", "ss_network_alpha")
_MAX_PATTERNS = 2000
FOLDED = "scale_folded"  # our own files: alpha equals rank by construction
RANK_NOTE = "no alpha anywhere: alpha = rank (scale 1) is assumed; a trainer that keeps alpha beside its files means another scale"


@dataclass(frozen=True, slots=True)
class AlphaSources:
    """Every place an alpha may stand, but for per-module tensors. `flag` is the user's word."""

    flag: float | None
    config: Mapping[str, Any]
    config_name: str
    metadata: float | None
    metadata_name: str
    table: float | None
    is_folded: bool = False


def positive(value: object, where: str) -> float:
    """A finite number above 0. Raises ValueError naming `where` for anything else: nan, inf, 0, -2, "rank", "8/16"."""
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise bad(where, value, "a finite number above 0", "correct the file, or ask its author for the alpha")
    return number


def gather(
    *, flag: float | None, config: Mapping[str, Any], config_name: str, metadata: Mapping[str, str], table: float | None
) -> AlphaSources:
    """Read the sources. Raises ValueError for a value that is no positive number, or two metadata keys that differ."""
    found = {key: positive(metadata[key], f"metadata {key}") for key in _METADATA_KEYS if key in metadata}
    if len(set(found.values())) > 1:
        raise bad("alpha", ", ".join(f"metadata {key} = {value:g}" for key, value in found.items()), "one value", "correct the metadata")
    name = next(iter(found), "")
    return AlphaSources(
        flag=None if flag is None else positive(flag, "alpha given"),
        config=config,
        config_name=config_name,
        metadata=found.get(name),
        metadata_name=f"metadata {name}",
        table=table,
        is_folded=metadata.get(FOLDED) == "true",
    )


def scale_of(module: str, rank: int, trained_rank: int, tensor: float | None, sources: AlphaSources) -> tuple[float, str]:
    """The factor on `up @ down` and where it came from.

    Order: per-module tensor, peft's config, metadata, the table of published files, alpha = rank. `trained_rank` is
    rank / 3 for q/k/v that were fused block-diagonally: an alpha of the whole file belongs to the rank before the fusion
    (alpha triples with the rank); a module's own alpha belongs to the matrix as it lies there. Raises ValueError when the
    user's alpha contradicts one that the file declares.
    """
    declared = _declared(module, rank, trained_rank, tensor, sources)
    if sources.flag is not None:
        wanted = sources.flag / trained_rank
        if declared and not math.isclose(declared[0], wanted, rel_tol=1e-6):
            given = f"alpha {sources.flag:g} given, and another by {declared[1]} (scale {declared[0]:g}) for {module}"
            raise bad("alpha", given, "no contradiction", "leave the option away, or use a strength")
        return wanted, "alpha given"
    if declared:
        return declared
    if sources.table is not None:
        return sources.table / trained_rank, "table of published files"
    return 1.0, "alpha = rank"


def _declared(module: str, rank: int, trained_rank: int, tensor: float | None, sources: AlphaSources) -> tuple[float, str] | None:
    if tensor is not None:
        return tensor / rank, "alpha tensor"
    if sources.config.get("lora_alpha") is not None:
        return _by_config(module, rank, trained_rank, sources), sources.config_name
    if sources.metadata is not None:
        return sources.metadata / trained_rank, sources.metadata_name
    return (1.0, "scale folded in") if sources.is_folded else None


def _by_config(module: str, rank: int, trained_rank: int, sources: AlphaSources) -> float:
    """Peft's rule: patterns match the end of the module's name; rsLoRA divides by the square root of the rank."""
    config, where = sources.config, sources.config_name
    alpha = positive(_pattern(config, "alpha_pattern", module, config["lora_alpha"]), f"{where} lora_alpha")
    declared = int(positive(_pattern(config, "rank_pattern", module, config.get("r", rank)), f"{where} r"))
    if declared not in (rank, trained_rank):
        raise bad("rank", f"{rank} for {module}, {declared} by {where}", "the same rank", "use the config the file came with")
    return alpha / (math.sqrt(declared) if config.get("use_rslora") else declared)


@lru_cache(4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of peft's for the end of a module's name. Raises re.error where it is none, or might search for ever.

    Backtracking needs a repeated group or many repeats: a file of somebody else's must not be able to make a search endless.
    """
    bare = pattern.replace("(?:", "(")
    if len(pattern) > 300 or re.search(r"\)[*+?{]|\{", bare) or len(re.findall(r"[*+]", bare)) > 2 or bare.count("?") > 2:
        raise re.error("a pattern with a repeated group, or more than two of * and + or of ?")
    return re.compile(rf"(.*\.)?({pattern})")


def _pattern(config: Mapping[str, Any], name: str, module: str, default: object) -> object:
    patterns = config.get(name) or {}
    try:
        if len(patterns) > _MAX_PATTERNS:
            raise re.error(f"{len(patterns)} patterns, at most {_MAX_PATTERNS}")
        return next((value for pattern, value in patterns.items() if _compiled(pattern).fullmatch(module)), default)
    except (re.error, AttributeError) as error:
        raise bad(f"peft config {name}", f"{repr(patterns)[:160]} ({error})", "patterns to numbers", "correct the file") from None
