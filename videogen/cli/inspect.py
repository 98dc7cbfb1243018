"""`videogen inspect FILE`: how a clip was made, from its sidecar or from the clip itself."""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from videogen.config import Environment
from videogen.errors import bad
from videogen.media import read_comment
from videogen.places import is_there, user_path
from videogen.recipes import RECIPES

_JOB_KEYS = ("prompt", "frames", "steps", "seed", "recipe")


def add_command(commands: Any, environment: Environment) -> None:
    """Register the sub-command."""
    del environment
    parser = commands.add_parser("inspect", help="how a clip was made")
    parser.add_argument("file", help="NAME.mp4 or NAME.json")
    parser.add_argument("--as-job", action="store_true", help="a job line that makes the same clip again")
    parser.add_argument("--json", action="store_true", help="the whole record")
    parser.set_defaults(run=run, verbose=False, quiet=False)


def read_record(path: Path) -> dict[str, Any]:
    """The record of a clip; an MP4's own tag serves when it was moved away from its sidecar.

    Raises RequestError when there is none.
    """
    is_clip = path.suffix == ".mp4"
    sidecar = path.with_suffix(".json") if is_clip else path
    try:
        text = sidecar.read_text(encoding="utf-8", errors="replace") if is_there(sidecar) else read_comment(path) if is_clip else ""
        record = json.loads(text or "")
    except (OSError, ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not str(record.get("schema", "")).startswith("videogen.clip/"):
        raise bad("clip", str(path), "a videogen clip or its sidecar", "pass NAME.mp4 or NAME.json")
    return record


def as_job(record: dict[str, Any]) -> dict[str, Any]:
    """A job line that asks for the same clip. Pictures are named as they were; their folder is not stored.

    A clip made with `--certificate FILE` needs that option again: a job has no key for it. A prior is named as its file was.
    """
    resolved = record["resolved"]
    job = {key: resolved[key] for key in _JOB_KEYS} | {"size": f"{resolved['width']}x{resolved['height']}"}
    job["recipe"] = resolved["recipe"].partition("+")[0]
    job |= adapter_job(record["recipe"].get("adapters", {}), job["recipe"])
    if record["cache"]["lambda"] and not record["cache"].get("certificate"):  # a certified recipe brings its own
        job["cache_lambda"] = record["cache"]["lambda"]
        job |= {"cache_prior": name} if (name := record["recipe"].get("cache", {}).get("prior_file")) else {}
    own = RECIPES[job["recipe"]].sparse.budget if job["recipe"] in RECIPES else None
    if (budget := record.get("attention", {}).get("budget")) not in (None, own):
        job["sparse_budget"] = budget
    for item in record.get("inputs", []):
        if item["role"] == "reference":
            job.setdefault("references", []).append(item["name"])
        else:
            job[item["role"]] = item["name"]
    return job


def adapter_job(asked: dict[str, Any], recipe: str) -> dict[str, Any]:
    """The job keys for adapters that the named recipe does not bring by itself; files are named without their folder."""
    own = {use.file for use in RECIPES[recipe].adapters.uses} if recipe in RECIPES else set()
    keys = ("file", "strength", "expert")
    uses = [{key: use[key] for key in keys if use.get(key) != ""} for use in asked.get("uses", []) if use["file"] not in own]
    words = [*([asked["contract"]] if asked.get("contract") == "ignore" else []), *asked.get("stated", [])]
    found = {"lora": uses, "lora_contract": words, "lora_fuse": asked.get("fuse", False)}
    return {key: value for key, value in found.items() if value}


def adapter_lines(adapters: dict[str, Any]) -> list[str]:
    """What was on the transformer, and the contract with who said each part of it."""
    lines = []
    for item in adapters["attached"]:
        ranks = ", ".join(f"{rank} ({count})" for rank, count in item["ranks"].items())
        how = "fused" if item["fused"] else "parallel"
        text = f"{item['name']} at strength {item['strength']:g}, {how}; ranks {ranks}, {item['patches']} payloads"
        lines.append(f"adapter   {text}; norm of its change {item['delta_norm']:.4g}; {item['digest'][:12]}")
    contract = adapters["contract"] or {}
    for name, origin in contract.get("sources", {}).items():
        lines.append(f"contract  {name} {contract[name]}, by {origin}")
    if contract.get("mode") == "ignore":
        lines.append("contract  the files' own was ignored")
    return lines


def cost_lines(steps: list[dict[str, Any]]) -> list[str]:
    """What a computed and a reused step took, and the drifts that were scored; nothing where an older record does not say."""
    by_action = {name: [step["ms"] for step in steps if step["action"] == name and "ms" in step] for name in ("compute", "reuse")}
    took = [f"{name} {median(values):.0f} ms a step" for name, values in by_action.items() if values]
    drifts = [value for step in steps for value in step["drift"].values() if isinstance(value, (int, float))]
    scored = [f"drift {min(drifts):.3g} to {max(drifts):.3g}"] if drifts else []
    return ["          " + ", ".join(took + scored)] if took or scored else []


def cache_lines(cache: dict[str, Any], prior: str = "") -> list[str]:
    """What the step cache did, step by step: `#` computed, `.` reused, and the reasons with their counts; `prior` is its file."""
    bar = "".join("." if step["action"] == "reuse" else "#" for step in cache["steps"])
    promise = "certificate " + str(cache["certificate"]) if cache["certificate"] else "no certificate: quality is not promised"
    rule = f"lambda {cache['lambda']:g}{prior and f' by prior {prior}'}"
    lines = [
        f"cache     {rule}: {cache['reused']} of {len(cache['steps'])} steps reused; {promise}",
        f"          {bar}  (# computed, . reused)",
        "          " + ", ".join(f"{reason} {count}" for reason, count in cache["reasons"].items()),
        *cost_lines(cache["steps"]),
    ]
    return lines + ([f"          {cache['warning']}"] if cache["warning"] else [])


def as_lines(record: dict[str, Any]) -> list[str]:
    """The record in the words that a person asks for."""
    resolved, model = record["resolved"], record["model"]
    lines = [f"prompt    {resolved['prompt']}"]
    if found := record.get("expansion"):
        why = f", {found['reason']}" if found["reason"] else ""
        lines.append(f"expanded  from {found['original']!r} by {found['source']} ({found['outcome']}{why})")
    lines += [
        f"clip      {resolved['workflow']} {resolved['width']}x{resolved['height']}, {resolved['frames']} frames",
        f"sampling  {record['forwards']} forwards, seed {resolved['seed']}, {resolved['dtype']}, recipe {resolved['recipe']}",
        f"model     {model['source']} {model['identity'][:12]}{': ' + model['label'] if model['label'] else ''}",
    ]
    if record.get("adapters", {}).get("attached"):
        lines += adapter_lines(record["adapters"])
    if record["cache"]["lambda"]:
        lines += cache_lines(record["cache"], record["recipe"].get("cache", {}).get("prior_file", ""))
    elif note := record["cache"].get("note"):
        lines.append(f"cache     {note}")
    lines.append("stages    " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in record["stages_s"].items()))
    lines.append("software  " + ", ".join(f"{name} {version}" for name, version in record["software"].items()))
    return lines


def run(args: argparse.Namespace) -> int:
    """Print the record; exit code 0."""
    record = read_record(user_path("clip", args.file))
    try:
        plain = as_job(record) if args.as_job else record if args.json else None
        shown = "\n".join(as_lines(record)) if plain is None else json.dumps(plain, ensure_ascii=False)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        told = f"a record that is not whole ({type(error).__name__}: {error})"
        raise bad("clip", told, "a sidecar as `videogen render` writes it", "render the clip again, or pass --json") from None
    print(shown.encode("utf-8", "backslashreplace").decode())
    return 0
