"""From parsed options to settled clips; shared by `render` and `plan`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from videogen.certificates import open_certificate
from videogen.cli.options import read_raw_jobs
from videogen.config import MAX_SEED, Adapters, Recipe, StepCache, read_environment
from videogen.errors import bad
from videogen.families.base import Family
from videogen.families.limits import check_limits
from videogen.identity import hash_settings
from videogen.jobs.journal import Journal
from videogen.jobs.names import check_template
from videogen.jobs.plan import Clip, Draft, SeedBook, identity_settings, make_drafts, settle
from videogen.media import Encoding
from videogen.places import is_there, user_path
from videogen.recipes import find_recipe
from videogen.seeds import draw_seed
from videogen.source import ModelSource, find_model, open_family


def adapter_reader(source: ModelSource) -> Callable[[Recipe], Recipe]:
    """Reads the adapters of a recipe, each combination once; only then is torch loaded."""
    known: dict[Any, Adapters] = {}

    def read(recipe: Recipe) -> Recipe:
        asked = recipe.adapters
        if asked.is_settled:
            return recipe
        key = (asked.uses, asked.contract, asked.stated, asked.fuse)
        if key not in known:
            from videogen.adapters import settle

            known[key] = settle(recipe, source).adapters
        return replace(recipe, adapters=known[key])

    return read


@dataclass(frozen=True, slots=True)
class Wanted:
    """Everything the command line asks for, checked: nothing here has loaded a weight."""

    source: ModelSource
    family: Family
    recipe: Recipe
    drafts: list[Draft]
    encoding: Encoding
    folder: Path


def read_wanted(args: argparse.Namespace) -> Wanted:
    """Check every option and every job.

    Raises RequestError (bad input) or EnvironmentFault (hub not reachable).
    """
    recipe = find_recipe(args.recipe)
    recipe = replace(recipe, dtype=args.dtype) if args.dtype else recipe
    if args.certificate:
        cache = StepCache(certificates=(open_certificate(user_path("--certificate", args.certificate)),), on_mismatch=args.cache_mismatch)
        recipe = replace(recipe, name=f"{recipe.name}+certified", cache=cache)
    check_template(args.name)
    encoding = Encoding(crf=args.crf, lossless=args.lossless, save_frames=args.save_frames)
    raws = read_raw_jobs(args)
    if args.seed is not None and not -1 <= args.seed <= MAX_SEED:
        raise bad("--seed", args.seed, f"-1, or 0 to {MAX_SEED}", "change --seed")
    folder = user_path("--output-dir", args.output_dir)
    if is_there(folder) and not folder.is_dir():
        raise bad("--output-dir", str(folder), "a folder", "choose another path")
    source = find_model(args.model, offline=read_environment().offline)
    family = open_family(source)
    drafts = make_drafts(raws, family, recipe, adapter_reader(source))
    for draft in drafts:
        check_limits(source, family, draft.recipe, getattr(args, "weights", "whole"))
    return Wanted(source, family, recipe, drafts, encoding, folder)


def settle_clips(wanted: Wanted, args: argparse.Namespace, journal: Journal, remember: Callable[[str, int], None]) -> list[Clip]:
    """Seeds, identities and names for every clip; `remember` keeps a drawn seed for a later resume."""
    folder = wanted.folder
    existing = {path.name.lower() for path in folder.iterdir()} if folder.is_dir() else set()
    identity = wanted.source.identity
    shared = [identity_settings(draft, identity, wanted.encoding) for draft in wanted.drafts] if args.same_seed else None
    seeds = SeedBook(
        known=journal.seeds.copy() if args.resume else {},
        remember=remember,
        draw=draw_seed,
        shared_key="" if shared is None else f"same:{hash_settings(shared)}",
    )
    return settle(
        wanted.drafts,
        journal,
        seeds,
        model=(wanted.source.name, identity),
        encoding=wanted.encoding,
        template=args.name,
        is_resumed=args.resume,
        is_taken=lambda name: f"{name}.mp4" in existing or f"{name}.json" in existing,
    )


def seconds_per_tflop(journal: Journal) -> float | None:
    """The median cost of the clips this folder has finished, or None before the first."""
    rates = sorted(journal.rates)
    return rates[len(rates) // 2] if rates else None


def clip_row(clip: Clip, rate: float | None) -> dict[str, Any]:
    """One planned clip as plain data."""
    resolved, estimate = clip.draft.resolved, clip.draft.estimate
    return {
        "name": clip.name,
        "job_id": clip.job_id,
        "place": clip.draft.place,
        "workflow": resolved.workflow,
        "size": f"{resolved.width}x{resolved.height}",
        "frames": resolved.frames,
        "seconds": round(resolved.seconds, 3),
        "steps": resolved.steps,
        "shifts": list(resolved.shifts),
        "sigmas": resolved.sigmas,
        "adapters": [{"file": use.name, "strength": use.strength} for use in clip.draft.recipe.adapters.uses],
        "seed": clip.seed if clip.draft.resolved.seed is not None else None,
        "recipe": resolved.recipe,
        "rows": estimate.rows,
        "tflop": round(estimate.tflop, 3),
        "estimated_s": None if rate is None else round(estimate.tflop * rate, 1),
        "disk_bytes": estimate.disk_bytes,
        "is_done": clip.is_done,
        "notes": list(resolved.notes),
        "prompt": resolved.prompt,
    }


def no_duplicates_note(wanted: Wanted, clips: list[Clip]) -> str:
    """A sentence when equal jobs were folded into one, else nothing."""
    dropped = len(wanted.drafts) - len(clips)
    return f"{dropped} of {len(wanted.drafts)} jobs equal another in everything, seed included; made once" if dropped else ""
