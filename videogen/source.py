"""From the name of a model to a folder on disk and what its card says; loads no weight and imports no torch."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from videogen.errors import EnvironmentFault, bad, say
from videogen.families import wan
from videogen.families.h3 import H3Family, read_geometry
from videogen.identity import hash_file, hash_folder
from videogen.places import is_there, user_path

logger = logging.getLogger(__name__)

POCKET_FOLDER = Path(__file__).parent / "pocket" / "weights"
RELEASED_FOLDER = Path(__file__).parent / "families" / "released_h3"
RELEASED_WAN_FOLDER = Path(__file__).parent / "families" / "released_wan22_t2v"
ADAPTERS = "adapters"
INDEX = "modular_model_index.json"
H3_PIPELINE = "MiniMaxH3ModularPipeline"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model as found: `weights` is `pretrained` (files) or `random` (built from the configs, seeded)."""

    name: str
    folder: Path
    weights: str
    identity: str
    card: dict[str, Any] = field(default_factory=dict)
    hub_id: str | None = None

    @property
    def label(self) -> str:
        """What the clip's quality rests on, for the screen and the sidecar; empty when the weights speak for themselves."""
        if self.weights == "random":
            return "random weights: the clip is noise, good for timing only"
        if self.card and not self.card.get("trained", True):
            return "untrained weights: the clip does not follow the prompt yet"
        return str(self.card.get("note", ""))

    @property
    def is_wan(self) -> bool:
        """Whether the folder holds a plain diffusers pipeline, which Wan models are."""
        return not (self.folder / INDEX).is_file()

    @property
    def is_pocket(self) -> bool:
        """Whether prompts are of the caption grammar that pocket-h3 was trained on."""
        return self.card.get("name") == "pocket-h3"

    @property
    def adapters_folder(self) -> Path:
        """Where the model's own adapters lie: `adapters/` in its folder; beside it for pocket, whose files are its identity."""
        return POCKET_FOLDER.parent / ADAPTERS if self.folder == POCKET_FOLDER else self.folder / ADAPTERS

    def record(self) -> dict[str, Any]:
        """The sidecar's `model` entry."""
        kept = {key: self.card[key] for key in ("name", "version", "trained", "note") if key in self.card}
        return {"source": self.name, "weights": self.weights, "identity": self.identity, "card": kept, "label": self.label}


def _hub_folder(hub_id: str, *, offline: bool, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, local_files_only=offline))
    except HFValidationError:
        raise bad("model", hub_id, "pocket, random, a folder, or a hub id such as owner/name", "check the name") from None
    except RepositoryNotFoundError:
        raise bad("model", hub_id, "an existing hub repository", "check the name, or log in if it is private") from None
    except (LocalEntryNotFoundError, OSError) as error:
        where = "in the local cache (HF_HUB_OFFLINE is set)" if offline else "reachable on the hub"
        advice = f"download it first, or pass a folder ({type(error).__name__})"
        raise EnvironmentFault(say("model", repr(hub_id), f"files {where}", advice)) from None


def _read_card(folder: Path) -> dict[str, Any]:
    path = folder / "card.json"
    if not path.is_file():
        return {}
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise bad(f"model card {path}", str(error), "valid JSON", "restore the file, or remove it") from None
    return card if isinstance(card, dict) else {}


def _check_folder(name: str, folder: Path) -> None:
    if not is_there(folder) or not folder.is_dir():
        raise bad("model", name, "pocket, random, an existing folder, or a hub id such as owner/name", "check the path")
    index = folder / (INDEX if (folder / INDEX).is_file() else wan.INDEX)
    if not index.is_file():
        raise bad("model folder", str(folder), f"a file {INDEX} or {wan.INDEX}", "pass the folder of a diffusers pipeline")
    try:
        found = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    except (ValueError, RecursionError, AttributeError):
        raise bad(f"model file {index}", "broken JSON", "a JSON object", "download the model again") from None
    known = (H3_PIPELINE,) if index.name == INDEX else wan.PIPELINES
    if found not in known:
        raise bad("model family", found, " or ".join((H3_PIPELINE, *wan.PIPELINES)), "use a MiniMax-H3 or Wan folder")


def find_model(name: str, *, offline: bool = False) -> ModelSource:
    """Find `pocket`, `random`, `random:FOLDER`, `random:h3` or `random:wan22-t2v` (released sizes), a folder or a hub id.

    For a hub id only its configs are fetched here.

    Raises RequestError for a wrong name or folder, EnvironmentFault when the hub cannot be reached.
    """
    weights, place, hub_id = "pretrained", name, None
    if name == "random" or name.startswith("random:"):
        weights, place = "random", name.partition(":")[2] or "pocket"
    if place == "pocket":
        folder = POCKET_FOLDER
    elif place == "h3" and weights == "random":
        folder = RELEASED_FOLDER
    elif place == "wan22-t2v" and weights == "random":
        folder = RELEASED_WAN_FOLDER
    elif is_there(user_path("model", place)) or place.count("/") != 1 or place.startswith((".", "/", "~")):
        folder = user_path("model", place)
    else:
        hub_id = place
        folder = _hub_folder(place, offline=offline, patterns=["*.json", "*/*.json", "*/*.txt", "*/*.jinja", f"{ADAPTERS}/*.safetensors"])
    _check_folder(name, folder)
    identity = ("random-0:" if weights == "random" else "") + hash_folder(folder, without=ADAPTERS)
    return ModelSource(name=name, folder=folder, weights=weights, identity=identity, card=_read_card(folder), hub_id=hub_id)


def check_digest(source: ModelSource) -> None:
    """Compare every file with the digest the model's card carries, if it carries one.

    Raises EnvironmentFault naming up to five files that are missing or differ.
    """
    digest: dict[str, str] = source.card.get("digest", {}) if source.weights == "pretrained" else {}
    wrong = [name for name, sha256 in digest.items() if not _is_file_of(source.folder / name, sha256)]
    if wrong:
        shown = ", ".join(sorted(wrong)[:5]) + (" ..." if len(wrong) > 5 else "")
        message = say(f"model {source.name}", f"{len(wrong)} files that differ ({shown})", "the files its card.json lists", "restore them")
        raise EnvironmentFault(message)


def _is_file_of(path: Path, sha256: str) -> bool:
    return path.is_file() and hash_file(path) == sha256


def fetch_weights(source: ModelSource, *, offline: bool) -> ModelSource:
    """The same source with its weight files present (downloads them for a hub id; untried: no hub is reachable here)."""
    if source.hub_id is None or source.weights == "random":
        return source
    logger.info("fetching the weights of %s", source.hub_id)
    _hub_folder(source.hub_id, offline=offline, patterns=["*.json", "*/*"])
    return source


def open_family(source: ModelSource) -> Any:
    """The family of a model, ready to check requests: `H3Family` or `WanFamily`, as the folder's index says."""
    if source.is_wan:
        return wan.WanFamily(wan.read_geometry(source.folder, source.card))
    return H3Family(read_geometry(source.folder, source.card))


def open_h3_family(source: ModelSource, what: str) -> H3Family:
    """The family of a MiniMax-H3 model. Raises RequestError, for `what` it was wanted, where the model is another."""
    family = open_family(source)
    if not isinstance(family, H3Family):
        raise bad(what, f"{source.name}, a Wan model", "a MiniMax-H3 model, the only family it knows", "use videogen render or bench")
    return family
