"""The core world in pixels and samples: seeded layouts, a batched renderer, stereo tones; knows nothing of models or captions' wording."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from videogen.pocket.captions import BACKGROUNDS, COLOURS, MOTIONS, PANS, SHAPES, SILENT, Scene
from videogen.pocket.shapes import distinct

FPS = 24
FRAMES = 124
AUDIO_LATENTS_PER_S = 40
PALETTE = torch.tensor(
    [
        [0.90, 0.12, 0.12],  # red
        [0.10, 0.75, 0.20],  # green
        [0.15, 0.35, 1.00],  # blue
        [0.98, 0.90, 0.10],  # yellow
        [0.62, 0.15, 0.85],  # purple
        [1.00, 0.52, 0.05],  # orange
        [0.10, 0.85, 0.92],  # cyan
        [0.98, 0.98, 0.98],  # white
    ]
)
GROUNDS = torch.tensor([[0.02, 0.02, 0.02], [0.42, 0.42, 0.44], [0.06, 0.07, 0.26], [0.34, 0.19, 0.09]])
assert len(PALETTE) == len(COLOURS) and len(GROUNDS) == len(BACKGROUNDS)
# radius in canvas heights by count and size: the same word means a smaller thing in a larger group
RADII = torch.tensor([[0.20, 0.30], [0.15, 0.21], [0.12, 0.165]])
TRAVEL = {"still": (0.0, 0.0), "right": (0.5, 0.0), "left": (-0.5, 0.0), "up": (0.0, -0.3), "down": (0.0, 0.3)}  # heights in a clip
CLIP_S = FRAMES / FPS
PITCH_HZ = (240.0, 480.0, 960.0)  # whole cycles in each 1/40 s latent
GAINS = ((1.0, 0.12), (0.7, 0.7), (0.12, 1.0))
BADGE_CELLS = 3
# shape proportions in radii
SQUARE, TRIANGLE, ARM, HOLE = 0.86, 1.15, 0.36, 0.48
AREAS = torch.tensor(  # of each shape at radius 1, in the order of SHAPES
    [
        math.pi,
        4 * SQUARE**2,
        3 * math.sqrt(3) / 4 * TRIANGLE**2,
        8 * ARM - 4 * ARM**2,
        math.pi * (1 - HOLE**2),
    ]
)
_CANDIDATES = 96
_BADGE_RADIUS = 0.36  # of a reference picture's height


@dataclass(frozen=True)
class Layout:
    """A batch of clips in numbers (first axis B); lengths in canvas heights, times in seconds."""

    shape: torch.Tensor  # (B,) index
    present: torch.Tensor  # (B, 3) 0 or 1
    radius: torch.Tensor  # (B,)
    start: torch.Tensor  # (B, 3, 2) x, y at time 0
    velocity: torch.Tensor  # (B, 2) heights per second
    colour: torch.Tensor  # (B, 2, 3) rgb; the second is used by badges only
    ground: torch.Tensor  # (B, 3) rgb
    bits: torch.Tensor  # (B, 3, 3) 1 where a badge shows its second colour; all 0 for plain objects
    hz: torch.Tensor  # (B,)
    gain: torch.Tensor  # (B, 2) left, right; 0 when silent
    phase: torch.Tensor  # (B,)

    def to(self, device: torch.device | str) -> "Layout":
        """The same layout on a device."""
        return Layout(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def __getitem__(self, index: slice | torch.Tensor) -> "Layout":
        return Layout(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def replaced(self, **values: torch.Tensor) -> "Layout":
        """The same layout with some fields exchanged."""
        return Layout(**{f.name: values.get(f.name, getattr(self, f.name)) for f in fields(self)})

    def __len__(self) -> int:
        return len(self.shape)


def plan(scenes: Sequence[Scene], seeds: Sequence[int], *, badge: bool = False, aspect: float = 5 / 3) -> Layout:
    """Place the objects of each scene: every clip from its own seed, always on the CPU, so that any device shows the same clip.

    With `badge` the object is a tile carrying a random two-colour pattern that no caption describes.
    """
    draws = torch.stack([torch.rand(_CANDIDATES * 6 + 24, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    spots, rest = draws[:, :-24].reshape(-1, _CANDIDATES, 3, 2), draws[:, -24:]
    count = torch.tensor([s.count for s in scenes])
    motion = torch.tensor([TRAVEL[MOTIONS[s.motion]] for s in scenes])
    radius = RADII[count, torch.tensor([s.size for s in scenes])] * (0.96 + 0.08 * rest[:, 0])
    travel = motion * (0.85 + 0.3 * rest[:, 1:2])
    present = (torch.arange(3)[None] <= count[:, None]).float()
    pitch = torch.tensor([s.pitch for s in scenes])
    amplitude = (0.35 + 0.15 * rest[:, 2]) * (pitch != SILENT)
    first = torch.tensor([s.colour for s in scenes])
    second, bits = _badges(first, rest) if badge else (first, torch.zeros(len(scenes), 3, 3))
    return Layout(
        shape=torch.tensor([s.shape for s in scenes]),
        present=present,
        radius=radius,
        start=_place(spots, present, radius, travel, aspect),
        velocity=travel / CLIP_S,
        colour=torch.stack([PALETTE[first], PALETTE[second]], dim=1),
        ground=GROUNDS[torch.tensor([s.background for s in scenes])],
        bits=bits,
        hz=torch.tensor([*PITCH_HZ, 0.0])[pitch],
        gain=torch.tensor(GAINS)[torch.tensor([s.pan for s in scenes])] * amplitude[:, None],
        phase=rest[:, 3] * 2 * math.pi,
    )


def _badges(first: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    second = (first + 1 + (rest[:, 4] * (len(PALETTE) - 1)).long()) % len(PALETTE)
    order = rest[:, 6:15].argsort(dim=1).argsort(dim=1)  # a random ranking of the nine cells
    ones = 3 + (rest[:, 5:6] * 4).long()  # three to six of them in the second colour
    return second, (order < ones).float().reshape(-1, BADGE_CELLS, BADGE_CELLS)


def _place(spots: torch.Tensor, present: torch.Tensor, radius: torch.Tensor, travel: torch.Tensor, aspect: float) -> torch.Tensor:
    """The first candidate whose objects stay apart, inside the canvas for the whole clip; (B, 3, 2)."""
    reach = (1.17 * radius)[:, None]
    low = reach - travel.clamp(max=0)
    high = torch.tensor([aspect, 1.0]) - reach - travel.clamp(min=0)
    spots = low[:, None, None] + spots * (high - low).clamp(min=0)[:, None, None]
    gaps = torch.stack([(spots[:, :, i] - spots[:, :, j]).norm(dim=-1) for i, j in ((0, 1), (0, 2), (1, 2))], dim=-1)
    used = torch.stack([present[:, i] * present[:, j] for i, j in ((0, 1), (0, 2), (1, 2))], dim=-1)
    slack = (gaps - 2.4 * radius[:, None, None] + 10 * (1 - used[:, None])).amin(dim=-1)  # (B, K)
    best = torch.where((slack > 0).any(dim=1), (slack > 0).float().argmax(dim=1), slack.argmax(dim=1))
    return spots[torch.arange(len(spots)), best]


def picture_of(layout: Layout, seeds: Sequence[int]) -> Layout:
    """The reference pictures of badge clips: the same tile, centred, larger, at rest, on another background."""
    shift = torch.tensor([1 + seed % (len(GROUNDS) - 1) for seed in seeds])
    own = (layout.ground[:, None] - GROUNDS[None]).abs().sum(-1).argmin(dim=1)
    return layout.replaced(
        ground=GROUNDS[(own + shift) % len(GROUNDS)],
        radius=torch.full_like(layout.radius, _BADGE_RADIUS),
        start=torch.full_like(layout.start, 0.5),
        velocity=torch.zeros_like(layout.velocity),
    )


def render(layout: Layout, times: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw each clip at `times` (T,) seconds; frames (B, T, H, W, 3) in [0, 1] and coverage (B, T, H, W)."""
    device = layout.radius.device
    y = (torch.arange(height, device=device) + 0.5) / height
    x = (torch.arange(width, device=device) + 0.5) / height
    times = times.to(device)
    cover = torch.zeros(len(layout), len(times), height, width, device=device)
    ink = layout.colour[:, 0, None, None, None].expand(-1, 1, 1, 1, -1)
    radius = layout.radius[:, None, None, None]
    for index in range(int(layout.present.sum(dim=1).max())):
        centre = layout.start[:, index, None] + layout.velocity[:, None] * times[None, :, None]  # (B, T, 2)
        dx = (x - centre[..., 0, None])[:, :, None, :] / radius  # (B, T, 1, W)
        dy = (y - centre[..., 1, None])[:, :, :, None] / radius  # (B, T, H, 1)
        distance = shape_distance(layout.shape, dx, dy) * radius * height  # pixels
        alpha = (0.5 - distance).clamp(0, 1) * layout.present[:, index, None, None, None]
        cover = torch.maximum(cover, alpha)
        if index == 0 and bool((layout.bits != 0).any()):
            other = _pattern(layout.bits, dx, dy, radius * height)[..., None]
            ink = ink * (1 - other) + layout.colour[:, 1, None, None, None] * other
    cover5 = cover[..., None]
    return layout.ground[:, None, None, None] * (1 - cover5) + ink * cover5, cover


def shape_distance(shape: torch.Tensor, dx: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Signed distance in radii to each clip's shape, negative inside; (B, T, H, W)."""
    out = torch.zeros_like(dx + dy)
    for index in distinct(shape):  # batches sorted by shape pay for one
        value = _distance_to(index, dx, dy)
        out = torch.where((shape == index)[:, None, None, None], value, out)
    return out


def _distance_to(index: int, dx: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    ax, ay = dx.abs(), dy.abs()
    name = SHAPES[index]
    if name == "circle":
        return (dx**2 + dy**2).sqrt() - 1
    if name == "square":
        return torch.maximum(ax, ay) - SQUARE
    if name == "triangle":
        return torch.maximum(ax * (math.sqrt(3) / 2) - dy * 0.5, dy) - TRIANGLE / 2
    if name == "cross":
        return torch.minimum(torch.maximum(ax - 1, ay - ARM), torch.maximum(ax - ARM, ay - 1))
    return ((dx**2 + dy**2).sqrt() - (1 + HOLE) / 2).abs() - (1 - HOLE) / 2


def _pattern(bits: torch.Tensor, dx: torch.Tensor, dy: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """How much of the second colour each pixel of the badge shows, edges one pixel soft; (B, T, H, W)."""
    cell = 2 * SQUARE / BADGE_CELLS
    out = torch.zeros_like(dx + dy)
    edges = [-SQUARE + cell * k for k in range(BADGE_CELLS + 1)]
    edges[0], edges[-1] = -9.0, 9.0

    def band(d: torch.Tensor, k: int) -> torch.Tensor:
        return ((d - edges[k]) * scale + 0.5).clamp(0, 1) - ((d - edges[k + 1]) * scale + 0.5).clamp(0, 1)

    for row in range(BADGE_CELLS):
        for column in range(BADGE_CELLS):
            out = out + band(dy, row) * band(dx, column) * bits[:, row, column, None, None, None]
    return out


def frame_times(num_frames: int = FRAMES) -> torch.Tensor:
    """The instants of the first frames of a clip, in seconds."""
    return torch.arange(num_frames) / FPS


def sound(layout: Layout, num_latents: int, rate_hz: int) -> torch.Tensor:
    """Stereo samples (B, 2, N) of a clip that lasts `num_latents` fortieths of a second."""
    device = layout.radius.device
    n = num_latents * rate_hz // AUDIO_LATENTS_PER_S
    t = torch.arange(n, device=device) / rate_hz
    angle = 2 * math.pi * layout.hz[:, None] * t + layout.phase[:, None]
    tone = (torch.sin(angle) + 0.25 * torch.sin(2 * angle)) * 0.85
    fade = (torch.minimum(t, t[-1] - t) / 0.02).clamp(0, 1)
    return tone[:, None] * fade * layout.gain[:, :, None]


def centre_pan() -> int:
    """The index of the middle of the stereo field."""
    return PANS.index("centre")
