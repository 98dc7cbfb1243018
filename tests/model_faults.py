"""Trials with a real model: memory that runs out at any moment, damaged weights, adapters and pictures, inputs that change meanwhile."""

import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import MiniMaxH3Transformer3DModel
from PIL import Image
from safetensors.torch import save_file

from tests.conftest import link_model
from tests.faults import Bench, alarm, full_from, said_badly
from tests.injectors import At, Batch, at_lines, at_writes, half_written, kill, made, spoil, strays
from videogen import Request
from videogen.cli import render
from videogen.pipeline import Pipeline, open_pipeline
from videogen.pocket import sizes
from videogen.source import POCKET_FOLDER

SMALL = {"size": "96x64", "frames": 22, "steps": 2}
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB"
Hit = Callable[[], None]


def tiny_model(target: Path) -> Path:
    """The shipped model around a small random transformer, at short lengths."""
    folder = link_model(target)
    (folder / "transformer").unlink()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        small = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 1, "ffn_dim": 96}
        MiniMaxH3Transformer3DModel(**sizes.TRANSFORMER | small).save_pretrained(folder / "transformer")
    return folder


def jobs(**more: Any) -> list[dict[str, Any]]:
    """Three clips of a real model, one of them in another size."""
    return [{"prompt": f"{word} circle", "seed": k} | SMALL | more for k, word in enumerate(("red", "green", "blue"))]


def outputs(folder: Path) -> dict[str, str]:
    """The clips of a folder by name: frames and sound as the model made them, by hash."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        output = json.loads(path.read_text())["output"]
        found[path.stem] = output["frames_sha256"] + str(output["audio_sha256"])
    return found


@contextmanager
def at_memory(hit: Hit) -> Iterator[None]:
    """Calls `hit` before every module computes and before every component is put on its device."""
    stock = torch.nn.Module.to

    def to(module: torch.nn.Module, *given: Any, **named: Any) -> Any:
        hit()
        return stock(module, *given, **named)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: hit())
    torch.nn.Module.to = to  # type: ignore[method-assign]
    try:
        yield
    finally:
        handle.remove()
        torch.nn.Module.to = stock  # type: ignore[method-assign]


class Starved:
    """A pipeline that runs out of memory at one clip: at the n-th moment of its first attempt, and where `twice` again so much later."""

    def __init__(self, pipeline: Pipeline, victim: int, number: int, twice: int) -> None:
        self.pipeline, self.victim, self.number, self.twice, self.begun, self.seen = pipeline, victim, number, twice, 0, 0
        self.on_hit: Callable[[], None] = lambda: None

    def render(self, request: Any, **more: Any) -> Any:
        """One clip."""
        self.begun += 1
        if self.begun != self.victim:
            return self.pipeline.render(request, **more)
        with at_memory(self._moment):
            return self.pipeline.render(request, **more)

    def _moment(self) -> None:
        self.seen += 1
        if self.seen in (self.number, self.number + self.twice if self.twice else -1):
            self.on_hit()
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)


_KEPT: dict[str, Any] = {}


def opened(bench: Bench, kind: str) -> tuple[Pipeline, dict[str, str], tuple[int, int]]:
    """A model, the clips of an undisturbed run of it, and how many moments its first clip has and how many a later one; made once."""
    if kind not in _KEPT:
        torch.set_num_threads(1)
        place = made(bench.place / kind)
        folder = link_model(place / "model") if kind == "pocket" else tiny_model(place / "model")
        pipeline, first, later = open_pipeline(str(folder)), At(0, lambda: None), At(0, lambda: None)
        batch = _batch(place, pipeline, lambda: pipeline)
        assert batch.run() == 0, batch.said
        for moments, prompt in ((first, "a red circle"), (later, "a green circle")):
            with at_memory(lambda moments=moments: moments("")):  # type: ignore[misc]
                pipeline.render(Request(prompt, size=(96, 64), frames=22, steps=2), seed=0)
        pipeline.let_go()
        _KEPT[kind] = pipeline, outputs(batch.folder), (first.seen, later.seen)
    found: tuple[Pipeline, dict[str, str], tuple[int, int]] = _KEPT[kind]
    return found


def _batch(place: Path, pipeline: Pipeline, renderer: Callable[[], Any]) -> Batch:
    return Batch(place, renderer, jobs(), ("--model", str(pipeline.source.folder)))


def out_of_memory(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """Memory runs out at any moment of one of three clips, once or in both attempts; every fifth trial with the shipped model."""
    pipeline, wanted, moments = opened(bench, rng.choice(["tiny"] * 4 + ["pocket"]))
    victim, is_lost = rng.randint(1, 3), rng.random() < 0.5
    number = rng.randint(1, moments[victim > 1])
    starved = Starved(pipeline, victim, number, rng.randint(1, moments[0]) if is_lost else 0)
    batch = _batch(place, pipeline, lambda: starved)
    code = batch.run()
    found = outputs(batch.folder)
    told = said_badly(batch, code, "out of memory", *(("render it smaller", "jobs.jsonl:") if code else ("once more",)))
    told += Counter({"trials": 1, "once more": int(not code), "clips that it cost": len(wanted) - len(found)})
    told["bad exit codes"] = int(code not in (0, 1)) + int(len(found) < len(wanted) - 1)
    told["different"] = sum(wanted[name] != digest for name, digest in found.items())
    batch.renderer = lambda: pipeline
    told["not ended well"] = batch.run()
    again = outputs(batch.folder)
    told["lost"] = len(wanted.keys() - again.keys())
    told["different"] += sum(wanted.get(name) != digest for name, digest in again.items())
    return told


def with_pocket(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """The shipped model in place of the stand-in: killed, stopped or out of disk at any moment, then run to its end."""
    pipeline, wanted, _ = opened(bench, "pocket")
    batch = _batch(place, pipeline, lambda: pipeline)
    kind = rng.choice(["kill", "alarm", "signal", "full"])
    number, lines = rng.randint(1, 60), rng.randint(1, 6000)
    around = {
        "kill": lambda: at_writes(At(number, kill)),
        "alarm": lambda: alarm(rng.uniform(0.1, 3.0)),
        "signal": lambda: at_lines(At(lines, lambda: os.kill(os.getpid(), signal.SIGTERM))),
        "full": lambda: at_writes(full_from(number, is_once=False)),
    }[kind]
    code = batch.run(around)
    told = said_badly(batch, code) + Counter({"trials": 1, f"kind {kind}": 1, "half-written": len(half_written(batch.folder))})
    seen = outputs(batch.folder)
    told["not ended well"] = batch.run()
    found = outputs(batch.folder)
    told["lost"], told["duplicated"] = len(wanted.keys() - found.keys()), len(found.keys() - wanted.keys())
    told["different"] = sum(wanted.get(name) != digest for each in (seen, found) for name, digest in each.items())
    told["half-written"] += len(half_written(batch.folder)) + len(strays(batch.folder, tuple(wanted)))
    return told


def bad_weights(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """Any file of a model damaged: with a digest in its card always refused; without one refused, or another identity than before."""
    has_digest = rng.random() < 0.5
    digest = json.loads((POCKET_FOLDER / "card.json").read_text())["digest"] if has_digest else None
    model = link_model(place / "model", **({"digest": digest} if has_digest else {}))
    part = rng.choice(sorted(p.name for p in POCKET_FOLDER.iterdir() if p.name != "card.json"))
    (model / part).unlink()
    if (POCKET_FOLDER / part).is_dir():
        shutil.copytree(POCKET_FOLDER / part, model / part)
        file = rng.choice(sorted(path for path in (model / part).rglob("*") if path.is_file()))
    else:
        file = Path(shutil.copy(POCKET_FOLDER / part, model / part))
    spoil(file, rng)
    return refused_or_another(bench, place, jobs()[:1], ("--model", str(model)), is_always_refused=has_digest, kind="model")


def refused_or_another(
    bench: Bench, place: Path, asked: list[dict[str, Any]], options: tuple[str, ...], *, is_always_refused: bool = False, kind: str = ""
) -> Counter[str]:
    """A run whose input is damaged: refused with a message and no clip; or rendered, as another clip than from the undamaged input."""
    pipeline, _, _ = opened(bench, "tiny")
    model = options or ("--model", str(pipeline.source.folder))
    batch = Batch(place, jobs=asked, options=("-q", *model))
    stock = render.opener

    @contextmanager
    def for_real() -> Iterator[None]:
        render.opener = stock if options else lambda _wanted, _args: pipeline.sharing
        yield

    code, known = batch.run(for_real), _undamaged(bench, kind, asked, for_real)
    told = said_badly(batch, code, *(() if code == 0 else (": got ", ", expected ", "; ")))
    records = [json.loads(path.read_text()) for path in batch.folder.glob("*.json")]
    told += Counter({"trials": 1, "refused": int(code != 0), "another identity": int(code == 0)})
    told["bad exit codes"] = int(code not in (0, 1, 2, 3)) + int(code == 0 and is_always_refused)
    told["half-written"] = int(code != 0 and bool(records))
    told["different"] = sum(record["job_id"] == known for record in records)
    return told


def _undamaged(bench: Bench, kind: str, asked: list[dict[str, Any]], around: Any) -> str:
    """The identity of the clip that the undamaged input makes."""
    if kind not in _KEPT:
        place = made(bench.place / f"undamaged-{kind}")
        model = link_model(place / "model") if kind == "model" else opened(bench, "tiny")[0].source.folder
        batch = Batch(place, jobs=asked, options=("-q", "--model", str(model)))
        assert batch.run(around) == 0, batch.said
        _KEPT[kind] = next(json.loads(path.read_text())["job_id"] for path in batch.folder.glob("*.json"))
    return str(_KEPT[kind])


def good_adapter(bench: Bench) -> Path:
    """An adapter of the small model, as a file."""
    path, gen, name = bench.place / "good.safetensors", torch.Generator().manual_seed(1), "transformer_blocks.1.ff.net.2"
    factors = {f"{name}.lora_A.weight": torch.randn(4, 96, generator=gen), f"{name}.lora_B.weight": torch.randn(64, 4, generator=gen)}
    if not path.is_file():
        save_file(factors, path, {"alpha": "4"})
    return path


def good_picture(bench: Bench, end: str) -> Path:
    """A picture in a format, as a file."""
    path = bench.place / f"good.{end}"
    if not path.is_file():
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)).save(path)
    return path


def bad_adapter(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """An adapter file damaged."""
    return _with_damaged(bench, rng, place, "lora", good_adapter(bench))


def bad_picture(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """A first frame damaged, in one of three formats."""
    return _with_damaged(bench, rng, place, "image", good_picture(bench, rng.choice(["png", "jpg", "webp"])))


def _with_damaged(bench: Bench, rng: random.Random, place: Path, key: str, good: Path) -> Counter[str]:
    damaged = Path(shutil.copy(good, place / f"bad{good.suffix}"))
    spoil(damaged, rng)
    _undamaged(bench, good.name, [jobs()[0] | {key: str(good)}], _sharing(bench))
    return refused_or_another(bench, place, [jobs()[0] | {key: str(damaged)}], (), kind=good.name)


def _sharing(bench: Bench) -> Callable[[], Any]:
    @contextmanager
    def sharing() -> Iterator[None]:
        render.opener = lambda _wanted, _args: opened(bench, "tiny")[0].sharing
        yield

    return sharing


class Meddled:
    """A pipeline before whose first clip somebody touches an input of the second."""

    def __init__(self, bench: Bench, meddle: Callable[[], None]) -> None:
        self.bench, self.meddle = bench, [meddle]

    def open(self, recipe: Any) -> Any:
        """As `open_renderer`."""
        pipeline = opened(self.bench, "tiny")[0].sharing(recipe)
        if self.meddle:
            self.meddle.pop()()
        return pipeline


def an_input_that_changes(bench: Bench, rng: random.Random, place: Path) -> Counter[str]:
    """A picture or adapter of the second of three clips is gone or damaged by the time it is rendered: that clip fails, alone."""
    key = rng.choice(["image", "lora"])
    good = good_adapter(bench) if key == "lora" else good_picture(bench, "png")
    used = Path(shutil.copy(good, place / f"used{good.suffix}"))
    asked = jobs()
    asked[1] |= {key: str(used)}
    batch = Batch(made(place / "b"), jobs=asked, options=("-q", "--model", str(opened(bench, "tiny")[0].source.folder)))
    meddled = Meddled(bench, lambda: used.unlink() if rng.random() < 0.3 else spoil(used, rng))

    @contextmanager
    def around() -> Iterator[None]:
        render.opener = lambda _wanted, _args: meddled.open
        yield

    code, wanted = batch.run(around), opened(bench, "tiny")[1]
    found = outputs(batch.folder)
    told = said_badly(batch, code, "jobs.jsonl:2: 0002", "failed: ", ": got ", ", expected ")
    told += Counter({"trials": 1, "refused": int(code == 1), "bad exit codes": int(code != 1), "cost to others": 2 - len(found)})
    told["different"] = sum(wanted.get(name) != digest for name, digest in found.items())
    return told


MODEL_TRIALS = {
    "changing": an_input_that_changes,
    "pocket": with_pocket,
    "oom": out_of_memory,
    "weights": bad_weights,
    "adapters": bad_adapter,
    "pictures": bad_picture,
}
