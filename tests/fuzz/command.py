"""The command line: words of every kind through the real parser and commands, in this process and in one of its own."""

import contextlib
import io
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz import jobfiles
from tests.fuzz.box import ADAPTER, BROKEN_PICTURE, GOOD_PICTURE, WRONG_ADAPTER, Box, Broken
from tests.fuzz.values import as_text, broken_bytes, mixed, text, value
from tests.fuzz.watch import DEADLINE_S
from tests.videogen.jobs.fakes import FakeRenderer, run_batch
from videogen.cli.main import main
from videogen.errors import RequestError
from videogen.recipes import RECIPES

REFUSALS = (2, 3)
FORM = re.compile(r": got .*, expected .*", re.DOTALL)
ENDINGS = (".txt", ".jsonl", ".csv", ".yaml")
OPTIONS: dict[str, tuple[object, ...]] = {
    "--prompt": ("a red circle", "x"),
    "--image": (f"inputs/{GOOD_PICTURE}", f"inputs/{BROKEN_PICTURE}", "inputs"),
    "--last-image": (f"inputs/{GOOD_PICTURE}",),
    "--reference": (f"inputs/{GOOD_PICTURE}",),
    "--size": ("160x96", "96x160"),
    "--width": (160,),
    "--height": (96,),
    "--frames": (22, 124),
    "--seconds": (5,),
    "--steps": (1, 4),
    "--seed": (-1, 0, 2**63 - 1),
    "--repeat": (1, 2),
    "--recipe": tuple(RECIPES),
    "--cache-lambda": (0.1,),
    "--sparse-budget": (0.3,),
    "--certificate": (f"inputs/{GOOD_PICTURE}", "missing", "inputs"),
    "--lora": (f"inputs/{ADAPTER}:0.5", f"inputs/{WRONG_ADAPTER}", "inputs"),
    "--lora-contract": ("ignore", "forwards=4", "shift_video=6"),
    "--dtype": ("float32",),
    "--expand": ("own", "template"),
    "--negative-prompt": ("x",),
    "--guidance": ("4,3",),
    "--model": ("pocket", "random", "inputs", "missing/", "random:h3"),
    "--name": ("{index:04d}-{prompt:40}-{seed}", "{id}"),
    "--crf": (16, 0),
    "--output-dir": ("out", "inputs/good.png", "~", "out/\udcff"),
}
FLAGS = (
    "--json",
    "--round-size",
    "--same-seed",
    "--lossless",
    "--save-frames",
    "--no-resume",
    "--resume",
    "-v",
    "-q",
    "--lora-fuse",
    "--help",
    "--nope",
)


def run_main(words: Sequence[str]) -> None:
    """`videogen WORDS` in this process. Raises RequestError where it refuses in our form, Broken where it does so in another."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    told = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        try:
            code = main(words)
        except SystemExit as end:  # argparse
            code = end.code if isinstance(end.code, int) else 99
    told.seek(0)
    said = told.read()
    _judge(code, said)


def _judge(code: int, said: str) -> None:
    if "Traceback" in said or code not in (0, *REFUSALS):
        raise Broken(f"exit code {code}: {said[-1500:]}")
    if code in REFUSALS:
        if not FORM.search(said) and "usage: " not in said and "error: " not in said:
            raise Broken(f"refused in another form: {said[-500:]}")
        raise RequestError(said if FORM.search(said) else f"argparse: got {said}, expected a usage; see --help")


def make(rng: random.Random) -> list[str]:
    """The words of `plan`, of a dry run, or of a command that reads one file."""
    kind = rng.random()
    if kind < 0.12:
        command = rng.choice(
            (["inspect"], ["status"], ["lora", "inspect"], ["models"], ["models", "--json"], ["lora", "inspect", "--json"])
        )
        names = (
            f"inputs/{GOOD_PICTURE}",
            f"inputs/{ADAPTER}",
            f"inputs/{WRONG_ADAPTER}",
            "inputs",
            "missing",
            *(as_text(text(rng)) for _ in range(2)),
        )
        return [*command, *([rng.choice(names)] if "models" not in command else [])]
    words = ["plan"] if kind < 0.8 else ["render", "--dry-run"]
    for option in ["--prompt", *rng.sample(sorted(OPTIONS), rng.choice([0, 1, 2, 2, 3, 5]))]:
        given = as_text(mixed(rng, OPTIONS[option], 0.75)).replace("\0", "")
        words += [option, given] if rng.random() < 0.5 else [f"{option}={given}"]
    words += [flag for flag in FLAGS if rng.random() < 0.06]
    if rng.random() < 0.1:
        words.append(rng.choice(["inputs/good.png", "missing.txt", "inputs", as_text(text(rng)).replace("\0", "")]))
    return words


def check(words: list[str], box: Box) -> None:
    """In this process, from inside the box; nothing is written by a plan."""
    before = Path.cwd()
    os.chdir(box.root)
    try:
        run_main(words)
    finally:
        os.chdir(before)


def make_process(rng: random.Random) -> tuple[str, bytes]:
    """A job file for a process of its own; sometimes its bytes are also broken once more."""
    ending = rng.choice(ENDINGS)
    data = jobfiles.make(rng, ending)
    return ending, broken_bytes(rng, data) if rng.random() < 0.2 else data


def check_process(case: tuple[str, bytes], box: Box) -> None:
    """`python -m videogen render --dry-run FILE`, as a shell starts it: exit code, standard error, and no new file."""
    ending, data = case
    path = box.work / f"jobs{ending}"
    path.write_bytes(data)
    command = [sys.executable, "-m", "videogen", "render", "--dry-run", str(path), "-o", "out"]
    before = sorted(map(str, box.root.rglob("*")))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, cwd=box.root, timeout=25 * DEADLINE_S, env=environment, check=False)
    if sorted(map(str, box.root.rglob("*"))) != before:
        raise Broken("a plan wrote files")
    _judge(done.returncode, done.stderr.decode("utf-8", "replace"))


def make_run(rng: random.Random) -> list[dict[str, object]]:
    """Values of one to three jobs that differ from a good one in a name, an id, a tag or a prompt."""
    names = ("id", "output", "tags")
    jobs = []
    for _ in range(rng.randint(1, 3)):
        job = {"prompt": mixed(rng, ("x",), 0.4), "seed": rng.randint(0, 3), "frames": 22}
        jobs.append(job | {key: value(rng) for key in rng.sample(names, rng.randint(0, 2))})
    return jobs


def check_run(jobs: list[dict[str, object]], box: Box) -> None:
    """A whole run with a stand-in for the model: every clip is a file of the output folder, complete, with its sidecar."""
    folder = box.out / "run"
    summary = run_batch(folder, jobs, FakeRenderer()) if folder.mkdir() is None else None
    assert summary is not None
    for row in summary.rows:
        clip = Path(row["file"])
        if row["state"] != "done" or clip.parent != folder or not clip.is_file() or not clip.with_suffix(".json").is_file():
            raise Broken(f"a clip that is not there: {row}")
