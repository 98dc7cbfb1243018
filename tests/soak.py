"""`python -m tests.soak --clips 500 --out DIR`: small clips through one worker of the server; is memory flat, every repeat equal?

One clip in three repeats a request of a fixed set, the others are new: another prompt, shape, workflow, recipe, adapter, cache or
sparse setting. After each: resident memory, open files, threads, objects. The verdict on memory is the Theil-Sen slope of the last
80 % of the clips with its 95 % interval, against the spread of the values themselves.
"""

import argparse
import gc
import json
import logging
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from scipy.stats import theilslopes

from videogen.adapters import model_target
from videogen.jobs.claims import group_lock
from videogen.jobs.database import COMPLETED
from videogen.jobs.store import Limits, Store
from videogen.progress import StopFlag
from videogen.serve.making import PipelineMaker
from videogen.serve.preview import previews
from videogen.serve.worker import Worker
from videogen.source import find_model

WARM_UP = 0.2
REPEATED = 1 / 3
SHAPES = (("96x64", 22), ("64x96", 22), ("64x64", 22), ("64x32", 22), ("32x64", 22), ("96x32", 22), ("64x32", 39))
PICTURES = {
    "fl2va": {"image": "uploads/a.png"},
    "both": {"image": "uploads/a.png", "last_image": "uploads/b.png"},
    "ref2va": {"references": ["uploads/b.png"]},
}
RECIPES: tuple[dict[str, Any], ...] = (
    {"recipe": "plain", "steps": 1},
    {"recipe": "plain", "steps": 2, "lora": "soak.safetensors:0.5"},
    {"recipe": "exact", "steps": 1},
    {"recipe": "exact", "steps": 3},
    {"recipe": "exact", "steps": 9, "cache_lambda": 5.0},
    {"recipe": "plain", "steps": 8, "cache_lambda": 5.0},
    {"recipe": "exact", "steps": 3, "sparse_budget": 0.3},
    {"recipe": "exact", "steps": 9, "cache_lambda": 5.0, "sparse_budget": 0.5},
    {"recipe": "exact", "steps": 2, "lora": ["soak.safetensors", "other.safetensors:-0.5"]},
    {"recipe": "exact", "steps": 2, "lora": "other.safetensors", "lora_fuse": True},
    {"recipe": "exact", "steps": 2, "lora": "model:turbo4", "lora_contract": "ignore"},
    {"recipe": "turbo"},
    {"recipe": "exact", "steps": 2, "expand": "template"},
)
COLOURS, THINGS, WAYS = ("red", "blue", "green", "white", "yellow"), ("circle", "square", "triangle"), ("left", "right", "up", "down")


def request(rng: random.Random, recipe: dict[str, Any] | None = None) -> dict[str, Any]:
    """One job: this recipe or any, any shape, any workflow, a prompt that is hardly ever drawn twice."""
    words = f"a {rng.choice(('large', 'small'))} {rng.choice(COLOURS)} {rng.choice(THINGS)} moves {rng.choice(WAYS)}"
    size, frames = rng.choice(SHAPES)
    job = dict(recipe or rng.choice(RECIPES)) | {
        "prompt": f"{words}, take {rng.randrange(10**6)}",
        "size": size,
        "frames": frames,
        "seed": rng.randrange(9),
    }
    return job | (PICTURES[rng.choice(sorted(PICTURES))] if rng.random() < 0.4 else {})


def prepare(root: Path) -> None:
    """Two pictures and two adapters in the folder of the server."""
    (root / "uploads").mkdir(parents=True, exist_ok=True)
    for name, seed in (("a", 1), ("b", 2)):
        Image.fromarray(np.random.default_rng(seed).integers(0, 255, (96, 160, 3), dtype=np.uint8)).save(root / "uploads" / f"{name}.png")
    target, generator = model_target(find_model("pocket", offline=True)), torch.Generator().manual_seed(0)
    for name, rank in (("soak", 4), ("other", 2)):
        factors = {}
        for module in sorted(target.linears):
            if "transformer_blocks" in module:
                rows, columns = target.shapes[f"{module}.weight"]
                factors[f"{module}.lora_A.weight"] = 0.05 * torch.randn(rank, columns, generator=generator)
                factors[f"{module}.lora_B.weight"] = 0.05 * torch.randn(rows, rank, generator=generator)
        save_file(factors, root / f"{name}.safetensors", {"lora_alpha": str(rank)})


def state() -> dict[str, int]:
    """What a leak would make grow: resident bytes, open files, threads, objects that Python knows of."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    tasks = len(os.listdir("/proc/self/task"))
    return {"rss": resident, "files": len(os.listdir("/proc/self/fd")), "threads": tasks, "objects": len(gc.get_objects())}


def is_flat(values: list[float]) -> dict[str, Any]:
    """Theil-Sen slope a clip with its 95 % interval; flat when zero is inside, or the whole run's growth is below the spread.

    The spread is the range that holds 95 % of the values about the line, so that growth below it cannot be told from noise.
    """
    kept = np.asarray(values[int(len(values) * WARM_UP) :], dtype=np.float64)
    slope, intercept, low, high = theilslopes(kept, np.arange(len(kept)), 0.95)
    left = kept - (intercept + slope * np.arange(len(kept)))
    spread = float(np.percentile(left, 97.5) - np.percentile(left, 2.5))
    found = {"slope": float(slope), "low": float(low), "high": float(high), "growth": float(slope) * len(kept), "spread": spread}
    return found | {"first": float(kept[0]), "last": float(kept[-1]), "is_flat": bool(low <= 0 <= high or abs(slope) * len(kept) <= spread)}


class Soak:
    """A store, its worker in this process, and the digests of what was rendered."""

    def __init__(self, root: Path) -> None:
        prepare(root)
        self.root, self.store = root, Store(root, Limits())
        maker = PipelineMaker("pocket", "cpu", root, offline=True, around=previews(1))
        self.worker = Worker(root, "0", maker, retention_s=1e6, stop=StopFlag())
        self.digests: dict[str, str] = {}
        self.differing: list[str] = []
        self.repeats = 0

    def clip(self, job: dict[str, Any]) -> dict[str, Any]:
        """Render one job, compare it with its like, forget it. Raises RuntimeError when it is not completed."""
        began, name = time.perf_counter(), json.dumps(job, sort_keys=True)
        accepted, _ = self.store.submit("local", job, {"prompt": job["prompt"], "steps": job.get("steps", 4)})
        self.worker.run(until_idle=True)
        done = self.store.get(accepted.id)
        if done is None or done.state != COMPLETED:
            raise RuntimeError(f"{name}: {done and done.state}, {done and done.error}")
        output = done.record["output"]
        digest = f"{output['frames_sha256']} {output['audio_sha256']}"
        if name in self.digests:
            self.repeats += 1
            if self.digests[name] != digest:
                self.differing.append(name)
        self.digests.setdefault(name, digest)
        self.store.remove(accepted.id)
        for path in (self.root / "clips").glob(f"{accepted.id}.*"):
            path.unlink()
        reused = done.record["cache"]["reused"] if done.record["cache"]["lambda"] else 0
        return {"seconds": round(time.perf_counter() - began, 2), "job": name, "digest": digest, "reused": reused}


def run(clips: int, seed: int, out: Path, say: Any) -> dict[str, Any]:
    """The whole soak; every clip is a line of OUT/clips.jsonl."""
    rng, rows, began = random.Random(seed), [], time.perf_counter()
    fixed = [request(rng, recipe) for recipe in RECIPES for _ in range(2)]
    soak = Soak(out / "server")
    with group_lock(soak.root, "0", wait_s=5), (out / "clips.jsonl").open("w") as file:
        for index in range(clips):
            job = rng.choice(fixed) if rng.random() < REPEATED else request(rng)
            rows.append(soak.clip(job) | state())
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            if (index + 1) % 25 == 0:
                say(f"{index + 1} clips, {time.perf_counter() - began:.0f} s, {rows[-1]['rss'] / 1e6:.0f} MB, {len(soak.differing)} differ")
    verdicts = {name: is_flat([row[name] for row in rows]) for name in ("rss", "files", "threads", "objects")}
    counts = {"clips": clips, "seed": seed, "distinct": len(soak.digests), "repeats": soak.repeats, "differing": soak.differing}
    return counts | {"steps_reused": sum(row["reused"] for row in rows), "seconds": round(time.perf_counter() - began), "flat": verdicts}


def main() -> int:
    """Exit code 1 when something grew or differed."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--clips", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    logging.getLogger("videogen").setLevel(logging.ERROR)
    report = run(args.clips, args.seed, args.out, lambda text: print(text, flush=True))  # noqa: T201 - a command
    report["still_running"] = threading.active_count() - 1
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))  # noqa: T201
    return 1 if report["differing"] or not all(each["is_flat"] for each in report["flat"].values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
