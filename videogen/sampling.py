"""How many forwards over which sigmas: what the request asks, what its adapters were trained for, what the model has; pure."""

from dataclasses import dataclass

from lora.contract import Contract
from videogen.config import Recipe, Request
from videogen.errors import bad

Sigmas = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Forwards, the shifts of video and audio, and explicit sigmas of video and audio (final 0 included) where a contract has them."""

    steps: int
    shifts: tuple[float, float]
    sigmas: Sigmas | None = None


def settle_sampling(
    request: Request, recipe: Recipe, *, default_steps: int, own_shifts: tuple[float, float], has_sound: bool = True
) -> Sampling:
    """The sampling of one request; the contract of the recipe's adapters stands above the recipe's and the model's defaults.

    Raises RequestError when the request or the recipe contradicts the contract, naming both sides and what wrote them, or
    when the contract fixes one modality only. Without sound `shift_video` is the shift, and stands in both places.
    """
    terms = recipe.adapters.terms
    if not recipe.adapters.is_settled:
        raise bad("recipe", recipe.name, "adapters whose files were read", "open it with open_pipeline")
    told = terms.disagreements(workflow=request.workflow, forwards=request.steps or recipe.steps)
    if told:
        advice = "drop --steps, choose another adapter, or pass --lora-contract=ignore"
        raise bad("adapter contract", "; ".join(told), "a request as trained", advice)
    shifts, sigmas = _schedule(terms, own_shifts) if has_sound else _one_schedule(terms, own_shifts)
    return Sampling(request.steps or terms.forwards or recipe.steps or default_steps, shifts, sigmas)


def _schedule(terms: Contract, own_shifts: tuple[float, float]) -> tuple[tuple[float, float], Sigmas | None]:
    stated = [name for name in ("shift_video", "shift_audio") if getattr(terms, name) is not None]
    if len(stated) == 1:
        lacking = "shift_audio" if stated == ["shift_video"] else "shift_video"
        raise bad("adapter contract", f"{stated[0]} without {lacking}", "both shifts or none", f"add --lora-contract {lacking}=VALUE")
    shifts = own_shifts if terms.shift_video is None or terms.shift_audio is None else (terms.shift_video, terms.shift_audio)
    schedule = terms.schedule() if terms.sigmas else None
    return shifts, None if schedule is None else (schedule["video"], schedule["audio"])


def _one_schedule(terms: Contract, own_shifts: tuple[float, float]) -> tuple[tuple[float, float], Sigmas | None]:
    shifts = own_shifts if terms.shift_video is None else (terms.shift_video, terms.shift_video)
    return shifts, None if terms.sigmas is None else (terms.sigmas, terms.sigmas)


def told_shifts(shifts: tuple[float, float], sigmas: Sigmas | None) -> str:
    """The schedule as a certificate's stratum names it: `12/3`, or the sigmas themselves."""
    if sigmas is None:
        return f"{shifts[0]:g}/{shifts[1]:g}"
    return " / ".join(",".join(f"{sigma:g}" for sigma in each) for each in sigmas)
