"""A report's figures as tables of text, for Markdown and for the page; computes no figure."""

from typing import Any

PARETO = ("psnr", "ssim", "vmaf", "motion_ratio", "audio_snr")

Table = tuple[list[str], list[list[str]]]  # heads, rows


def interval_text(interval: dict[str, Any] | None, digits: int = 3) -> str:
    """`0.981 [0.972, 0.990]`; a single number without interval says how many values it rests on."""
    if interval is None or interval["value"] is None:
        return "n/a"
    value, low, high = (interval[key] for key in ("value", "low", "high"))
    if low is None or high is None:
        return f"{_number(value, digits)} (n={interval['n']})"
    return f"{_number(value, digits)} [{_number(low, digits)}, {_number(high, digits)}]"


def _number(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: no "-0.000"


def summary_text(summary: dict[str, Any] | None) -> str:
    """One metric of one arm as a cell: mean with interval, how many clips were identical or had no value."""
    if summary is None:
        return "n/a (no anchors)"
    if summary["not_measured"] == summary["clips"]:
        return f"n/a ({'; '.join(summary['reasons'])})"
    same = f"{summary['identical']} of {summary['clips']} identical" if summary["identical"] else ""
    missing = f"{summary['not_measured']} n/a ({'; '.join(summary['reasons'])})" if summary["not_measured"] else ""
    mean = interval_text(summary["mean"]) if summary["mean"] else ""
    return ", ".join(part for part in (mean, same, missing) if part)


def pareto(report: dict[str, Any]) -> Table:
    """Recipe by metric, with seconds: what one gives up for what speed."""
    chosen = [name for name in PARETO if name in report["summary"]]
    oracle = report["oracle"].get("attributes", {}).get("all")
    rows = []
    for arm in ("reference", "new"):
        is_new = arm == "new"
        cells = [f"{report['recipes'][arm]['name']} ({arm})", interval_text(report["seconds_per_clip"][arm], 2)]
        cells.append(interval_text(report["speed_up"]) if is_new else "1")
        cells += [summary_text(report["summary"][name]["new"]) if is_new else "-" for name in chosen]
        rows.append([*cells, interval_text(oracle[arm]) if oracle else "n/a"])
    return ["recipe", "s per clip", "speed-up", *chosen, "oracle: all right"], rows


def metrics(report: dict[str, Any]) -> Table:
    """Every metric of the new arm beside its anchors."""
    rows = []
    for metric in report["metrics"]:
        found = report["summary"][metric["name"]]
        name = f"{metric['name']} ({metric['unit']})" if metric["unit"] else metric["name"]
        cells = [summary_text(found[arm]) for arm in ("new", "floor", "ceiling")]
        rows.append([name, metric["better"], *cells, interval_text(found["retained"])])
    return ["metric", "better", "new", "floor", "ceiling", "retained"], rows


def oracle(report: dict[str, Any]) -> Table:
    """Accuracies of both arms; no row where the oracle did not look."""
    attributes = report["oracle"].get("attributes", {})
    rows = [[name, *(interval_text(arms[arm]) for arm in ("new", "reference"))] for name, arms in attributes.items()]
    return ["attribute right", "new", "reference"], rows
