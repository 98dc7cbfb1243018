"""Two finished run folders as trials: sidecars are matched by what was asked, frames come from the lossless companions."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.metrics.pair import Clip
from eval.quality_cases import known_scene
from eval.quality_trials import Shown, Stored, Trial
from videogen.errors import RequestError, bad, say
from videogen.identity import hash_bytes, hash_settings
from videogen.jobs.journal import read_journal
from videogen.media import Encoding, encode_files, read_audio, read_frames

CLIP_SCHEMA = "videogen.clip/1"
RECIPE_FIELDS = ("recipe", "dtype", "steps", "shifts", "sigmas", "adapters")  # what a recipe may change in the resolved request
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Finished:
    """One clip of a run folder."""

    path: Path
    record: dict[str, Any]

    @property
    def lossless(self) -> Path:
        """Where `render --lossless` puts the exact frames."""
        return encode_files(self.path, Encoding(lossless=True))[1]


def read_folder(folder: Path) -> dict[str, Finished]:
    """The finished clips of a run folder by what was asked of them.

    Raises RequestError when there are none, some are unfinished or lack their lossless file, a sidecar has another
    schema, or two ask for the same.
    """
    if not folder.is_dir():
        raise bad("run folder", str(folder), "an existing folder", "check the path")
    unfinished = [known.name for known in read_journal(folder).jobs.values() if known.state != "done"]
    if unfinished:
        raise bad(f"run folder {folder}", unfinished[:_SHOWN], "every clip finished", "run the same `videogen render` again")
    found: dict[str, Finished] = {}
    for sidecar in sorted(folder.glob("*.json")):
        clip = _read_sidecar(sidecar)
        key = _key(clip.record)
        if key in found:
            raise bad(f"run folder {folder}", [found[key].path.stem, clip.path.stem], "each request once", "keep one of the two")
        found[key] = clip
    recipes = sorted({hash_settings(clip.record["recipe"]) for clip in found.values()})
    if len(recipes) > 1:
        raise bad(f"run folder {folder}", f"{len(recipes)} recipes", "one recipe in a folder", "render each recipe into its own")
    if not found:
        raise bad("run folder", str(folder), f"sidecars of {CLIP_SCHEMA}", "render into it with `videogen render --lossless`")
    return found


def _read_sidecar(sidecar: Path) -> Finished:
    try:
        record = json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad(f"sidecar {sidecar}", type(error).__name__, "readable JSON", "restore it, or render the clip again") from None
    schema = record.get("schema") if isinstance(record, dict) else type(record).__name__
    if schema != CLIP_SCHEMA:
        raise bad(f"schema of {sidecar}", schema, CLIP_SCHEMA, "pass a folder that `videogen render` wrote with this version")
    clip = Finished(sidecar.with_suffix(".mp4"), record)
    if not clip.lossless.is_file():
        raise bad(f"clip {clip.path.stem}", f"no {clip.lossless}", "the exact frames", "render it again with --lossless")
    return clip


def _key(record: dict[str, Any]) -> str:
    asked = {key: value for key, value in record["resolved"].items() if key not in RECIPE_FIELDS}
    return hash_settings({"asked": asked, "inputs": record["inputs"], "model": record["model"]["identity"]})


def pair_folders(new: Path, reference: Path) -> list[tuple[Finished, Finished]]:
    """Clips that answer the same request, in the reference's order. Raises RequestError when one has no partner."""
    ours, theirs = read_folder(new), read_folder(reference)
    for here, there, folder, other in ((ours, theirs, new, reference), (theirs, ours, reference, new)):
        alone = [clip.path.stem for key, clip in here.items() if key not in there]
        if alone:
            shown = ", ".join(alone[:_SHOWN]) + (" ..." if len(alone) > _SHOWN else "")
            what = "same prompt, seed, size, length, pictures and model"
            told = say(f"pairs: {folder}", f"{len(alone)} clips without a partner ({shown})", f"each also in {other} ({what})", "render it")
            raise RequestError(told)
    return [(ours[key], clip) for key, clip in theirs.items()]


def differing_recipe_fields(pairs: list[tuple[Finished, Finished]]) -> list[str]:
    """Which recipe fields differ between the folders in any pair."""
    settled = [(new.record["resolved"], reference.record["resolved"]) for new, reference in pairs]
    return [name for name in RECIPE_FIELDS if any(a.get(name) != b.get(name) for a, b in settled)]


def read_trials(pairs: list[tuple[Finished, Finished]]) -> Iterator[Trial]:
    """One trial after another; two finished folders hold no anchors."""
    for new, reference in pairs:
        resolved = reference.record["resolved"]
        name, prompt = reference.path.stem, str(resolved["prompt"])
        shown = (_load(new, f"{name} (new)"), _load(reference, f"{name} (reference)"))
        yield Trial(name, prompt, int(resolved["seed"]), *shown, scene=known_scene(str(resolved["workflow"]), prompt))


def _load(clip: Finished, name: str) -> Shown:
    frames = read_frames(clip.lossless)
    output = clip.record["output"]
    if hash_bytes(frames.tobytes()) != output["frames_sha256"]:
        raise bad(f"clip {clip.lossless}", "other frames", "the frames its sidecar was written for", "render it again")
    rate = int(output["sampling_rate"])
    audio = read_audio(clip.lossless, rate) if rate else np.empty((0, 0), np.float32)
    return Shown(Clip(frames, audio, rate, float(clip.record["resolved"]["fps"]), name), Stored(clip.path, clip.record))
