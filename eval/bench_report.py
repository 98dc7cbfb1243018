"""`bench.json`, `bench.md` and `clips.csv`; and whether two results may be compared. Computes no figure."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.bench import SCHEMA
from eval.fingerprint import COMPARED
from eval.report_folder import check_free, make_folder
from videogen.errors import bad
from videogen.jobs.run import write_json, write_text

FILES = ("bench.json", "bench.md", "clips.csv")
_SHOWN = 60
_CSV = ("arm", "repetition", "pair", "seed", "began_s", "ended_s", "seconds", "cpu_s", "forwards", "reused", "broken")


def _number(value: Any, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def arm_row(arm: dict[str, Any]) -> list[str]:
    """One arm as the cells of the table."""
    mean = arm["seconds_per_clip"]
    interval = "" if mean["low"] is None else f" [{mean['low']:.2f}, {mean['high']:.2f}]"
    stages = arm["stages_s"]
    told = ", ".join(f"{name} {seconds:.2f}" for name, seconds in stages.items() if name != "load")
    latency = ", ".join(f"{name} {text}" for name, text in arm["latency_s"].items())
    return [
        arm["arm"],
        f"{arm['clips']}" + (f" ({arm['broken']} broken)" if arm["broken"] else ""),
        _number(arm["clips_per_hour_machine"]),
        _number(arm["clips_per_hour_per_gpu"]),
        _number(arm["clips_per_hour_cold"]),
        f"{mean['value']:.2f}{interval}",
        latency,
        told,
        _number(arm["ms_per_forward"], 1),
    ]


_HEADS = ("arm", "clips", "clips/h", "per GPU", "cold", "s per clip", "latency s", "stages s", "ms/forward")


def markdown(report: dict[str, Any]) -> str:
    """The report as one table that can be pasted, what it was measured on first and warnings on top."""
    workload, prints = report["workload"], report["fingerprint"]
    where = ", ".join(gpu["name"] for gpu in prints["gpus"]) or f"{prints['cpu']}, {prints['cpus']} threads"
    size = "x".join(map(str, workload["size"]))
    shape = f"{size}, {workload['frames']} frames, {workload['steps']} forwards, {report['dtype']}"
    lines = [f"### {workload['name']}: {shape}", ""]
    if report["model"]["label"]:
        lines.append(f"**{report['model']['label']}.**")
    if prints["is_dirty"]:
        lines.append("**The checkout had uncommitted changes.**")
    lines += [f"On {where}; commit {prints['commit'][:12]}; torch {prints['software']['torch']}.", ""]
    lines += ["| " + " | ".join(_HEADS) + " |", "|" + "---|" * len(_HEADS)]
    lines += ["| " + " | ".join(arm_row(arm)) + " |" for arm in report["arms"]]
    ratio = report["speed_up"]
    if ratio:
        lines += ["", f"{ratio['other']} against {ratio['base']}: {ratio.get('text', 'no whole pair')} times, {ratio['pairs']} pairs."]
        if "cpu_text" in ratio:
            lines.append(f"In processor time of this process (encoding is another's): {ratio['cpu_text']} times.")
    device = ", ".join(f"{arm['arm']} {_number(arm['peak_device_mb'], 0)} MB" for arm in report["arms"] if arm["peak_device_mb"])
    energy = ", ".join(f"{arm['arm']} {arm['energy_wh_per_clip']:.3f} Wh" for arm in report["arms"] if arm["energy_wh_per_clip"])
    host = f"{report['peak_host_mb']:.0f} MB"
    lines += ["", f"Peak memory: device {device or 'n/a'}; host, all arms, {host}. Energy per clip: {energy or 'n/a'}."]
    return "\n".join(lines) + "\n"


def clips_csv(report: dict[str, Any]) -> str:
    """One line per measured clip."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(report["clips"])
    return text.getvalue()


def write_report(folder: Path, report: dict[str, Any], *, overwrite: bool) -> list[Path]:
    """Write the three files, each whole or not at all.

    Raises RequestError when a report is already there and `overwrite` is not wanted.
    """
    check_free(folder, FILES[0], overwrite=overwrite)
    make_folder(folder)
    paths = [folder / name for name in FILES]
    write_json(paths[0], report)
    write_text(paths[1], markdown(report))
    write_text(paths[2], clips_csv(report))
    return paths


def read_report(path: Path) -> dict[str, Any]:
    """A `bench.json`, or the folder that holds one.

    Raises RequestError when it is missing, broken or of another schema.
    """
    file = path / "bench.json" if path.is_dir() else path
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad("results file", str(file), "a bench.json", f"check the path ({type(error).__name__})") from None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        found = report.get("schema") if isinstance(report, dict) else type(report).__name__
        raise bad(f"schema of {file}", found, SCHEMA, "measure again with this version")
    return report


def not_comparable_because(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The keys in which two reports differ and must not, each with both values."""
    held = [(key, old[key], new[key]) for key in ("workload", "dtype", "device")]
    held.append(("model", old["model"]["identity"], new["model"]["identity"]))
    prints = old["fingerprint"], new["fingerprint"]
    held += [(f"fingerprint.{key}", prints[0].get(key), prints[1].get(key)) for key in COMPARED]
    held.append(("protocol.in_flight", old["protocol"]["in_flight"], new["protocol"]["in_flight"]))
    return [f"{key} ({_short(was)} against {_short(now)})" for key, was, now in _inner(held) if was != now]


def _inner(held: list[tuple[str, Any, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Two dictionaries become one entry per key."""
    for key, was, now in held:
        if isinstance(was, dict) and isinstance(now, dict):
            yield from ((f"{key}.{name}", was.get(name), now.get(name)) for name in sorted((was.keys() | now.keys()) - {"note"}))
        else:
            yield key, was, now


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
