"""Clips of a run folder that were made under a certificate, as the request and the recipe that made them; renders nothing."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from caches.certificate import Certificate, Fingerprint
from eval.quality_folders import CLIP_SCHEMA
from videogen.config import SHIPPED, Adapters, AdapterUse, Recipe, StepCache, as_plain
from videogen.errors import RequestError, bad
from videogen.families.base import Input, Resolved, open_input
from videogen.identity import hash_settings
from videogen.jobs.journal import JOURNAL, read_journal
from videogen.transforms.options import Savings

_FOREIGN = (KeyError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True)
class Made:
    """One finished clip; `identity` is of all that decides its frames and sound, `recipe_key` of its recipe alone."""

    name: str
    record: dict[str, Any]
    identity: str
    recipe_key: str

    def resolved(self, files: Path) -> Resolved:
        """The request as it was settled, its prompt expanded; pictures are looked for in `files`.

        Raises RequestError when one is missing there or is another.
        """
        with _own_version(self.name):
            settled = self.record["resolved"]
            kept = {field.name: settled[field.name] for field in fields(Resolved) if field.name not in ("inputs", "notes", "expand")}
            sigmas = kept["sigmas"] and tuple(tuple(each) for each in kept["sigmas"])
            inputs = tuple(_input(item, files) for item in self.record["inputs"])
            return Resolved(**(kept | {"shifts": tuple(kept["shifts"]), "sigmas": sigmas, "inputs": inputs}))

    def recipe(self, files: Path, at_hand: Mapping[str, Certificate]) -> Recipe:
        """The recipe, refusing other strata; adapters that the model does not ship are looked for in `files`.

        Of its certificates those are taken that are at hand, by `certificate_id`, or whole in the sidecar.
        """
        with _own_version(self.name):
            plain = self.record["recipe"]
            if plain["sparse"]["budget"] is not None:
                raise bad("recipe", "sparse attention", "none: no certificate was calibrated with it", "leave it out")
            found = [at_hand.get(hash_settings(each)) or _whole(each) for each in plain["cache"]["certificates"]]
            asked = plain["adapters"]
            return Recipe(
                name=plain["name"],
                steps=plain["steps"],
                dtype=plain["dtype"],
                savings=Savings(**plain["savings"]),
                cache=StepCache(certificates=tuple(each for each in found if each), streams=plain["cache"]["streams"]),
                adapters=Adapters(_uses(asked, files), asked["contract"], tuple(asked["stated"]), asked["fuse"]),
            )


def certificate_id(certificate: Certificate) -> str:
    """A certificate's name: the hash of what sidecars keep of it."""
    return hash_settings(as_plain(certificate))


@contextmanager
def _own_version(name: str) -> Iterator[None]:
    try:
        yield
    except RequestError:
        raise
    except _FOREIGN as error:
        told = f"{type(error).__name__}: {error}"
        raise bad("sidecar", told, "one that this version wrote", f"audit {name} with the version that rendered it") from None


def _whole(plain: dict[str, Any]) -> Certificate | None:
    """A certificate from a sidecar; None where that keeps only the digest of its prior."""
    if plain.get("prior") is not None:
        return None
    return Certificate(**(plain | {"fingerprint": Fingerprint(**plain["fingerprint"])}))


def _uses(asked: dict[str, Any], files: Path) -> tuple[AdapterUse, ...]:
    named = [(use["file"], use["strength"], use.get("expert", "")) for use in asked["uses"]]
    where = [(name if name.startswith(SHIPPED) else str(files / name), strength, expert) for name, strength, expert in named]
    return tuple(AdapterUse(name, strength, expert=expert) for name, strength, expert in where)


def _input(item: dict[str, str], files: Path) -> Input:
    found = open_input(item["role"], files / item["name"])
    if found.sha256 != item["sha256"]:
        raise bad(f"picture {found.name}", "another picture", f"the one the clip was made with in {files}", "pass --files FOLDER")
    return found


def read_made(folder: Path) -> Iterator[Made]:
    """The finished clips of a run folder in the order of its journal, those without a certificate too.

    Raises RequestError for a folder that is none, and for a sidecar of another version.
    """
    if not (folder / JOURNAL).is_file():
        raise bad("run folder", str(folder), f"a folder of `videogen render`, with its {JOURNAL}", "check the path")
    for known in read_journal(folder).jobs.values():
        path = folder / f"{known.name}.json"
        if not known.name or not path.is_file() or not path.with_suffix(".mp4").is_file():
            continue  # not finished, or removed since
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["schema"] != CLIP_SCHEMA:
                raise ValueError(record["schema"])
            recipe_key = hash_settings(record["recipe"])
            asked = {"resolved": record["resolved"], "inputs": record["inputs"], "model": record["model"]["identity"]}
            made = Made(known.name, record, hash_settings(asked | {"recipe": recipe_key}), recipe_key)
        except (OSError, *_FOREIGN) as error:
            got = f"{type(error).__name__}: {error}"
            raise bad(f"sidecar {path}", got, f"one of {CLIP_SCHEMA}", "restore it, or move it away") from None
        yield made
