"""Walks the lambdas of the step cache over calibration clips and writes the certificate; resumable, since it takes hours."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from caches.calibrate import Verdict, is_violation, learn_then_test
from caches.certificate import Certificate, Fingerprint
from eval.cache_loss import Tolerances, loss, loss_parts
from eval.losses import Losses, questions, settings_of
from eval.metrics.pair import Clip, Pair
from eval.quality_cases import Case
from eval.quality_trials import as_clip
from videogen.config import StepCache
from videogen.errors import bad
from videogen.identity import hash_settings
from videogen.pipeline import Pipeline

Told = Callable[[str], None]
KEPT_BYTES = 3_000_000_000


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be promised: P(loss > tolerances) <= alpha with confidence 1 - delta, at the largest of `lambdas`.

    `options` are the cache's other settings; `parallel` is how clips are computed, part of the stratum.
    """

    lambdas: tuple[float, ...]
    alpha: float
    delta: float
    tolerances: Tolerances
    options: StepCache
    parallel: str = "1"

    def __post_init__(self) -> None:
        if not self.lambdas or list(self.lambdas) != sorted(set(self.lambdas)) or self.lambdas[0] <= 0:
            raise bad("--lambdas", self.lambdas, "positive numbers in rising order, fixed before anything is measured", "correct them")


def stratum_of(pipeline: Pipeline, cases: Sequence[Case], parallel: str) -> Fingerprint:
    """The one stratum of the cases, run as `parallel` says.

    Raises RequestError when they differ in workflow, canvas, length or steps.
    """
    resolved = [pipeline.family.resolve(case.request, pipeline.recipe) for case in cases]
    prints = list(dict.fromkeys(replace(pipeline.stratum(each), parallel=parallel) for each in resolved))
    if len(prints) != 1:
        told = "; ".join(prints[0].differences(prints[1]))
        got = f"{len(prints)} strata ({told})"
        raise bad("calibration clips", got, "one workflow, canvas, length and schedule", "calibrate each apart")
    return prints[0]


def journal(path: Path, pipeline: Pipeline, cases: Sequence[Case], goal: Goal) -> Losses:
    """The losses measured so far of these cases at the goal's settings."""
    return Losses(path, questions(pipeline, cases, settings_of(goal.options), goal.parallel))


def with_lambda(pipeline: Pipeline, options: StepCache, lam: float) -> Pipeline:
    """The same weights and adapters with a step cache."""
    return pipeline.sharing(replace(pipeline.recipe, name=f"lambda {lam:g}", cache=replace(options, lam=lam)))


class References:
    """Uncached clips, kept between lambdas while they fit: rendering one again costs as much as a lambda."""

    def __init__(self, pipeline: Pipeline, max_bytes: int = KEPT_BYTES) -> None:
        self.pipeline, self.left = pipeline, max_bytes
        self._clips: dict[str, Clip] = {}

    def clip(self, case: Case) -> Clip:
        """The uncached clip of a case."""
        if case.name in self._clips:
            return self._clips[case.name]
        clip = as_clip(self.pipeline.render(replace(case.request, seed=case.seed)), "uncached")
        if clip.frames.nbytes <= self.left:
            self._clips[case.name] = clip
            self.left -= clip.frames.nbytes
        return clip


def _measure(references: References, case: Case, options: StepCache, lam: float, losses: Losses) -> None:
    """Render a case at a lambda, unless that was done before, and keep what it lost."""
    if (lam, case.name) in losses.rows:
        return
    result = with_lambda(references.pipeline, options, lam).render(replace(case.request, seed=case.seed))
    pair = Pair(as_clip(result, f"lambda {lam:g}"), references.clip(case))
    cache = result.record["cache"]
    losses.add({"lam": lam, "case": case.name, "parts": loss_parts(pair), "reused": cache["reused"] / len(cache["steps"])})


def measure_all(pipeline: Pipeline, cases: Sequence[Case], goal: Goal, losses: Losses) -> None:
    """Measure every lambda on these cases, one process's share of a calibration."""
    references = References(pipeline)
    for case in cases:
        for lam in goal.lambdas:
            _measure(references, case, goal.options, lam, losses)


def walk(pipeline: Pipeline, cases: Sequence[Case], goal: Goal, losses: Losses, tell: Told) -> Verdict:
    """Measure one lambda after the other on every case and stop at the first that is not certified."""
    verdict = Verdict(0.0, 0, len(cases), 1.0, "nothing measured")
    measured: dict[float, list[float]] = {}
    references = References(pipeline)
    for lam in goal.lambdas:
        for case in cases:
            _measure(references, case, goal.options, lam, losses)
        measured[lam] = [loss(losses.rows[lam, case.name]["parts"], goal.tolerances) for case in cases]
        verdict = learn_then_test(measured, alpha=goal.alpha, delta=goal.delta)
        bad_ones, reused = sum(map(is_violation, measured[lam])), mean_reused(losses, lam, cases)
        tell(f"lambda {lam:g}: {bad_ones} of {len(cases)} violate, {reused:.1%} of the steps reused; certified up to {verdict.lam:g}")
        if verdict.lam != lam:
            break
    return verdict


def mean_reused(losses: Losses, lam: float, cases: Sequence[Case]) -> float:
    """The mean share of steps reused at a lambda."""
    return sum(float(losses.rows[lam, case.name]["reused"]) for case in cases) / len(cases)


def certify(pipeline: Pipeline, cases: Sequence[Case], goal: Goal, verdict: Verdict, losses: Losses) -> Certificate:
    """The certificate of a verdict.

    Raises RequestError as `stratum_of` does.
    """
    options = goal.options
    return Certificate(
        fingerprint=stratum_of(pipeline, cases, goal.parallel),
        lam=verdict.lam,
        max_streak=options.max_streak,
        video_order=options.video_order,
        audio_order=options.audio_order,
        warm_up=options.warm_up,
        drift_order=options.drift_order,
        prior=options.prior,
        alpha=goal.alpha,
        delta=goal.delta,
        tolerances=asdict(goal.tolerances),
        n=verdict.n,
        violations=verdict.violations,
        mean_reused=round(mean_reused(losses, verdict.lam, cases), 4),
        clips_sha256=hash_settings([[case.name, case.request.prompt, case.seed] for case in cases]),
    )
