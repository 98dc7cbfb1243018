"""Options that several sub-commands share, and the jobs they describe."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from videogen.config import DEVICES, DTYPES, SHIPPED, Environment
from videogen.errors import RequestError, bad, say
from videogen.jobs.files import RawJob, read_jobs
from videogen.jobs.names import DEFAULT_TEMPLATE
from videogen.media import Encoding
from videogen.places import is_there, user_path
from videogen.recipes import PLANNED, RECIPES, unavailable


def add_request_options(parser: argparse.ArgumentParser, environment: Environment) -> None:
    """The options of `render` and `plan`: what to render and where to."""
    what = parser.add_argument_group("what to render")
    what.add_argument("jobs", nargs="*", metavar="JOBS", help="job files: .txt .jsonl .csv .yaml, or - for JSON lines on stdin")
    what.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a clip's prompt (repeatable)")
    _add_expansion(what)
    what.add_argument("--image", action="append", default=[], metavar="FILE", help="first frame, one per prompt")
    what.add_argument("--last-image", action="append", default=[], metavar="FILE", help="last frame, one per prompt")
    what.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar="FILE",
        help="reference picture: all belong to a single prompt; with several prompts, one each",
    )
    what.add_argument("--size", metavar="WxH", help="canvas in pixels (default: the model's)")
    what.add_argument("--width", type=int)
    what.add_argument("--height", type=int)
    what.add_argument("--round-size", action="store_true", help="round the size to what the model can make")
    what.add_argument("--frames", "--num-frames", type=int, metavar="N", help="length in frames, snapped up to 17n+5")
    what.add_argument("--seconds", type=float, metavar="S", help="length in seconds, snapped up likewise")
    what.add_argument("--steps", "--num-inference-steps", type=int, metavar="N", help="model evaluations (forwards)")
    what.add_argument("--seed", type=int, metavar="N", help="-1 (default) draws one and stores it")
    what.add_argument("--same-seed", action="store_true", help="draw one seed for all clips")
    what.add_argument("--repeat", type=int, metavar="K", help="K clips per prompt, seeds N, N+1, ...")
    how = parser.add_argument_group("how")
    how.add_argument("--model", "-m", "--model-path", default="pocket", metavar="NAME", help="pocket, random, a folder or a hub id")
    named = ", ".join([*RECIPES, *(f"{name} (not yet)" if name in unavailable() else name for name in PLANNED)])
    how.add_argument("--recipe", default="exact", metavar="NAME", help=f"one of {named}")
    how.add_argument(
        "--sparse-budget",
        type=float,
        metavar="F",
        help="sparse attention: the share of video key blocks computed exactly (above 0, up to 1); quality is not promised",
    )
    _add_cache_options(how)
    _add_adapter_options(how)
    how.add_argument("--dtype", choices=DTYPES, help="number format (default: the recipe's)")
    how.add_argument("--device", choices=DEVICES, default="auto")
    out = parser.add_argument_group("where to")
    defaults = Encoding()
    out.add_argument("--output-dir", "-o", default=environment.output_dir, metavar="DIR", help="default: %(default)s")
    out.add_argument("--name", default=DEFAULT_TEMPLATE, metavar="TEMPLATE", help="file names, default: %(default)s")
    out.add_argument("--crf", type=int, default=defaults.crf, metavar="N", help="H.264 quality, 0 is best (default: %(default)s)")
    out.add_argument("--lossless", action="store_true", help="also write NAME.lossless.mkv (FFV1)")
    out.add_argument("--save-frames", action="store_true", help="also write every frame as PNG")
    out.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="never make a finished clip again (default)")
    add_output_options(parser)


def _add_expansion(what: Any) -> None:
    what.add_argument("--negative-prompt", metavar="TEXT", help="what not to show, for families with guidance (MiniMax-H3 has none)")
    what.add_argument("--guidance", metavar="S[,S]", help="guidance scale, or one for each of two experts: 4,3 (families with guidance)")
    what.add_argument(
        "--expand",
        nargs="?",
        const="own",
        metavar="SOURCE",
        help="complete short prompts, yours first and unchanged: own (default, the model's text encoder), template, pocket, embedded, "
        "a folder, a .gguf file, a cached hub id, or an OpenAI-compatible address; nothing is downloaded",
    )


def _add_cache_options(how: Any) -> None:
    how.add_argument(
        "--cache-lambda",
        type=float,
        metavar="F",
        help="uncertified step cache: reuse steps while the drift is at most F (0 is off); quality is not promised",
    )
    told = "with --cache-lambda: a file of `videogen calibrate --prior-only`; F is then the error expected of a reuse (0.01 to 0.03)"
    how.add_argument("--cache-prior", metavar="FILE", help=told)
    how.add_argument("--certificate", metavar="FILE", help="step cache as far as this file of `videogen calibrate` allows")
    how.add_argument(
        "--cache-mismatch",
        choices=("refuse", "compute"),
        default="refuse",
        help="when the certificate is for other requests than this one: stop (default), or compute every step",
    )


def _add_adapter_options(how: Any) -> None:
    how.add_argument(
        "--lora",
        action="append",
        metavar="FILE[:STRENGTH][:EXPERT]",
        help="adapter (repeatable); its contract sets forwards and both shifts; model:NAME: shipped with the model; EXPERT: high, low",
    )
    how.add_argument(
        "--lora-contract",
        action="append",
        metavar="WORD",
        help="apply (default), ignore, or FIELD=VALUE such as shift_video=6 where the file does not say (repeatable)",
    )
    how.add_argument("--lora-fuse", action="store_true", default=None, help="write adapters into the weights, not beside them")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """How the command itself speaks."""
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--progress", choices=("auto", "rich", "plain", "jsonl", "none"), default="auto")
    parser.add_argument("-v", "--verbose", action="store_true", help="debug messages")
    parser.add_argument("-q", "--quiet", action="store_true", help="errors only")


def _paired(args: argparse.Namespace, name: str, count: int) -> list[Any]:
    values: list[Any] = getattr(args, name)
    if values and len(values) != count:
        flag = "--" + name.replace("_", "-")
        raise bad(flag, len(values), f"one per prompt ({count})", "give as many as there are prompts, or use a job file")
    return values or [None] * count


def _from_prompts(args: argparse.Namespace) -> list[RawJob]:
    count = len(args.prompt)
    images, lasts = _paired(args, "image", count), _paired(args, "last_image", count)
    references = [args.reference] if count == 1 else [[r] if r else [] for r in _paired(args, "reference", count)]
    jobs = []
    for index, prompt in enumerate(args.prompt):
        given = {"prompt": prompt, "image": images[index], "last_image": lasts[index], "references": references[index]}
        jobs.append(RawJob({k: v for k, v in given.items() if v or k == "prompt"}, f"--prompt {index + 1}"))
    return jobs


def read_raw_jobs(args: argparse.Namespace) -> list[RawJob]:
    """Every job of the command line. A flag wins over the job's own value.

    Raises RequestError naming the place.
    """
    if not args.prompt and (args.image or args.last_image or args.reference):
        raise RequestError(say("--image, --last-image or --reference", "no --prompt", "a prompt for each", "add --prompt"))
    jobs = _from_prompts(args)
    for name in args.jobs:
        jobs += read_jobs(Path("stdin.jsonl"), sys.stdin.read()) if name == "-" else read_jobs(Path(name))
    if not jobs:
        raise RequestError(say("jobs", "none", "at least one --prompt or job file", 'try --prompt "a red circle moves right"'))
    args.lora = None if args.lora is None else [_from_here(text) for text in args.lora]
    args.cache_prior = None if args.cache_prior is None else str(user_path("--cache-prior", args.cache_prior).absolute())
    if args.expand is not None and is_there(user_path("--expand", args.expand or ".")):
        args.expand = _from_here(args.expand)
    for job in jobs:
        _fill(job, args)
    return jobs


def _from_here(adapter: str) -> str:
    """An adapter's path made absolute: the user's shell is elsewhere than the job file."""
    return adapter if adapter.startswith(SHIPPED) else str(user_path("--lora", adapter).absolute())


def _fill(job: RawJob, args: argparse.Namespace) -> None:
    """Lay the flags that were given over a job; length and size are each one choice in several spellings."""
    singles = (("steps",), ("seed",), ("repeat",), ("cache_lambda",), ("cache_prior",), ("sparse_budget",), ("lora",), ("expand",))
    guiding = (("negative_prompt",), ("guidance",))
    adapters = (("lora_contract",), ("lora_fuse",))
    groups: Sequence[tuple[str, ...]] = (("frames", "seconds"), ("size", "width", "height"), *singles, *guiding, *adapters)
    for group in groups:
        given = {key: getattr(args, key) for key in group if getattr(args, key) is not None}
        if given:
            job.values = {key: value for key, value in job.values.items() if key not in group} | given
    if args.round_size:
        job.values["round_size"] = True
