"""Few-step distillation of any rectified flow: the teacher's trajectory, losses for a student, and when to stop.

A state is one tensor (B, rows, C) a modality; velocities point to the data, so that a step from level s to s' adds (s - s') v. Models,
conditions and layouts stay behind the caller's `Velocity`. Segment regression: a student on N points learns the mean velocity between
neighbours (after progressive distillation, Salimans and Ho 2022, arXiv:2202.00512, and PeRFlow, Yan et al. 2024, arXiv:2405.07510);
roll-outs train it on its own states, through all its steps; distribution matching is DMD2 without its discriminator (Yin et al. 2024,
arXiv:2405.14867).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from lora.errors import bad

State = tuple[torch.Tensor, ...]
Levels = tuple[torch.Tensor, ...]  # the noise level (B,) of each modality
Velocity = Callable[[State, Levels], State]

FLOOR = 2e-4  # squared error below which a sample hardly counts any more; states have about unit variance
MAX_SHARPER, MAX_LOSS_DB, MAX_RISES = 1.10, 1.5, 2  # the stop rules of the matching stage


Number = TypeVar("Number", float, torch.Tensor)


def shifted(base: Number, shift: float) -> Number:
    """The noise level that a shift makes of a base level in [0, 1]."""
    return shift * base / (1 + (shift - 1) * base)


def student_points(forwards: int, warp: float) -> list[float]:
    """N + 1 base levels from 1 to 0. A warp w is one more shift: shifts (a, b) then act as (w a, w b), on the same path of the teacher."""
    if forwards < 1 or not warp > 0:
        raise bad("student grid", f"{forwards} forwards, warp {warp:g}", "at least 1, and a warp above 0", "choose others")
    return [1.0, *(shifted(1 - k / forwards, warp) for k in range(1, forwards)), 0.0]


def levels_at(base: Sequence[float], shifts: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Noise levels (modalities, points) of base levels, on the device of `like`, float32."""
    return torch.tensor([[shifted(u, shift) for u in base] for shift in shifts], device=like.device)


@torch.no_grad()
def trajectory(velocity: Velocity, noise: State, forwards: int, shifts: Sequence[float], keep: Sequence[float]) -> list[State]:
    """The states that Euler's path of `forwards` steps passes at the falling base levels `keep`, which begin at 1 and end at 0.

    Euler's path is straight between its points, so a level between two of them lies exactly on it; the last state is plain sampling's.
    """
    if keep[0] != 1 or keep[-1] != 0 or any(a <= b for a, b in pairwise(keep)):
        raise bad("kept levels", list(keep), "falling from 1 to 0", "use student_points")
    state, kept, size = noise, [noise], len(noise[0])
    for k in range(forwards):
        now, after = 1 - k / forwards, 1 - (k + 1) / forwards
        levels = [shifted(now, shift) for shift in shifts]
        v = velocity(state, tuple(torch.full((size,), s, device=noise[0].device) for s in levels))
        while len(kept) < len(keep) and keep[len(kept)] > after + 1e-9:
            u = keep[len(kept)]
            kept.append(tuple(x + (s - shifted(u, shift)) * y for x, y, s, shift in zip(state, v, levels, shifts)))
        state = tuple(x + (s - shifted(after, shift)) * y for x, y, s, shift in zip(state, v, levels, shifts))
        if len(kept) < len(keep) and abs(keep[len(kept)] - after) <= 1e-9:
            kept.append(state)
    return kept


def segment_weights(sigmas: torch.Tensor) -> torch.Tensor:
    """How often each segment is drawn (N,): three quarters evenly, one quarter by its length in the first modality's levels (M, N + 1)."""
    return 0.75 / (sigmas.shape[1] - 1) + 0.25 * (sigmas[0, :-1] - sigmas[0, 1:])


def segment_loss(velocity: Velocity, start: State, end: State, before: Levels, after: Levels) -> torch.Tensor:
    """Squared error, summed over modalities, of the velocity at `start` against the mean one that leads to `end`."""
    found = velocity(start, before)
    gaps = [_column(a) - _column(b) for a, b in zip(before, after)]
    return _sum([(v - (y - x) / gap).pow(2).mean() for v, x, y, gap in zip(found, start, end, gaps)])


def rollout(velocity: Velocity, noise: State, sigmas: torch.Tensor, steps: int | None = None) -> list[State]:
    """The student's own states from noise over its first `steps` (all) levels (M, N + 1); gradients pass through."""
    states, size = [noise], len(noise[0])
    for k in range(sigmas.shape[1] - 1 if steps is None else steps):
        v = velocity(states[-1], tuple(s.expand(size) for s in sigmas[:, k]))
        states.append(tuple(x + (s[k] - s[k + 1]) * y for x, y, s in zip(states[-1], v, sigmas)))
    return states


def rollout_loss(velocity: Velocity, wanted: Sequence[State], sigmas: torch.Tensor, *, anchor: float) -> torch.Tensor:
    """The error of the student's last state against the teacher's from the same noise, by back-propagation through all N steps.

    The mean over samples and modalities of the logarithm of the squared error, which is what decibels average: samples that took another
    turn, and whose error is large, do not outweigh the rest. `anchor` times the mean velocity error of every state on the way is added;
    without it the student may take another path to the same end.
    """
    states = rollout(velocity, wanted[0], sigmas)
    errors = torch.stack([(x - y).pow(2).flatten(1).mean(1) for x, y in zip(states[-1], wanted[-1])])
    loss = (errors + FLOOR).log().mean()
    for k in range(1, len(states) if anchor else 0):
        on_way = [((x - y) / (s[k - 1] - s[k])).pow(2).mean() for x, y, s in zip(states[k], wanted[k], sigmas)]
        loss = loss + anchor / (len(states) - 1) * _sum(on_way)
    return loss


def clean_of(state: State, v: State, levels: Levels) -> State:
    """The data that a velocity at a noise level points to."""
    return tuple(x + _column(s) * y for x, y, s in zip(state, v, levels))


def generated(velocity: Velocity, noise: State, sigmas: torch.Tensor, last: int) -> State:
    """The data the student points to at its evaluation `last` (0 to N - 1), reached by its own steps; gradient in that evaluation only."""
    with torch.no_grad():
        state = rollout(velocity, noise, sigmas, last)[-1]
    levels = tuple(s.expand(len(noise[0])) for s in sigmas[:, last])
    return clean_of(state, velocity(state, levels), levels)


def renoised(clean: State, levels: Levels) -> tuple[State, State]:
    """Noisy states at given levels, and the noise that went in."""
    noise = tuple(torch.randn_like(x) for x in clean)
    return tuple((1 - _column(s)) * x + _column(s) * e for x, e, s in zip(clean, noise, levels)), noise


def matching_loss(clean: State, teacher: Velocity, fake: Velocity, levels: Levels) -> torch.Tensor:
    """Distribution matching: its gradient on `clean` is (what the fake sees - what the teacher sees) / mean |clean - teacher's|."""
    with torch.no_grad():
        noisy, _ = renoised(clean, levels)
        real, false = clean_of(noisy, teacher(noisy, levels), levels), clean_of(noisy, fake(noisy, levels), levels)
        scales = [(x - r).abs().mean(dim=(1, 2), keepdim=True).clamp(min=1e-3) for x, r in zip(clean, real)]
        goals = [x - (f - r) / scale for x, f, r, scale in zip(clean, false, real, scales)]
    return _sum([0.5 * (x - goal).pow(2).mean() for x, goal in zip(clean, goals)])


def fake_loss(clean: State, fake: Velocity, levels: Levels) -> torch.Tensor:
    """The plain flow loss of the fake score on what the student makes."""
    clean = tuple(x.detach() for x in clean)
    noisy, noise = renoised(clean, levels)
    return _sum([(v - (x - e)).pow(2).mean() for v, x, e in zip(fake(noisy, levels), clean, noise)])


@dataclass(frozen=True, slots=True)
class Look:
    """What held-out trajectories say of a student: error to the teacher's end (dB, higher is nearer), sharpness, Frechet distance."""

    fidelity_db: float
    sharpness: float
    distance: float


def stop_reason(looks: Sequence[Look], teacher_sharpness: float) -> str:
    """Why the matching stage must end, or the empty string. `looks[0]` is the student it began with."""
    now = looks[-1]
    if now.sharpness > MAX_SHARPER * teacher_sharpness:
        return f"sharpness {now.sharpness:.4g} is over {MAX_SHARPER:g} times the teacher's {teacher_sharpness:.4g}"
    if now.fidelity_db < looks[0].fidelity_db - MAX_LOSS_DB:
        return f"fidelity fell from {looks[0].fidelity_db:.2f} to {now.fidelity_db:.2f} dB, more than {MAX_LOSS_DB:g}"
    last = [each.distance for each in looks[-MAX_RISES - 1 :]]
    if len(last) > MAX_RISES and all(a < b for a, b in pairwise(last)):
        return f"the Frechet distance rose {MAX_RISES} times in a row to {now.distance:.4g}"
    return ""


def best_look(looks: Sequence[Look], teacher_sharpness: float) -> int:
    """The look of smallest distance that breaks neither bound; 0, the student it began with, when none does better."""
    fit = [i for i in range(len(looks)) if i == 0 or not stop_reason([looks[0], looks[i]], teacher_sharpness)]
    return min(fit, key=lambda i: looks[i].distance)


def frechet(a: torch.Tensor, b: torch.Tensor) -> float:
    """The Frechet distance of Gaussians fitted to features (n, D) and (m, D) (Heusel et al. 2017, arXiv:1706.08500, equation 6)."""
    a, b = a.double(), b.double()
    one, two = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(one)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ two @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).pow(2).sum() + one.trace() + two.trace() - 2 * mixed)


def _column(level: torch.Tensor) -> torch.Tensor:
    return level[:, None, None]


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(parts)).sum()
