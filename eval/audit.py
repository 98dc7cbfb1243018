"""Renders audited clips again, cached and in full, and tests their certificates' promises; resumable at every clip."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from caches.audit import Audit
from caches.calibrate import clopper_pearson, is_violation
from caches.certificate import Certificate
from eval.arms import in_full
from eval.audit_clips import Made, certificate_id
from eval.cache_loss import Tolerances, loss, loss_parts
from eval.losses import Losses
from eval.metrics.pair import Pair
from eval.quality_trials import as_clip
from videogen.errors import RequestError, bad
from videogen.families.base import Resolved
from videogen.pipeline import Pipeline, open_pipeline

Told = Callable[[str], None]
SHOWN = 12  # characters of a certificate's id


@dataclass(frozen=True, slots=True)
class Job:
    """One clip that can be audited here: what it was asked, the pipelines that make it cached and in full, and its promise."""

    made: Made
    resolved: Resolved
    cached: Pipeline
    dense: Pipeline
    certificate: Certificate


class Pairs:
    """The pipelines of audited clips: as rendered, and the same without its cache. Weights are shared, and load at the first clip.

    files: where pictures and adapters lie; at_hand: certificates by id; model: in place of the one that the sidecars name.
    """

    def __init__(self, files: Path, at_hand: Mapping[str, Certificate], model: str | None, device: str) -> None:
        self.files, self.at_hand, self.model, self.device = files, at_hand, model, device
        self._first: dict[tuple[str, str], Pipeline] = {}
        self._opened: dict[str, tuple[Pipeline, Pipeline]] = {}

    def of(self, made: Made) -> tuple[Pipeline, Pipeline]:
        """The two pipelines of a clip's recipe."""
        if made.recipe_key not in self._opened:
            model, recipe = self.model or str(made.record["model"]["source"]), made.recipe(self.files, self.at_hand)
            first = self._first.get((model, recipe.dtype))
            cached = first.sharing(recipe) if first else open_pipeline(model, recipe, device=self.device)
            self._first.setdefault((model, recipe.dtype), cached)
            self._opened[made.recipe_key] = cached, in_full(cached)
        return self._opened[made.recipe_key]


def job_of(made: Made, pairs: Pairs) -> Job:
    """The clip with the certificate that covers it here.

    Raises RequestError when none does: other weights, another kind of device, other code.
    """
    resolved, (cached, dense) = made.resolved(pairs.files), pairs.of(made)
    stratum = cached.stratum(resolved)
    offered = cached.recipe.cache.certificates
    for certificate in offered:
        if certificate.fingerprint == stratum and certificate.promise == made.record["cache"]["certificate"]:
            if dense.stratum(resolved) != stratum:
                raise bad("stratum", "another arithmetic without its cache", "the same both ways", "report this")
            return Job(made, resolved, cached, dense, certificate)
    if not offered:
        raise bad("certificate", "a digest of its prior", "its file", "pass it with --certificate")
    told = min((certificate.fingerprint.differences(stratum) for certificate in offered), key=len)
    got = "; ".join(told) or "another promise"
    raise bad("stratum", got, "the model, device and version it was rendered with", "audit it there")


def measure(job: Job, losses: Losses) -> None:
    """Render one clip both ways and keep what it lost."""
    cached, dense = job.cached.render(job.resolved), job.dense.render(job.resolved)
    parts = loss_parts(Pair(as_clip(cached, job.made.name), as_clip(dense, "in full")))
    cache, delivered = cached.record["cache"], job.made.record["output"]
    is_same = all(delivered[name] == cached.record["output"][name] for name in ("frames_sha256", "audio_sha256"))
    row = {"lam": job.certificate.lam, "case": job.made.identity, "name": job.made.name, "parts": parts}
    losses.add(row | {"reused": cache["reused"] / len(cache["steps"]), "is_delivered": is_same})


def audit_of(certificate: Certificate, losses: Losses) -> Audit:
    """The test replayed from the journal of losses, in the order in which they were measured."""
    audit = Audit(certificate.alpha)
    for row in losses.rows.values():
        audit = audit.after(loss_of(row, certificate))
    return audit


def loss_of(row: Mapping[str, Any], certificate: Certificate) -> float:
    """A measured clip's loss in units of the certificate's tolerances."""
    return loss(row["parts"], Tolerances(**certificate.tolerances))


def run_audit(jobs: Sequence[Job], losses: Losses, level: float, tell: Told) -> dict[str, Any]:
    """Measure the drawn clips of one certificate, until the alarm if it comes, and report.

    Whatever was measured in this folder before counts, the drawn share having been smaller or larger.
    """
    certificate, measured = jobs[0].certificate, losses.rows
    audit = audit_of(certificate, losses)
    for job in jobs:
        key = (certificate.lam, job.made.identity)
        if key in measured or audit.is_alarm(level):
            continue
        measure(job, losses)
        audit = audit_of(certificate, losses)
        lost = loss_of(measured[key], certificate)
        tell(f"{job.made.name}: loss {lost:.3g}{' VIOLATES' if is_violation(lost) else ''}, e {audit.e_value:.3g}")
    return {
        "certificate": certificate_id(certificate)[:SHOWN],
        "promise": certificate.promise,
        "lambda": certificate.lam,
        "stratum": asdict(certificate.fingerprint),
        "alpha": certificate.alpha,
        "drawn": len(jobs),
        "clips": audit.clips,
        "violations": audit.violations,
        "clopper_pearson_95": list(clopper_pearson(audit.violations, audit.clips)),
        "alternative": audit.alternative,
        "e_value": audit.e_value,
        "most": audit.peak,
        "is_alarm": audit.is_alarm(level),
        "other_than_delivered": sum(not row["is_delivered"] for row in measured.values()),
        "journal": losses.path.name,
    }


def sort_out(clips: Sequence[Made], pairs: Pairs) -> tuple[list[Job], dict[str, int]]:
    """The clips that can be audited here, and why others cannot, with how many."""
    jobs: list[Job] = []
    reasons: Counter[str] = Counter()
    for made in clips:
        try:
            jobs.append(job_of(made, pairs))
        except RequestError as error:
            reasons[str(error)] += 1
    return jobs, dict(reasons)
