"""Fragments of the page as text: progress, players, cards, the cache timeline. Everything from outside is escaped here."""

import base64
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from videogen.jobs.database import CANCELLED, COMPLETED, FAILED, QUEUED, RUNNING, Job
from videogen.serve.auth import Links
from videogen.serve.checkup import RUNNING as LOOKING
from videogen.serve.checkup import WANTED, Checkup

STATE_WORDS = {QUEUED: "waiting", RUNNING: "rendering", COMPLETED: "done", FAILED: "failed", CANCELLED: "cancelled"}
CSS = """
.gradio-container{--block-info-text-color:#4b5563;--body-text-color-subdued:#4b5563}
.dark .gradio-container,.gradio-container.dark{--block-info-text-color:#d1d5db;--body-text-color-subdued:#d1d5db}
.gradio-container button.primary{background:#1d4ed8;color:#fff}
.gradio-container button.stop{background:#b91c1c;color:#fff}
.vg-card{border:1px solid var(--border-color-primary);border-radius:8px;padding:8px;margin:6px 0;overflow-wrap:anywhere}
.vg-grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(220px,1fr));gap:10px}
.vg-pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(240px,1fr));gap:10px}
.vg-grid video,.vg-pair video,.vg-pair canvas,.vg-one video,.vg-one img{width:100%;max-height:60vh;background:#000;border-radius:6px}
.vg-bar{height:12px;border-radius:6px;background:var(--border-color-primary);overflow:hidden}
.vg-bar>i{display:block;height:100%;background:#1d4ed8}
.vg-muted{opacity:.85;font-size:.9em}
.vg-table{border-collapse:collapse;font-size:.9em}.vg-table td,.vg-table th{border:1px solid var(--border-color-primary);padding:2px 6px}
.vg-scroll{overflow-x:auto}
@media (max-width:640px){.vg-pair,.vg-grid{grid-template-columns:1fr}}
"""
HEAD = """<script>
(() => {
  const pair = v => { const box = v.closest && v.closest('.vg-sync'); return box ? [...box.querySelectorAll('video')] : []; };
  let busy = false;
  const follow = e => {
    const v = e.target; if (busy || !v || v.tagName !== 'VIDEO') return;
    const others = pair(v).filter(o => o !== v); if (!others.length) return;
    busy = true;
    for (const o of others) {
      if (e.type !== 'ratechange' && Math.abs(o.currentTime - v.currentTime) > 0.03) o.currentTime = v.currentTime;
      if (e.type === 'play') o.play().catch(() => {});
      if (e.type === 'pause') o.pause();
      if (e.type === 'ratechange') o.playbackRate = v.playbackRate;
    }
    setTimeout(() => { busy = false; }, 60);
  };
  for (const kind of ['play', 'pause', 'seeked', 'ratechange']) document.addEventListener(kind, follow, true);
  const draw = box => {
    const [a, b] = box.querySelectorAll('video'), c = box.querySelector('canvas');
    if (!a || !b || !c || a.readyState < 2 || b.readyState < 2) return;
    c.width = a.videoWidth; c.height = a.videoHeight;
    const g = c.getContext('2d', {willReadFrequently: true}), at = v => {
      g.drawImage(v, 0, 0, c.width, c.height); return g.getImageData(0, 0, c.width, c.height); };
    const x = at(a), y = at(b);
    for (let i = 0; i < x.data.length; i += 4)
      for (let k = 0; k < 3; k++) x.data[i + k] = Math.min(255, 4 * Math.abs(x.data[i + k] - y.data[i + k]));
    g.putImageData(x, 0, 0);
  };
  setInterval(() => document.querySelectorAll('.vg-sync').forEach(draw), 120);
  document.addEventListener('keydown', e => {
    if (e.ctrlKey && e.key === 'Enter') { const b = document.querySelector('#vg-submit'); if (b) (b.querySelector('button') || b).click(); }
  });
})();
</script>"""


def told_seconds(seconds: float) -> str:
    """A duration for people: `42 s`, `3 min 10 s`, `2 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def label(job: Job) -> str:
    """One line that names a job in a list."""
    return f"{STATE_WORDS[job.state]}: {job.summary['prompt'][:48]} ({job.summary['recipe']}, seed {job.summary['seed']}, {job.id[-6:]})"


def _facts(job: Job) -> str:
    s = job.summary
    return escape(
        f"{s['workflow']}, {s['size']}, {s['frames']} frames ({s['seconds']} s), {s['steps']} steps, {s['recipe']}, seed {s['seed']}"
    )


def progress(job: Job | None, note: str = "") -> str:
    """The state of a job for eyes and for screen readers."""
    if job is None:
        return '<div role="status" aria-live="polite" id="vg-status">No clip yet. Write a prompt and add it to the queue.</div>'
    step = f", step {job.step} of {job.total}" if job.total else ""
    word = "stopping after this step" if job.cancelling and not job.is_over else STATE_WORDS[job.state]
    spent = f", {told_seconds((job.finished or time.time()) - job.started)}" if job.started else ""
    phase = f": {job.phase}{step}" if job.state == RUNNING else ""
    error = f'<p role="alert">{escape(job.error)}</p>' if job.error else ""
    label = f'<p class="vg-muted">{escape(job.summary["label"])}</p>' if job.summary.get("label") else ""
    bar = (
        f'<div class="vg-bar" role="progressbar" aria-label="progress" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{job.percent}"><i style="width:{job.percent}%"></i></div>'
    )
    head = f'<div role="status" aria-live="polite" id="vg-status" data-state="{job.state}" data-job="{escape(job.id)}">'
    told = f"<b>{escape(word)}{escape(phase)}</b>{spent}, {job.percent} %"
    prompt = f"<p>{escape(job.summary['prompt'][:300])}</p><p class='vg-muted'>{_facts(job)}</p>"
    found = f"{escape(note)} " if note and not job.is_over else ""
    return f"{head}{found}{told}</div>{bar}{error}{prompt}{label}"


def player(job: Job | None, links: Links, has_preview: bool) -> str:
    """The finished clip, or the preview while it is made."""
    if job is None:
        return ""
    if job.state == COMPLETED:
        return f'<div class="vg-one">{_video(job, links)}{_downloads(job, links)}</div>'
    if job.state == RUNNING and has_preview:
        url = escape(f"{links.url(job.id, 'preview')}&v={job.attempt}.{job.step}")
        told = "preview: a rough linear picture of the latents, not the clip"
        picture = f'<img src="{url}" alt="rough preview at step {job.step} of {job.total}">'
        return f'<div class="vg-one">{picture}<p class="vg-muted">{told}</p></div>'
    return ""


def _video(job: Job, links: Links, *, is_muted: bool = False) -> str:
    source, poster = escape(links.url(job.id, "video")), escape(links.url(job.id, "thumbnail"))
    name = escape(f"clip: {job.summary['prompt'][:80]}", quote=True)
    muted = " muted" if is_muted else ""
    return f'<video controls loop playsinline{muted} preload="metadata" poster="{poster}" src="{source}" aria-label="{name}"></video>'


def _downloads(job: Job, links: Links) -> str:
    video, sidecar = escape(links.url(job.id, "video")), escape(links.url(job.id, "sidecar"))
    return f'<p><a href="{video}" download="{job.id}.mp4">Download clip</a> · <a href="{sidecar}">Download its settings (JSON)</a></p>'


def queue(jobs: Sequence[Job], is_paused: bool, rate: float | None) -> str:
    """The waiting jobs as cards, in the order they will run."""
    head = "<p role='status'>The queue is paused.</p>" if is_paused else ""
    if not jobs:
        return head + "<p>Nothing is waiting.</p>"
    cards, left = [], 0.0
    for number, job in enumerate(jobs, 1):
        left += 0.0 if rate is None else rate * job.summary.get("tflop", 0) * (1 - job.percent / 100)
        when = "" if rate is None else f", ready in about {told_seconds(left)}"
        state = f"{STATE_WORDS[job.state]}{f' {job.percent} %' if job.state == RUNNING else ''}{when}"
        prompt = escape(job.summary["prompt"][:160])
        cards.append(f'<div class="vg-card"><b>{number}. {escape(state)}</b><br>{prompt}<div class="vg-muted">{_facts(job)}</div></div>')
    return head + "".join(cards)


def saved(text: str, count: int, left_out: int) -> str:
    """A link that holds the file itself."""
    told = f" {left_out} with pictures are not in it: a line has no place for them." if left_out else ""
    if not count:
        return f"<p role='status'>Nothing to save.{told}</p>"
    data = base64.b64encode(text.encode()).decode()
    link = f'<a download="queue.jsonl" href="data:application/x-ndjson;base64,{data}">Download queue.jsonl</a>'
    return f"<p role='status'>{link} ({count} job{'s' * (count != 1)}).{told} The queue stays as it is.</p>"


def gallery(jobs: Sequence[Job], links: Links) -> str:
    """Finished clips, newest first."""
    cards = []
    for job in jobs:
        told = f'<div>{escape(job.summary["prompt"][:120])}</div><div class="vg-muted">{_facts(job)}</div>'
        cards.append(f'<div class="vg-card">{_video(job, links)}{told}</div>')
    return f'<div class="vg-grid">{"".join(cards)}</div>' if cards else "<p>No finished clip fits.</p>"


def compare(left: Job, right: Job, links: Links) -> str:
    """Two clips that play together, what differs between them drawn below, and their timelines."""
    videos = ((left, _video(left, links)), (right, _video(right, links, is_muted=True)))
    boxes = "".join(f"<figure>{video}<figcaption>{_facts(job)}</figcaption></figure>" for job, video in videos)
    note = "<p class='vg-muted'>Difference of the two pictures shown, four times as strong; black is equal.</p>"
    canvas = f"<figure><canvas role='img' aria-label='difference of the two clips'></canvas><figcaption>{note}</figcaption></figure>"
    lines = "".join(f"<h4>{escape(job.summary['recipe'])}: steps</h4>{timeline(job.record)}" for job in (left, right))
    return f'<div class="vg-sync"><div class="vg-pair">{boxes}{canvas}</div></div>{lines}'


def figures(recipe: str, known: Sequence[tuple[str, str]]) -> str:
    """What is known of a recipe in general, each with who says so."""
    lines = "".join(f"<li>{escape(told)} <b>[{escape(source)}]</b></li>" for told, source in known)
    return f"<h4>Known of {escape(recipe)}</h4>" + (f"<ul>{lines}</ul>" if lines else "<p>Nothing measured yet.</p>")


def checkup(found: Checkup | None) -> str:
    """What `videogen doctor` found on a worker, or how far it is."""
    if found is None:
        return '<p role="status">Nobody has asked yet. A worker looks between two clips; the page goes on meanwhile.</p>'
    told = {WANTED: "Asked for; a worker looks when its clip is done.", LOOKING: f"Worker {found.group} is looking."}
    if found.is_open or found.report is None:
        return f'<p role="status" data-state="{found.state}">{escape(told.get(found.state, f"It failed: {found.error}"))}</p>'
    areas, report = found.report["areas"], found.report
    slow = sum(row["is_slow"] for row in areas)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found.at))
    head = f"{report['model']}, recipe {report['recipe']}, {report['rows']} rows, on {report['device']}, worker {found.group}, {when}: "
    head += f"{slow} of {len(areas)} areas run on a slower way than need be" if slow else "nothing runs on a slow way"
    names = ("area", "requested", "executed", "reason", "cost", "fix")
    rows = [("SLOW" if row["is_slow"] else "ok", *(row[name] for name in names)) for row in areas]
    tried = [(row["name"], "" if row["ms"] is None else f"{row['ms']:.2f}", row["reason"]) for row in report["attention"]]
    told_areas = table(("", "area", "asked", "ran", "why", "cost", "do"), rows)
    details = f"<details><summary>Attention candidates</summary>{table(('name', 'ms', 'why not'), tried)}</details>"
    return f'<p role="status" data-state="done">{escape(head)}</p>{told_areas}{details}'


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A small table; every cell escaped."""
    first = "".join(f'<th scope="col">{escape(str(cell))}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="vg-scroll"><table class="vg-table"><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


def timeline(record: dict[str, Any]) -> str:
    """The cache's decisions, a cell a step: computed filled, reused hatched and marked r; the same as a table."""
    steps = record.get("cache", {}).get("steps", [])
    if not steps:
        return f"<p>The step cache was off: all {escape(str(record.get('forwards', '?')))} steps were computed.</p>"
    width = 16
    cells = []
    for index, step in enumerate(steps):
        is_reused = step["action"] == "reuse"
        tip = escape(f"step {index + 1}: {step['action']}, {step['reason']}, risk {step['risk']}")
        fill, mark = ("url(#vg-hatch)", "r") if is_reused else ("#1d4ed8", "c")
        ink = "#111" if is_reused else "#fff"
        cells.append(
            f'<g><title>{tip}</title><rect x="{index * width}" y="0" width="{width - 2}" height="24" fill="{fill}" stroke="#334155"/>'
            f'<text x="{index * width + 7}" y="16" font-size="11" text-anchor="middle" fill="{ink}">{mark}</text></g>'
        )
    hatch = '<pattern id="vg-hatch" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    hatch += '<rect width="4" height="4" fill="#fde68a"/><line x1="0" y1="0" x2="0" y2="4" stroke="#92400e" stroke-width="1.5"/></pattern>'
    total = len(steps) * width
    picture = f'<svg role="img" aria-label="cache timeline" viewBox="0 0 {total} 26" width="{total}" height="26">'
    rows = [(n, s["action"], s["reason"], s["risk"], s["drift"].get("video", ""), s.get("ms", "")) for n, s in enumerate(steps, 1)]
    told = table(("step", "decision", "why", "risk", "video drift", "ms"), rows)
    legend = "<p class='vg-muted'>c computed (filled), r reused (hatched)</p>"
    details = f"<details><summary>The same as a table</summary>{told}</details>"
    return f'<div class="vg-scroll">{picture}<defs>{hatch}</defs>{"".join(cells)}</svg></div>{legend}{details}'
