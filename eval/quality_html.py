"""One page to read offline: clips side by side, stills, an error curve each, and the cache's steps.

Everything is in it but the clips, which it plays from where they lie, by a path relative to it; stills show them if they are gone.
"""

import base64
import io
import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from eval import quality_tables as tables
from eval.metrics.pair import Pair
from eval.quality import IDENTICAL, Scored, worst
from eval.quality_tables import Table

_STILLS, _STILL_WIDTH_PX, _GAIN = 6, 160, 4
_MAX_CLIPS = 64
_CURVE_PX, _TOP_DB = (480, 120), 60.0
_STYLE = """
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;display:block;overflow-x:auto}th,td{border:1px solid #888;padding:.25rem .6rem;text-align:left}
img,video{max-width:100%;height:auto}.clips{display:flex;flex-wrap:wrap;gap:1rem}.clips figure{margin:0;flex:1 1 16rem}video{width:100%}
svg{background:#fff;border:1px solid #888;max-width:100%}article{border-top:2px solid #888}
.alarm{font-weight:bold}.reuse{background:repeating-linear-gradient(45deg,#8886 0 2px,transparent 2px 6px)}
:focus-visible{outline:3px solid #06c;outline-offset:2px}
"""
_SCRIPT = """
for (const article of document.querySelectorAll("article")) {
  const clips = [...article.querySelectorAll("video")];
  article.querySelector("button").addEventListener("click", () => {
    const starts = clips[0].paused;
    for (const clip of clips) {
      clip.currentTime = clips[0].currentTime;
      starts ? clip.play() : clip.pause();
    }
  });
}
"""


def contact_sheet(pair: Pair) -> bytes:
    """Six stills of each clip as JPEG: reference on top, new below it, their absolute difference times four at the bottom."""
    picks = np.unique(np.linspace(0, pair.num_frames - 1, _STILLS).round().astype(int))
    reference, new = pair.reference.frames[picks], pair.new.frames[picks]
    difference = np.clip(np.abs(new.astype(np.int16) - reference) * _GAIN, 0, 255).astype(np.uint8)
    height, width = pair.sides
    size = (min(width, _STILL_WIDTH_PX), max(1, round(height * min(1.0, _STILL_WIDTH_PX / width))))
    sheet = Image.new("RGB", (size[0] * len(picks), size[1] * 3))
    for row, frames in enumerate((reference, new, difference)):
        for column, frame in enumerate(frames):
            sheet.paste(Image.fromarray(frame).resize(size), (column * size[0], row * size[1]))
    out = io.BytesIO()
    sheet.save(out, "JPEG", quality=85)
    return out.getvalue()


def curve_svg(name: str, values: Sequence[float]) -> str:
    """PSNR over frames as an inline drawing; equal frames lie on the top line."""
    width, height = _CURVE_PX
    step = width / max(1, len(values) - 1)
    shown = [min(max(value, 0.0), _TOP_DB) for value in values]
    points = " ".join(f"{i * step:.1f},{height - value / _TOP_DB * height:.1f}" for i, value in enumerate(shown))
    finite = [value for value in values if math.isfinite(value)]
    told = f"lowest {min(finite):.1f} dB, at frame {values.index(min(finite))}" if finite else "every frame identical"
    lines = "".join(f'<line x1="0" x2="{width}" y1="{y}" y2="{y}" stroke="#ccc"/>' for y in (height / 3, 2 * height / 3))
    title = f"PSNR per frame of {escape(name)}: {told}"
    figure = f'<svg role="img" aria-label="{title}" viewBox="0 0 {width} {height}" width="{width}" height="{height}"><title>{title}</title>'
    drawn = f'{lines}<polyline points="{points}" fill="none" stroke="#06c" stroke-width="2"/></svg>'
    cells = "".join(f"<td>{IDENTICAL if math.isinf(value) else f'{value:.1f}'}</td>" for value in values)
    table = f"<details><summary>The {len(values)} values in dB</summary><table><tr>{cells}</tr></table></details>"
    return f"<figure>{figure}{drawn}<figcaption>{title}; 0 to {_TOP_DB:.0f} dB, more on the top line.</figcaption>{table}</figure>"


def timeline(arm: str, record: dict[str, Any]) -> str:
    """What the step cache decided: a column a step, in words and numbers, reused ones hatched; nothing when it was off."""
    cache = record.get("cache", {})
    if not cache.get("lambda"):
        return ""
    steps = cache["steps"]
    told = f"Step cache, {arm}: lambda {cache['lambda']:g}, {cache['reused']} of {len(steps)} steps reused"
    heads = "".join(f'<th scope="col">{number}</th>' for number in range(1, len(steps) + 1))
    actions = "".join(f'<td class="{escape(step["action"])}">{escape(step["action"])}</td>' for step in steps)
    reasons = "".join(f"<td>{escape(step['reason'])}</td>" for step in steps)
    risks = "".join(f"<td>{step['risk']:.3g}</td>" for step in steps)
    rows = (("step", heads), ("action", actions), ("reason", reasons), ("risk", risks))
    body = "".join(f'<tr><th scope="row">{name}</th>{cells}</tr>' for name, cells in rows)
    return f'<table tabindex="0"><caption>{escape(told)}</caption>{body}</table>'


def _summary(table: Table, caption: str) -> str:
    heads, rows = table
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(c)}</td>" for c in row[1:]) + "</tr>" for row in rows
    )
    return f'<table tabindex="0"><caption>{caption}</caption><tr>{head}</tr>{body}</table>'


def _cell(value: Any) -> str:
    if value is None:
        return "n/a"
    return str(value) if isinstance(value, str) else f"{value:.4g}"


def _values(clip: dict[str, Any]) -> str:
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in clip["values"])
    body = ""
    for arm, told in (("values", "new"), ("floor", "floor"), ("ceiling", "ceiling")):
        if clip[arm] is not None:
            body += f'<tr><th scope="row">{told}</th>' + "".join(f"<td>{_cell(value)}</td>" for value in clip[arm].values()) + "</tr>"
    return f'<table tabindex="0"><caption>Against the reference</caption><tr><th scope="col">clip</th>{heads}</tr>{body}</table>'


def _videos(row: Scored, folder: Path) -> str:
    """Reference and new side by side, with one button for both; the new one is heard."""
    shown = ""
    for arm in ("reference", "new"):
        source = quote(Path(os.path.relpath(row.stored[arm].path.absolute(), folder.absolute())).as_posix())
        silent = " muted" if arm == "reference" else ""
        label = f"{arm} clip of {escape(row.name)}"
        shown += f'<figure><video controls loop preload="metadata"{silent} src="{escape(source)}" aria-label="{label}"></video>'
        shown += f"<figcaption>{arm}{' (muted)' if silent else ''}</figcaption></figure>"
    return f'<div class="clips">{shown}</div><p><button type="button">Play or pause both</button></p>'


def _clip(row: Scored, clip: dict[str, Any], folder: Path) -> str:
    name = escape(row.name)
    alt = f"Stills of {name}: reference above, new below it, difference times {_GAIN} at the bottom. Prompt: {escape(row.prompt)}"
    picture = base64.b64encode(row.sheet).decode()
    alarms = "".join(f'<li class="alarm">Alarm: {escape(alarm)}</li>' for alarm in row.alarms)
    files = (
        f"<li>new: <code>{escape(clip['files']['new'])}</code></li><li>reference: <code>{escape(clip['files']['reference'])}</code></li>"
    )
    return (
        f'<article id="{name}"><h3>{name}</h3><p>{escape(row.prompt)} (seed {row.seed})</p>'
        f'{_videos(row, folder)}<img alt="{alt}" src="data:image/jpeg;base64,{picture}"><ul>{alarms}{files}</ul>'
        f"{curve_svg(row.name, row.curve)}{_values(clip)}"
        f"{timeline('new', row.stored['new'].record)}{timeline('reference', row.stored['reference'].record)}</article>"
    )


def page(report: dict[str, Any], rows: Sequence[Scored], folder: Path) -> str:
    """The page for `folder`. It shows the worst five, then the others in order, at most 64 clips, and says how many."""
    first = worst(rows)
    order = [*first, *(row for row in rows if all(row is not other for other in first))][:_MAX_CLIPS]
    clips = {clip["name"]: clip for clip in report["clips"]}
    recipes, gate, oracle = report["recipes"], report["gate"], report["oracle"]
    title = f"{escape(recipes['new']['name'])} against {escape(recipes['reference']['name'])}"
    told = [
        f"{len(rows)} clips, {report['identical_clips']} identical; {report['settings_text']}. {len(order)} shown, worst first.",
        f"Oracle: {oracle.get('text', oracle.get('skipped', ''))}.",
        f"Gate ({gate['scope']}): {'passed' if gate['passed'] else 'failed'}.",
        *([f"Note: {report['model']['label']}."] if report["model"].get("label") else []),
    ]
    links = "".join(f'<li><a href="#{escape(row.name)}">{escape(row.name)}</a></li>' for row in order)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style>'
    body = f"<h1>{title}</h1>" + "".join(f"<p>{escape(line)}</p>" for line in told) + f'<nav aria-label="Clips"><ol>{links}</ol></nav>'
    figures = _summary(tables.pareto(report), "Recipe by metric")
    figures += _summary(tables.metrics(report), "Metrics and anchors") + _summary(tables.oracle(report), "Oracle")
    articles = "".join(_clip(row, clips[row.name], folder) for row in order)
    page = f"<main>{body}{figures}{articles}</main><script>{_SCRIPT}</script>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{page}</body></html>\n'
