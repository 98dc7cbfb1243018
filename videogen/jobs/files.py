"""Job files (txt, jsonl, csv, yaml) to plain job values with the place each came from; checks keys, not values."""

import csv
import io
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from videogen.errors import RequestError, bad, say

MEDIA_KEYS = ("image", "last_image", "references")
ALIASES = {"num_frames": "frames", "num_inference_steps": "steps", "first_image": "image", "reference": "references"}
KEYS = frozenset(
    {"prompt", "image", "last_image", "references", "size", "width", "height", "frames", "seconds", "steps", "seed"}
    | {"recipe", "id", "tags", "output", "repeat", "round_size", "cache_lambda", "sparse_budget", "expand", "negative_prompt"}
    | {"guidance", "cache_prior"}
    | {"lora", "lora_contract", "lora_fuse"}
)
_MAX_JOBS = 100_000
_MAX_BITS = 4096
_MAX_YAML_VALUES = 1_000_000  # as written out: a few aliases of aliases can stand for more than any memory holds


@dataclass(slots=True)
class RawJob:
    """One job as written: plain values, the place for messages, and the folder its relative paths start from."""

    values: dict[str, Any]
    place: str
    folder: Path = field(default_factory=Path.cwd)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise bad("job file", str(path), "a file that can be read", error.strerror or "check the path") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad("job file", str(path), "UTF-8 text", f"byte {error.start} is not; save it as UTF-8") from None


def normal_keys(values: dict[Any, Any], place: str) -> dict[str, Any]:
    """The values under their canonical keys.

    Raises RequestError naming the place for an unknown key or two spellings of one key.
    """
    out: dict[str, Any] = {}
    for raw_key, value in values.items():
        key = str(raw_key).strip().replace("-", "_")
        key = ALIASES.get(key, key)
        if key not in KEYS:
            raise bad(f"{place}: key", raw_key, f"one of {', '.join(sorted(KEYS))}", "correct the key")
        if key in out:
            raise bad(f"{place}: key", raw_key, "each key once", "remove one of them")
        if value is not None and value != "":
            out[key] = value
    return out


def _from_txt(text: str, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield {"prompt": line.strip()}, f"{name}:{number}"


def _from_jsonl(text: str, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:  # also a number of too many digits
            raise bad(f"{place}: line", str(error)[:80], "one JSON object", "correct the line") from None
        if not isinstance(value, dict):
            raise bad(f"{place}: line", type(value).__name__, "one JSON object", "wrap the values in {}")
        yield value, place


def _from_csv(text: str, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        twice = [each for each, count in Counter(reader.fieldnames or ()).items() if count > 1]
        if twice:
            raise bad(f"{name}:1: column", twice[0], "each column once", "remove one of them")
        for row in reader:
            place = f"{name}:{reader.line_num}"
            if None in row or None in row.values():
                raise bad(f"{place}: row", "another number of cells", f"{len(reader.fieldnames or ())} cells", "quote cells with commas")
            yield {k: _csv_value(k, v) for k, v in row.items() if v}, place
    except csv.Error as error:
        raise bad(f"{name}:{reader.line_num}: row", str(error), "valid CSV", "correct the quotes") from None


def _csv_value(key: str, value: str) -> Any:
    if key.strip() in ("references", "reference", "tags", "lora", "lora_contract"):
        return [part for part in value.split("|") if part]
    return value


class _LineLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, which YAML would settle silently, and aliases without end."""

    def get_single_node(self) -> Any:
        """The document, once it is known how large it is when written out."""
        node: Any = super().get_single_node()
        if node is not None and _written_out(node, {}) > _MAX_YAML_VALUES:
            raise yaml.constructor.ConstructorError(None, None, "more values than a job file holds, by aliases", node.start_mark)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """A whole number that can also be written out; hexadecimal ones are read at any length."""
        value = int(super().construct_yaml_int(node))
        if value.bit_length() > _MAX_BITS:
            raise yaml.constructor.ConstructorError(None, None, "a number of too many digits", node.start_mark)
        return value


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for with its aliases written out. Raises ConstructorError for one that contains itself."""
    if id(node) not in known:
        known[id(node)] = -1
        pairs = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = [part for item in pairs for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_written_out(each, known) for each in inner)
    if known[id(node)] < 0:
        raise yaml.constructor.ConstructorError(None, None, "a value that contains itself", node.start_mark)
    return known[id(node)]


def _no_double_keys(loader: _LineLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool) or key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice or not plain", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_LineLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _no_double_keys)
_LineLoader.add_constructor("tag:yaml.org,2002:int", _LineLoader.construct_yaml_int)


def _from_yaml(text: str, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        value = yaml.load(text, Loader=_LineLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise bad(f"{name}:{line}: text", getattr(error, "problem", None) or str(error)[:80], "valid YAML", "correct it") from None
    if isinstance(value, list):
        value = {"jobs": value}
    if not isinstance(value, dict):
        raise bad(f"{name}: content", type(value).__name__, "a list of jobs, or keys jobs/defaults/matrix/pairing", "correct it")
    unknown = [k for k in value if k not in ("defaults", "jobs", "matrix", "pairing")]
    if unknown:
        raise bad(f"{name}: key", unknown[0], "jobs, defaults, matrix or pairing", "correct the key")
    yield from _yaml_jobs(value, name)


def _yaml_jobs(value: dict[str, Any], name: str) -> Iterator[tuple[dict[str, Any], str]]:
    defaults, jobs = value.get("defaults") or {}, value.get("jobs", [{}])
    if not isinstance(defaults, dict) or not isinstance(jobs, list):
        raise bad(f"{name}: defaults or jobs", "another type", "defaults as keys, jobs as a list", "correct it")
    combos = _matrix(value.get("matrix") or {}, value.get("pairing", "zip"), name)
    defaults = normal_keys(defaults, f"{name}: defaults")
    for number, job in enumerate(jobs, 1):
        place = f"{name}: job {number}"
        plain = {"prompt": job} if isinstance(job, str) else job
        if not isinstance(plain, dict):
            raise bad(place, type(job).__name__, "a prompt or keys", "correct it")
        for combo in combos:
            yield defaults | combo | normal_keys(plain, place), place


def _matrix(matrix: Any, pairing: Any, name: str) -> list[dict[str, Any]]:
    if pairing not in ("zip", "product"):
        raise bad(f"{name}: pairing", pairing, "zip or product", "correct it")
    if not isinstance(matrix, dict) or not all(isinstance(v, list) and v for v in matrix.values()):
        raise bad(f"{name}: matrix", matrix, "keys with non-empty lists", "correct it")
    if not matrix:
        return [{}]
    lists = normal_keys(matrix, f"{name}: matrix")
    sizes = {key: len(values) for key, values in lists.items()}
    if pairing == "zip" and len(set(sizes.values())) > 1:
        raise bad(f"{name}: matrix", sizes, "lists of equal length", "make them equal, or set pairing: product")
    count = math.prod(sizes.values()) if pairing == "product" else max(sizes.values())
    if count > _MAX_JOBS:
        raise bad(f"{name}: matrix", f"{count} combinations", f"at most {_MAX_JOBS}", "shorten the lists, or split the file")
    rows = zip(*lists.values()) if pairing == "zip" else itertools.product(*lists.values())
    return [dict(zip(lists, row)) for row in rows]


_READERS = {".txt": _from_txt, ".jsonl": _from_jsonl, ".csv": _from_csv, ".yaml": _from_yaml, ".yml": _from_yaml}


def read_jobs(path: Path, text: str | None = None) -> list[RawJob]:
    """Every job of a file, in order; `text` stands for the content when it came from elsewhere (standard input).

    Raises RequestError naming file and line.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise bad("job file", str(path), f"an ending out of {', '.join(_READERS)}", "rename the file, or use --prompt")
    content = _text(path) if text is None else text
    found = itertools.islice(reader(content, path.name), _MAX_JOBS + 1)
    jobs = [RawJob(normal_keys(values, place), place, path.parent) for values, place in found]
    if not jobs:
        raise RequestError(say("job file", repr(str(path)), "at least one job", "add a prompt"))
    if len(jobs) > _MAX_JOBS:
        raise bad("job file", str(path), f"at most {_MAX_JOBS} jobs", "split the file")
    return jobs
