"""Job files in four formats, from plausible to hostile, through reading, checking, naming and planning."""

import csv
import io
import json
import random
from typing import Any

import yaml

from tests.fuzz.box import ADAPTER, BROKEN_PICTURE, GOOD_PICTURE, WRONG_ADAPTER, Box, Broken, must_be_finite
from tests.fuzz.values import as_text, broken_bytes, mixed, text, value
from videogen.cli.planning import clip_row
from videogen.jobs.files import KEYS, read_jobs
from videogen.jobs.journal import Journal
from videogen.jobs.plan import SeedBook, make_drafts, settle
from videogen.media import Encoding
from videogen.recipes import RECIPES, find_recipe

GOOD: dict[str, tuple[Any, ...]] = {
    "prompt": ("a red circle moves right", "x", "blue square, a low tone"),
    "size": ("160x96", [256, 144], "128x96", "96×160"),
    "width": (160, "96"),
    "height": (96, "160"),
    "frames": (22, "39", 124.0, 100),
    "seconds": (2, "1.5s", 5.0),
    "steps": (1, 4, "8"),
    "seed": (0, -1, "7", 2**63 - 1),
    "recipe": (*RECIPES, "balanced"),
    "id": ("a1", 5, "x/y"),
    "tags": (["a", "b"], "c", [1, None]),
    "output": ("{id}-{seed}", "clip", "{index:03d}", "{prompt:10}_{stem}", "../x"),
    "repeat": (1, 2, "3", 10_000),
    "round_size": (True, "yes", 0),
    "cache_lambda": (0, 0.1, "0.2"),
    "cache_prior": ("missing.json", f"../inputs/{WRONG_ADAPTER}", f"../inputs/{GOOD_PICTURE}", ".."),
    "sparse_budget": (0.3, "1"),
    "expand": (True, "template", "own", "no"),
    "negative_prompt": ("", "blurred"),
    "guidance": (4, [4, 3], "4,3"),
    "image": (f"../inputs/{GOOD_PICTURE}", f"../inputs/{BROKEN_PICTURE}", "missing.png", ".."),
    "last_image": (f"../inputs/{GOOD_PICTURE}",),
    "references": ([f"../inputs/{GOOD_PICTURE}"], f"../inputs/{GOOD_PICTURE}"),
    "lora": (f"../inputs/{ADAPTER}", [f"../inputs/{ADAPTER}:0.5"], {"file": "model:turbo4", "strength": 1}, f"../inputs/{WRONG_ADAPTER}"),
    "lora_contract": ("ignore", ["shift_video=6", "shift_audio=3"], {"forwards": 4}, "apply"),
    "lora_fuse": (True, "false"),
}
_LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi"))
_MERGES = "a: &a {x: 1}\n" + "".join(f"{b}: &{b} {{<<: [{', '.join(['*' + a] * 9)}]}}\n" for a, b in zip("abcdefgh", "bcdefghi"))
BOMBS: dict[str, tuple[bytes, ...]] = {
    ".txt": (b"x" * 150_000, b"\n".join([b"x"] * 300), b"\xff\xfex\0", b"\x0c\x1c\xe2\x80\xa8x"),
    ".jsonl": (b"[" * 100_000, b'{"prompt":' * 50_000, b'{"prompt":"x","seed":' + b"9" * 5000 + b"}", b'{"prompt":"x","seed":1e400}'),
    ".csv": (
        b"prompt,prompt\na,b\n",
        b'prompt\n"' + b"x" * 140_000 + b'"\n',
        b"prompt,seed\nx\n",
        b"\n\n",
        b",\n,\n",
        b"prompt\n\0\n",
        b"prompt;seed\r",
    ),
    ".yaml": (
        *(
            f"{_LAUGHS}jobs: *i\n".encode(),
            f"jobs:\n- prompt: x\n  tags: {{{_LAUGHS.replace(chr(10), ', ')}}}\n".encode(),
            _MERGES.encode(),
        ),
        *(
            b"jobs: &a [*a]\n",
            b"&a [*a]",
            b"[" * 400,
            b"- " * 3000,
            b"jobs:\n- prompt: x\n  seed: 0x" + b"f" * 5000,
            b"&a : *a",
            b"? [a]\n: b",
        ),
        *(
            b"- 2001-13-45\n",
            b"- !!binary '&'\n",
            b"!!python/object/apply:os.system ['true']",
            b"jobs: !!set {a, b}",
            b"- !!omap [a: 1]",
            b"- !!int x",
        ),
        *(
            b"- .nan\n- .inf\n",
            b"- {prompt: x, seed: .nan}\n",
            b"- {prompt: x, seconds: .inf}\n",
            b"%YAML 9.9\n---\nx",
            b"--- a\n--- b\n",
            b"- !!float 'x'\n",
        ),
        b"jobs: [a]\npairing: product\nmatrix: {"
        + b", ".join(b"%s: %s" % (k, str(list(range(60))).encode()) for k in (b"seed", b"frames", b"steps", b"id"))
        + b"}",
        b"jobs: [" + b"a," * 2000 + b"]\nmatrix: {seed: " + str(list(range(900))).encode() + b"}\n",
        b"defaults: {repeat: 10000}\njobs: [" + b"a," * 1000 + b"]\n",
    ),
}


def job(rng: random.Random) -> dict[str, Any]:
    """One job: a prompt and up to four more keys, each good in three of four cases."""
    found = {"prompt": mixed(rng, GOOD["prompt"], 0.9)} if rng.random() < 0.95 else {}
    for key in rng.sample(sorted(KEYS), rng.choice([0, 1, 1, 2, 2, 3, 4])):
        found[key] = mixed(rng, GOOD[key], 0.75)
    if rng.random() < 0.04:
        found[text(rng)] = value(rng)
    if found.get("repeat") == 10_000 and rng.random() < 0.9:
        found["repeat"] = 3
    return found


def _jsonl(jobs: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(each) + "\n" for each in jobs)


def _csv(jobs: list[dict[str, Any]]) -> str:
    keys, stream = sorted({key for each in jobs for key in each}), io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(keys)
    for each in jobs:
        cells = [each.get(key, "") for key in keys]
        writer.writerow(["|".join(map(str, cell)) if isinstance(cell, list) else as_text(cell) for cell in cells])
    return stream.getvalue()


def _yaml(rng: random.Random, jobs: list[dict[str, Any]]) -> str:
    whole: Any = {"jobs": jobs} if rng.random() < 0.7 else jobs
    if isinstance(whole, dict) and rng.random() < 0.3:
        key = rng.choice(sorted(KEYS))
        whole["matrix"] = {key: [mixed(rng, GOOD[key]) for _ in range(rng.randint(1, 3))]} if rng.random() < 0.7 else value(rng)
        whole["pairing"] = mixed(rng, ("zip", "product"), 0.8)
    if isinstance(whole, dict) and rng.random() < 0.3:
        whole["defaults"] = job(rng) if rng.random() < 0.7 else value(rng)
    return yaml.safe_dump(whole, allow_unicode=True)


def make(rng: random.Random, ending: str) -> bytes:
    """The bytes of a job file with this ending."""
    if rng.random() < 0.06:
        data = rng.choice(BOMBS[ending])
    else:
        jobs = [job(rng) for _ in range(rng.choice([1, 1, 1, 2, 4]))]
        if ending == ".txt":
            content = "\n".join(as_text(each.get("prompt", "")) for each in jobs)
        else:
            content = _jsonl(jobs) if ending == ".jsonl" else _csv(jobs) if ending == ".csv" else _yaml(rng, jobs)
        data = content.encode("utf-8", "surrogatepass")
    return broken_bytes(rng, data, BOMBS[ending][-2:]) if rng.random() < 0.35 else data


def check(data: bytes, ending: str, box: Box) -> None:
    """What `videogen plan FILE` does, without starting it; every name stays in the folder, every number is finite."""
    path = box.work / f"jobs{ending}"
    path.write_bytes(data)
    drafts = make_drafts(read_jobs(path), box.family, find_recipe("exact"), box.reader)
    seeds = SeedBook({}, lambda _key, _seed: None, lambda: 5)
    where = {"model": ("pocket", "identity"), "encoding": Encoding(), "template": "{index:04d}-{prompt:40}-{seed}"}
    clips = settle(drafts, Journal(box.out), seeds, **where, is_resumed=True, is_taken=lambda _name: False)  # type: ignore[arg-type]
    names = [clip.name for clip in clips]
    if len({name.lower() for name in names}) < len(names):
        raise Broken("two clips of one name")
    for clip in clips:
        if (box.out / f"{clip.name}.mp4").resolve().parent != box.out.resolve() or clip.name.startswith("."):
            raise Broken(f"a clip named {clip.name!r}")
        if not 0 <= clip.seed < 2**63:
            raise Broken(f"accepted seed {clip.seed}")
    for clip in clips[:50]:
        must_be_finite(
            [clip.draft.request, clip.draft.resolved, clip.draft.recipe, clip_row(clip, 1.0), clip.draft.tags, clip.draft.user_id]
        )
