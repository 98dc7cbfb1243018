"""What held-out trajectories say of a student, in latents: fidelity to the teacher's end, sharpness, Frechet distance."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lora.distil import Look, State, frechet, rollout
from videogen.pocket import packed, sizes
from videogen.pocket.bank import Forward, Part
from videogen.pocket.clip_rows import latent_size
from videogen.pocket.shapes import parts as split

FEATURES = 24


@dataclass(frozen=True, slots=True)
class Seen:
    """One look: errors in dB by modality and by kind of request, and what the stop rules read."""

    look: Look
    video_db: float
    audio_db: float
    by_kind: dict[str, float]

    def facts(self) -> dict[str, object]:
        """For the log."""
        kinds = {f"video_db_{kind}": value for kind, value in self.by_kind.items()}
        return {
            "video_db": self.video_db,
            "audio_db": self.audio_db,
            **kinds,
            "sharpness": self.look.sharpness,
            "distance": self.look.distance,
        }


@torch.no_grad()
def ends(call: Forward, parts: Sequence[Part], sigmas: torch.Tensor, batch: int = 8) -> list[State]:
    """The last states (held, rows, C) of every part's held-out requests, from the teacher's noise over levels (2, N + 1)."""
    found = []
    for part in parts:
        out = [
            rollout(part.velocity(call, index), tuple(s[0, index] for s in part.states), sigmas)[-1]
            for index in split(torch.arange(part.held, device=sigmas.device), batch)
        ]
        found.append(tuple(torch.cat([each[m] for each in out]) for m in range(2)))
    return found


def wanted_ends(parts: Sequence[Part]) -> list[State]:
    """The teacher's own."""
    return [tuple(s[-1, : part.held] for s in part.states) for part in parts]


def judge(parts: Sequence[Part]) -> Callable[[list[State]], Seen]:
    """A judge of ends of these parts against the teacher's."""
    wanted = wanted_ends(parts)
    true_features = _features(wanted, parts)

    def look(found: list[State]) -> Seen:
        video = [(a[1] - b[1]).pow(2).flatten(1).mean(1) for a, b in zip(found, wanted)]
        audio = torch.cat([(a[0] - b[0]).pow(2).flatten(1).mean(1) for a, b in zip(found, wanted)])
        names = [part.key[0] if part.key[3] == sizes.SMALL else f"{part.key[0]}_large" for part in parts]
        by_kind = {kind: _db(torch.cat([v for v, name in zip(video, names) if name == kind])) for kind in sorted(set(names))}
        video_db, audio_db = _db(torch.cat(video)), _db(audio)
        distance = frechet(_features(found, parts), true_features)
        return Seen(Look((video_db + audio_db) / 2, sharpness(found, parts), distance), video_db, audio_db, by_kind)

    return look


def sharpness(found: Sequence[State], parts: Sequence[Part]) -> float:
    """The mean step between neighbouring video latents of a row."""
    steps = [z.diff(dim=-1).abs().mean() for z in _latents(found, parts)]
    return float(torch.stack(steps).mean())


def _db(errors: torch.Tensor) -> float:
    """The mean of each sample's error in dB (latents have about unit variance)."""
    return float((-10 * errors.clamp(min=1e-9).log10()).mean())


def _latents(found: Sequence[State], parts: Sequence[Part]) -> list[torch.Tensor]:
    return [packed.unpatchify(state[1], latent_size(part.key[2], part.key[3])) for state, part in zip(found, parts)]


def _features(found: Sequence[State], parts: Sequence[Part]) -> torch.Tensor:
    """Fixed random projections of whole latent frames, of the video's size and its change in time; (n, FEATURES). One canvas only."""
    rows = []
    first = parts[0].key[3]
    for z, part in zip(_latents(found, parts), parts):
        if part.key[3] != first:
            continue
        pair = torch.cat([z[:, :, :-1], z.diff(dim=2)], dim=1)  # (B, 2 C, T - 1, h, w)
        rows.append(pair.transpose(1, 2).flatten(0, 1).flatten(1))
    every = torch.cat(rows)
    generator = torch.Generator().manual_seed(7)
    table = torch.randn(every.shape[1], FEATURES, generator=generator).to(every) / every.shape[1] ** 0.5
    features: torch.Tensor = every @ table
    return features
