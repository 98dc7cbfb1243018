"""`videogen lora distil` at work: a pocket-h3 folder to a checked few-step adapter, in a given time."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel

from lora.contract import Contract
from lora.target import target_of
from lora.trainable import write_trained
from videogen.errors import bad
from videogen.families.h3 import read_geometry
from videogen.identity import hash_file, hash_text
from videogen.pocket import bank, sizes
from videogen.pocket.cache import Cache, Canvas, Models
from videogen.pocket.distil_options import DistilOptions
from videogen.pocket.distiller import Distiller
from videogen.pocket.matching import Matching
from videogen.pocket.ranks import Ranks
from videogen.pocket.train_transformer import FULL, SHORT, plain
from videogen.pocket.training import Log

_MUST_FIT = ("in_channels", "audio_in_channels", "text_dim", "patch_size")
_LOOK_S = 4.0  # kept back for the last look and the file


def distil(options: DistilOptions) -> dict[str, Any]:
    """Run it; returns the file, its size, the rounding of its updates and the last look.

    Raises RequestError for a folder that is not pocket-h3's, or a checkpoint of another recipe.
    """
    ranks = Ranks.join()
    torch.manual_seed(options.seed + 3 + 1000 * ranks.rank)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    tail = f".rank{ranks.rank}" if ranks.rank else ""
    log = Log(options.out / f"distil-{options.forwards}{tail}.jsonl", f"distil-{options.forwards}")
    options = _toy(options) if options.smoke else options
    model = load_transformer(options.folder, ranks.device)
    geometry = read_geometry(options.folder, {})
    run = Distiller(options, ranks, log, model, (geometry.audio_shift, geometry.video_shift))
    if options.resume:
        run.resume()
    cache = _requests(options, ranks, log, sizes.SMALL)
    start = run.agreed()
    total = min(options.seconds, options.deadline - time.time() if options.deadline else options.seconds)
    gathered = start + total * options.bank
    short = bank.shapes_of(cache, SHORT, bank.TOY if options.smoke else bank.SHORT)
    long = bank.shapes_of(cache, FULL, bank.LONG, 1 - options.large) if not options.smoke else []
    if options.large:
        large = _requests(options, ranks, log, sizes.LARGE)
        long += bank.shapes_of(large, SHORT if options.smoke else FULL, bank.TOY if options.smoke else bank.LARGE, options.large)
    run.gather(short, long, lambda share: run.agreed() > start + (gathered - start) * share)
    run.compare("before", with_base=True)
    left = start + total - _LOOK_S - run.agreed()
    if "regress" not in run.finished and options.rollout < 1:
        run.run("regress", run.regress, options.rate, left * (1 - options.rollout))
        run.compare("after regress", with_base=False)
        export(run)
    if "rollout" not in run.finished and options.rollout > 0:
        with run.keeping_better():
            run.run("rollout", run.unroll, options.rollout_rate, start + total - _LOOK_S - run.agreed())
    if options.dmd:
        Matching(run)(options.dmd)
    last = run.compare("done", with_base=False)["student"]
    report = export(run) | {"last_look": last, "steps": run.steps}
    log(event="exported", **report)
    ranks.leave()
    return report


def _toy(options: DistilOptions) -> DistilOptions:
    """Sizes for a CPU: short clips, few teacher forwards, two steps a stage unless told."""
    small = {"teacher": options.forwards + 1, "row_budget": 1800, "clips": 5, "short": 0.5, "rank": 2, "adaln_rank": 1}
    return replace(options, **small, steps=options.steps or 2)  # type: ignore[arg-type]


def load_transformer(folder: Path, device: torch.device) -> Any:
    """The folder's transformer in float32. Raises RequestError when it does not fit pocket-h3's latents and text."""
    model = MiniMaxH3Transformer3DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    odd = [name for name in _MUST_FIT if plain(model.config[name]) != plain(sizes.TRANSFORMER[name])]
    if odd:
        raise bad("lora distil", f"{folder} with another {', '.join(odd)}", "a pocket-h3 folder", "lora.distil serves others by callables")
    return model.to(device).eval()


def _requests(options: DistilOptions, ranks: Ranks, log: Log, canvas: Canvas) -> Cache:
    models = Models(options.folder, ranks.device)
    frames = SHORT if options.smoke else FULL
    seed = options.seed + 200 + 1000 * ranks.rank
    cache = Cache(models, options.clips, seed=seed, held_out=False, paraphrases=6, sounds_each=1, num_frames=frames, canvas=canvas)
    log(event="requests", clips=len(cache.scenes), requests=sum(len(b.clip) for b in cache.buckets), device=str(ranks.device))
    return cache


def export(run: Distiller) -> dict[str, Any]:
    """Write the averaged student as `turboN.safetensors`, re-read and compared."""
    options = run.options
    if run.ranks.rank:
        return {}
    path = options.out / f"turbo{options.forwards}.safetensors"
    audio, video = (shift * run.warp for shift in run.shifts)
    contract = Contract(options.forwards, video, audio, strength=1.0, size=(sizes.WIDTH, sizes.HEIGHT))
    notes = {
        "made_by": "videogen lora distil",
        "base": hash_text(" ".join(hash_file(path) for path in sorted((options.folder / "transformer").glob("*.safetensors")))),
        "teacher_forwards": str(options.teacher),
        "stages": " ".join(run.finished),
        "steps": str(run.steps),
        "rank": f"{options.rank} (modulation {options.adaln_rank}); alpha = rank",
        "seed": str(options.seed),
    }
    rounding = write_trained(run.student, target_of(run.model), path, contract, notes)
    return {"file": str(path), "bytes": path.stat().st_size, "rounding": rounding, "contract": contract.to_metadata()}
