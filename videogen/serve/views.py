"""A job as clients see it: OpenAI's video object with true states, and the numbers for Prometheus; no path ever."""

from collections.abc import Mapping
from typing import Any

from videogen.jobs.database import CANCELLED, FAILED, STATES, Job


def video_object(job: Job) -> dict[str, Any]:
    """OpenAI's `video` object; what theirs lacks is in `extra`. A cancelled job is `failed` with the code `cancelled`."""
    summary = job.summary
    seconds = f"{summary.get('seconds', 0):g}"
    return {
        "id": job.id,
        "object": "video",
        "model": summary.get("model", ""),
        "status": FAILED if job.state == CANCELLED else job.state,
        "progress": job.percent,
        "created_at": int(job.created),
        "completed_at": int(job.finished) if job.finished and job.percent == 100 else None,
        "expires_at": int(job.expires) if job.expires else None,
        "prompt": summary.get("prompt", ""),
        "size": summary.get("size", ""),
        "seconds": seconds,
        "error": {"code": job.error_code, "message": job.error} if job.error_code else None,
        "remixed_from_video_id": None,
        "extra": _extra(job),
    }


def _extra(job: Job) -> dict[str, Any]:
    summary, record = job.summary, job.record
    shown = {name: summary.get(name) for name in ("frames", "fps", "steps", "seed", "recipe", "workflow", "label", "notes", "request")}
    states = {"state": job.state, "cancelled": job.state == CANCELLED, "cancelling": job.cancelling and not job.is_over}
    steps = {"phase": job.phase, "step": job.step, "total_steps": job.total, "attempt": job.attempt}
    spent = {"render_s": round(job.finished - job.started, 3) if job.finished and job.started else None}
    kept = {name: record[name] for name in ("peak_memory_mb", "stages_s") if name in record}
    return shown | states | steps | spent | kept


def prometheus(counts: Mapping[str, int], requests: Mapping[tuple[str, str], int], gauges: Mapping[str, float]) -> str:
    """The text format: jobs by state, requests by method and status class, and single gauges."""
    lines = ["# HELP videogen_jobs Jobs in the store by state.", "# TYPE videogen_jobs gauge"]
    lines += [f'videogen_jobs{{state="{state}"}} {counts.get(state, 0)}' for state in STATES]
    lines += ["# HELP videogen_http_requests_total Answers by method and status class.", "# TYPE videogen_http_requests_total counter"]
    known = [(method, status, number) for (method, status), number in sorted(requests.items()) if method.isalpha()]
    lines += [f'videogen_http_requests_total{{method="{method[:10]}",status="{status}"}} {number}' for method, status, number in known]
    for name, value in gauges.items():
        lines += [f"# TYPE videogen_{name} gauge", f"videogen_{name} {value:g}"]
    return "\n".join(lines) + "\n"
