"""The teacher's trajectories on the device: requests of every workflow, batched by layout, states at the student's grid points."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lora.distil import Levels, State, Velocity, trajectory
from videogen.pocket import packed, sizes
from videogen.pocket.cache import Bucket, Cache, Canvas
from videogen.pocket.clip_rows import rows_of

# kind -> share of the trajectories, and how many text lengths to take: each shape costs two captured graphs
LONG = {"t": (0.5, 6), "f": (0.12, 2), "l": (0.06, 1), "b": (0.08, 1), "r": (0.24, 3)}
SHORT = {"t": (0.6, 2), "f": (0.15, 1), "r": (0.25, 1)}
LARGE = {"t": (0.7, 3), "f": (0.12, 1), "r": (0.18, 1)}  # whole clips at 256x144
TOY = {"t": (0.5, 1), "r": (0.5, 1)}
CHANNELS = (sizes.AUDIO_CHANNELS, sizes.LATENT_CHANNELS * 4)
Key = tuple[str, int, int, Canvas]  # kind, text rows, frames, canvas
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # packed.PackedForward's call


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of a cache that share a layout, and the share of all trajectories they are to have."""

    cache: Cache
    bucket: Bucket
    num_frames: int
    rows: packed.Rows
    share: float

    @property
    def key(self) -> "Key":
        """What tells shapes apart."""
        return self.bucket.kind, self.rows.text, self.num_frames, self.bucket.canvas


@dataclass(frozen=True, slots=True)
class Part:
    """Trajectories of one shape: states (N + 1, n, rows, C) of audio and video; the first `held` are never trained on."""

    key: Key
    rows: packed.Rows
    text: torch.Tensor  # (n, L, text_dim)
    condition: torch.Tensor  # (n, C, 4 C)
    states: State
    held: int

    @property
    def count(self) -> int:
        """Trajectories to train on."""
        return self.states[0].shape[1] - self.held

    def velocity(self, call: Forward, index: torch.Tensor) -> Velocity:
        """A model's velocities for some of the requests."""
        return velocity_of(call, self.rows, self.text[index].float(), self.condition[index])


def velocity_of(call: Forward, rows: packed.Rows, text: torch.Tensor, condition: torch.Tensor) -> Velocity:
    """A packed forward as a function of (audio, video) rows and their noise levels."""

    def velocity(state: State, levels: Levels) -> State:
        return call(rows, text, condition, state[0], state[1], 1 - levels[0], 1 - levels[1])

    return velocity


def shapes_of(cache: Cache, num_frames: int, plan: dict[str, tuple[float, int]], whole: float = 1.0) -> list[Shape]:
    """The commonest text lengths of every kind of `plan`, with their shares of `whole`."""
    found = []
    for kind, (share, most) in plan.items():
        buckets = sorted((b for b in cache.buckets if b.kind == kind), key=lambda b: -len(b.clip))[:most]
        total = sum(len(b.clip) for b in buckets)
        found += [Shape(cache, b, num_frames, rows_of(b, num_frames), whole * share * len(b.clip) / total) for b in buckets]
    return found


def noise_of(rows: packed.Rows, size: int, generator: torch.Generator) -> State:
    """Fresh noise for `size` samples, audio and video rows, drawn in the order of `packed.sample`."""
    drawn = [
        torch.randn(size, n, c, generator=generator, device=generator.device) for n, c in zip((rows.video, rows.audio), CHANNELS[::-1])
    ]
    return drawn[1], drawn[0]


def conditions_of(cache: Cache, bucket: Bucket, index: torch.Tensor, num_frames: int, generator: torch.Generator) -> torch.Tensor:
    """Condition rows of some requests with the little noise that the pipeline gives them."""
    clean = cache.condition(bucket, index, num_frames)
    noise = torch.randn(clean.shape, generator=generator, device=generator.device)
    return packed.ANCHOR_T * clean + (1 - packed.ANCHOR_T) * noise


@dataclass(frozen=True, slots=True)
class Teaching:
    """How trajectories are made: the teacher, its forwards and shifts (audio, video), the kept base levels, rows a batch."""

    call: Forward
    forwards: int
    shifts: tuple[float, float]
    keep: list[float]
    row_budget: int


def build_bank(shapes: list[Shape], how: Teaching, seed: int, *, held: int, least: int, is_over: Callable[[], bool]) -> list[Part]:
    """Batches of trajectories, the shape furthest behind its share first, until `is_over` says so; at least `least` batches."""
    generator = torch.Generator(shapes[0].bucket.clip.device).manual_seed(seed)
    made: dict[Key, list[tuple[torch.Tensor, torch.Tensor, list[State]]]] = {}
    counts = {shape.key: 0 for shape in shapes}
    done = 0
    while done < least or not is_over():
        total = 1 + sum(counts.values())
        shape = max(shapes, key=lambda s: (s.share * total - counts[s.key]) / s.share)
        batch = _batch(shape, how, generator)
        made.setdefault(shape.key, []).append(batch)
        counts[shape.key] += len(batch[0])
        done += 1
    return list(_parts(shapes, made, held))


def _batch(shape: Shape, how: Teaching, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, list[State]]:
    size = max(1, how.row_budget // shape.rows.length)
    index = torch.randint(len(shape.bucket.clip), (size,), generator=generator, device=generator.device)
    condition = conditions_of(shape.cache, shape.bucket, index, shape.num_frames, generator)
    text = shape.bucket.text[index]
    velocity = velocity_of(how.call, shape.rows, text.float(), condition)
    noise = noise_of(shape.rows, size, generator)
    return text, condition, trajectory(velocity, noise, how.forwards, how.shifts, how.keep)


def _parts(shapes: list[Shape], made: dict[Key, list[tuple[torch.Tensor, torch.Tensor, list[State]]]], held: int) -> Iterator[Part]:
    """One part a shape; the first one of every kind and length keeps `held` trajectories back, half of its own at most."""
    seen: set[tuple[str, int, Canvas]] = set()
    for shape in shapes:
        if shape.key not in made:
            continue
        batches = made.pop(shape.key)
        states = tuple(torch.stack([torch.cat([b[2][k][m] for b in batches]) for k in range(len(batches[0][2]))]) for m in range(2))
        kind = (shape.bucket.kind, shape.num_frames, shape.bucket.canvas)
        kept = 0 if kind in seen else min(held, states[0].shape[1] // 2)
        seen.add(kind)
        text, condition = (torch.cat([b[i] for b in batches]) for i in range(2))  # type: ignore[misc]
        yield Part(shape.key, shape.rows, text, condition, states, kept)
