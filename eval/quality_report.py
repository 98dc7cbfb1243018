"""`eval.json`, `eval.md` and `report.html` into a folder, each whole or not at all; computes no figure."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import quality_tables as tables
from eval.quality import Scored
from eval.quality_html import page
from eval.quality_tables import Table
from eval.report_folder import check_free, make_folder
from videogen.jobs.run import write_json, write_text

FILES = ("eval.json", "eval.md", "report.html")
FEW_CLIPS = 20


def write_report(folder: Path, report: dict[str, Any], rows: Sequence[Scored], *, overwrite: bool) -> list[Path]:
    """Write the three files, the JSON last: who sees eval.json sees all of it."""
    check_free(folder, FILES[0], overwrite=overwrite)
    json.dumps(report, allow_nan=False)  # our own invariant: what is written is valid JSON
    make_folder(folder)
    data, table, html = (folder / name for name in FILES)
    write_text(table, markdown(report))
    write_text(html, page(report, rows, folder))
    write_json(data, report)
    return [data, table, html]


def _table(table: Table) -> list[str]:
    heads, rows = table
    return ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *("| " + " | ".join(row) + " |" for row in rows), ""]


def _oracle(report: dict[str, Any]) -> list[str]:
    if "skipped" in report["oracle"]:
        return [f"Oracle skipped: {report['oracle']['skipped']}.", ""]
    return [f"**{report['oracle']['text']}.**", "", *_table(tables.oracle(report))]


def markdown(report: dict[str, Any]) -> str:
    """Everything a reader decides on: the Pareto table, every metric with its anchors, the oracle, the worst clips."""
    names = {arm: recipe["name"] for arm, recipe in report["recipes"].items()}
    clips = len(report["clips"])
    lines = [f"# {names['new']} against {names['reference']}: {clips} clips, {report['identical_clips']} identical", ""]
    if report["model"].get("label"):
        lines += [f"**{report['model']['label']}.**", ""]
    lines += [f"Model {report['model']['source']}; {report['settings_text']}. Intervals: 95 %, over prompts.", ""]
    if clips < FEW_CLIPS:
        lines += [f"**{clips} clips: below {FEW_CLIPS} a bootstrap interval is too narrow. Read these as a smoke test.**", ""]
    lines += [f"Measured class: {report['class']}.", ""]
    lines += ["## Pareto", "", *_table(tables.pareto(report)), "Seconds are for orientation; `videogen bench` measures speed.", ""]
    anchors = report["anchors"]
    lines += ["## Metrics", "", f"Floor: {anchors['floor']}. Ceiling: {anchors['ceiling']}. Retained: 1 - d(new) / d(ceiling).", ""]
    lines += _table(tables.metrics(report))
    lines += ["## Oracle", "", *_oracle(report)]
    lines += ["## Worst clips", ""]
    lines += [
        f"- {w['name']}: {w['files']['new']} against {w['files']['reference']}; {'; '.join(w['alarms']) or 'no alarm'}"
        for w in report["worst"]
    ]
    lines += [] if report["worst"] else ["None: every clip is identical in both arms."]
    lines += ["", "## Skipped", "", *(f"- skipped: {row['name']} ({row['reason']})" for row in report["skipped"])]
    found = report["gate"]
    lines += ["", f"Gate ({found['scope']}): {'passed' if found['passed'] else 'failed'}.", *(f"- {reason}" for reason in found["reasons"])]
    return "\n".join(lines) + "\n"
