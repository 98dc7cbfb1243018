"""Reads clips of the core world from pixels and samples alone, every attribute with a confidence; never sees a prompt or a layout."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from videogen.pocket import world
from videogen.pocket.captions import MOTIONS, SHAPES, SILENT, Scene

VISIBLE = ("count", "size", "colour", "shape", "motion", "background")
AUDIBLE = ("pitch", "pan")
ATTRIBUTES = (*VISIBLE, *AUDIBLE)
_SAMPLED = 7  # frames looked at closely
_FAINT = 0.2  # colour distance from the background that counts as something
_SILENCE_RMS = 0.02


@dataclass(frozen=True)
class Reading:
    """What was read of a batch: per attribute an index into `captions`' tuples and a confidence in [0, 1], each (B,)."""

    value: Mapping[str, torch.Tensor]
    confidence: Mapping[str, torch.Tensor]


def read_video(frames: torch.Tensor, fps: float = world.FPS) -> Reading:
    """Read (B, T, H, W, 3) frames in [0, 1]; all visible attributes."""
    ground, ground_sure = _background(frames)
    colour, colour_sure, alpha = _ink(frames, world.GROUNDS.to(frames)[ground])
    motion, motion_sure = _motion(alpha, fps)
    picks = torch.linspace(0, frames.shape[1] - 1, _SAMPLED, device=frames.device).round().long()
    labels = _components(alpha[:, picks] > 0.5)
    count, count_sure = _count(labels)
    shape, shape_sure, radius = _shape(alpha[:, picks], labels)
    table = world.RADII.to(frames)[count].log()  # (B, 2)
    nearness = (radius.clamp(min=1e-3).log()[:, None] - table).abs()
    size = nearness.argmin(dim=1)
    gap = (table[:, 1] - table[:, 0]) / 2
    sure = 1 - (nearness.amin(dim=1) / gap).clamp(max=1)
    return Reading(
        {"count": count, "size": size, "colour": colour, "shape": shape, "motion": motion, "background": ground},
        {
            "count": count_sure,
            "size": sure,
            "colour": colour_sure,
            "shape": shape_sure,
            "motion": motion_sure,
            "background": ground_sure,
        },
    )


def read_audio(samples: torch.Tensor, rate_hz: int) -> Reading:
    """Read stereo (B, 2, N) samples; pitch by the strongest line, side by the balance of the channels."""
    rms = samples.pow(2).mean(dim=-1).sqrt()  # (B, 2)
    loud = rms.amax(dim=1)
    window = torch.hann_window(samples.shape[-1], device=samples.device)
    power = torch.fft.rfft(samples * window).abs().pow(2).sum(dim=1)
    hz = torch.fft.rfftfreq(samples.shape[-1], 1 / rate_hz).to(samples.device)
    power = power * (hz > 100)
    notes = torch.tensor(world.PITCH_HZ, device=samples.device)
    peak = hz[power.argmax(dim=1)].clamp(min=1)
    octaves = (peak[:, None] / notes).log2().abs()
    near = (hz[None] / notes[:, None]).log2().abs() < 0.25  # (3, F)
    share = (power[:, None] * near).sum(-1).amax(dim=1) / power.sum(-1).clamp(min=1e-9)
    silent = loud < _SILENCE_RMS
    pitch = torch.where(silent, SILENT, octaves.argmin(dim=1))
    balance = ((rms[:, 1] + 1e-4) / (rms[:, 0] + 1e-4)).log()
    edge = math.log(world.GAINS[2][1] / world.GAINS[2][0]) / 2
    pan = torch.where(balance < -edge, 0, torch.where(balance > edge, 2, 1))
    pan = torch.where(silent, world.centre_pan(), pan)
    sure = ((balance.abs() - edge).abs() / edge).clamp(max=1)
    return Reading({"pitch": pitch, "pan": pan}, {"pitch": torch.where(silent, 1.0, share), "pan": torch.where(silent, 1.0, sure)})


def agrees(reading: Reading, scenes: list[Scene]) -> dict[str, torch.Tensor]:
    """Per attribute read, whether it is what the scene says; (B,) booleans."""
    out = {}
    for name, value in reading.value.items():
        wanted = torch.tensor([getattr(scene, name) for scene in scenes], device=value.device)
        out[name] = value == wanted
    return out


def badge_match(frames: torch.Tensor, layout: world.Layout) -> torch.Tensor:
    """The share of a badge's nine cells that show the right colour, read in `_SAMPLED` frames of (B, T, H, W, 3); (B,)."""
    height, width = frames.shape[2:4]
    picks = torch.linspace(0, frames.shape[1] - 1, _SAMPLED, device=frames.device).round().long()
    frames = frames[:, picks]
    alpha = (_difference(frames, world.GROUNDS.to(frames)[_background(frames)[0]]) > _FAINT).float()
    mass = alpha.sum(dim=(2, 3)).clamp(min=1)
    grid_y, grid_x = _grid(height, width, frames.device)
    x = (alpha * grid_x).sum(dim=(2, 3)) / mass
    y = (alpha * grid_y).sum(dim=(2, 3)) / mass
    half = mass.sqrt() / height / 2  # of the square tile, in heights
    step = torch.tensor([-2 / 3, 0.0, 2 / 3], device=frames.device)
    spread = torch.linspace(-0.15, 0.15, 5, device=frames.device)
    offsets = (step[:, None] + spread).flatten()  # 15 places along each side, five a cell
    px = x[..., None, None] + half[..., None, None] * offsets[None, None, None, :]
    py = y[..., None, None] + half[..., None, None] * offsets[None, None, :, None]
    points = torch.stack([(px + 0 * py) * height / width * 2 - 1, (py + 0 * px) * 2 - 1], dim=-1).flatten(0, 1)
    seen = F.grid_sample(frames.flatten(0, 1).permute(0, 3, 1, 2), points, align_corners=False)
    seen = seen.reshape(*alpha.shape[:2], 3, 3, 5, 3, 5).mean(dim=(1, 4, 6))  # (B, 3, 3, 3)
    palette = world.PALETTE.to(frames)
    nearest = (seen.permute(0, 2, 3, 1)[..., None, :] - palette).norm(dim=-1).argmin(dim=-1)
    bits = layout.bits.to(frames)[..., None]
    wanted = layout.colour.to(frames)[:, 0, None, None] * (1 - bits) + layout.colour.to(frames)[:, 1, None, None] * bits
    expected = (wanted[..., None, :] - palette).norm(dim=-1).argmin(dim=-1)
    right: torch.Tensor = nearest == expected
    return right.float().mean(dim=(1, 2))


def psnr(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio of [0, 1] pictures over all axes but the first, in dB; 60 at most."""
    error = (a - b).pow(2).flatten(1).mean(dim=1)
    return -10 * error.clamp(min=1e-6).log10()


def _grid(height: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    y = (torch.arange(height, device=device) + 0.5) / height
    x = (torch.arange(width, device=device) + 0.5) / height
    return y[:, None], x[None]


def _difference(frames: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
    distance: torch.Tensor = (frames - colour[:, None, None, None]).norm(dim=-1)
    return distance


def _background(frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    some = frames[:, :: max(1, frames.shape[1] // _SAMPLED)]
    border = torch.cat([some[:, :, 0], some[:, :, -1], some[:, :, :, 0], some[:, :, :, -1]], dim=2)
    seen = border.flatten(1, 2).median(dim=1).values  # (B, 3)
    return _nearest(seen, world.GROUNDS.to(frames))


def _nearest(seen: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    two = (seen[:, None] - table).norm(dim=-1).topk(2, largest=False)
    return two.indices[:, 0], 1 - two.values[:, 0] / two.values[:, 1].clamp(min=1e-6)


def _ink(frames: torch.Tensor, ground: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The palette colour of what stands out, its confidence, and coverage (B, T, H, W) measured along that colour."""
    far = _difference(frames, ground)
    core = (far > _FAINT) & (far > 0.8 * far.flatten(2).amax(dim=2)[:, :, None, None])
    weight = core.float()[..., None]
    seen = (frames * weight).sum(dim=(1, 2, 3)) / weight.sum(dim=(1, 2, 3)).clamp(min=1)
    colour, sure = _nearest(seen, world.PALETTE.to(frames))
    axis = world.PALETTE.to(frames)[colour] - ground
    along = ((frames - ground[:, None, None, None]) * axis[:, None, None, None]).sum(-1) / axis.pow(2).sum(-1)[:, None, None, None]
    return colour, sure, along.clamp(0, 1)


def _motion(alpha: torch.Tensor, fps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The direction of the centroid's straight-line drift, measured against the world's nominal speeds."""
    grid_y, grid_x = _grid(alpha.shape[2], alpha.shape[3], alpha.device)
    solid = alpha * (alpha > 0.3)
    mass = solid.sum(dim=(2, 3)).clamp(min=1)
    track = torch.stack([(solid * grid_x).sum(dim=(2, 3)) / mass, (solid * grid_y).sum(dim=(2, 3)) / mass], dim=-1)
    t = torch.arange(alpha.shape[1], device=alpha.device) / fps
    t = t - t.mean()
    speed = (track * t[None, :, None]).sum(dim=1) / t.pow(2).sum() * world.CLIP_S  # heights in a whole clip
    nominal = torch.tensor([world.TRAVEL["right"][0], world.TRAVEL["down"][1]], device=alpha.device)
    unit = speed / nominal
    axis = unit.abs().argmax(dim=1)
    main = unit.gather(1, axis[:, None])[:, 0]
    names = torch.tensor(
        [[MOTIONS.index("left"), MOTIONS.index("right")], [MOTIONS.index("up"), MOTIONS.index("down")]], device=alpha.device
    )
    moving = names[axis, (main > 0).long()]
    still = main.abs() < 0.45
    return torch.where(still, MOTIONS.index("still"), moving), ((main.abs() - 0.45).abs() / 0.45).clamp(max=1)


def _components(mask: torch.Tensor) -> torch.Tensor:
    """Connected regions (8 neighbours) of (B, K, H, W): each pixel holds its region's largest index + 1, 0 outside."""
    height, width = mask.shape[2:]
    flat = mask.flatten(0, 1)[:, None].float()
    label = (torch.arange(height * width, device=mask.device).view(1, 1, height, width) + 1).float() * flat
    for _ in range(height + width):
        grown = F.max_pool2d(label, 3, stride=1, padding=1) * flat
        if torch.equal(grown, label):
            break
        label = grown
    return label.view(mask.shape).long()


def _regions(labels: torch.Tensor) -> torch.Tensor:
    """Pixel masks of the three largest regions of each frame; (B, K, 3, H, W), empty ones all False."""
    size = labels.shape[2] * labels.shape[3]
    areas = torch.zeros(*labels.shape[:2], size + 1, device=labels.device)
    areas.scatter_add_(2, labels.flatten(2), torch.ones_like(labels.flatten(2), dtype=areas.dtype))
    areas[..., 0] = 0
    top = areas.topk(3, dim=2)
    masks = labels[:, :, None] == top.indices[..., None, None]
    keep = (top.values > 0.3 * top.values[..., :1]) & (top.values >= 12)
    return masks & keep[..., None, None]


def _count(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seen = _regions(labels).flatten(3).any(dim=3).sum(dim=2).clamp(1, 3)  # (B, K)
    votes = F.one_hot(seen - 1, 3).sum(dim=1)
    return votes.argmax(dim=1), votes.amax(dim=1) / seen.shape[1]


def _shape(alpha: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Best template by overlap, each drawn at the radius its area asks for; shape, confidence and radius in heights."""
    height, width = alpha.shape[2:]
    regions = _regions(labels)
    near = F.max_pool2d(regions.flatten(0, 2).float()[:, None], 5, stride=1, padding=2).view(regions.shape)
    soft = alpha[:, :, None] * near  # (B, K, 3, H, W), the soft rim included
    area = soft.sum(dim=(3, 4)) / height**2
    grid_y, grid_x = _grid(height, width, alpha.device)
    mass = soft.sum(dim=(3, 4)).clamp(min=1e-3)
    x = ((soft * grid_x).sum(dim=(3, 4)) / mass)[..., None, None]
    y = ((soft * grid_y).sum(dim=(3, 4)) / mass)[..., None, None]
    found = regions.flatten(3).any(dim=3).float()  # (B, K, 3)
    overlaps, radii = [], []
    for index in range(len(SHAPES)):
        radius = (area / world.AREAS[index].to(area)).sqrt().clamp(min=1e-3)
        dx = ((grid_x - x) / radius[..., None, None]).flatten(0, 2)[:, None]
        dy = ((grid_y - y) / radius[..., None, None]).flatten(0, 2)[:, None]
        kind = torch.full((len(dx),), index, device=alpha.device)
        far = world.shape_distance(kind, dx, dy)[:, 0].view(soft.shape)
        template = (0.5 - far * radius[..., None, None] * height).clamp(0, 1)
        iou = torch.minimum(template, soft).sum((3, 4)) / torch.maximum(template, soft).sum((3, 4)).clamp(min=1e-3)
        overlaps.append((iou * found).sum((1, 2)) / found.sum((1, 2)).clamp(min=1))
        radii.append((radius * found).sum((1, 2)) / found.sum((1, 2)).clamp(min=1))
    score = torch.stack(overlaps, dim=1)  # (B, shapes)
    best = score.topk(2, dim=1)
    radius = torch.stack(radii, dim=1).gather(1, best.indices[:, :1])[:, 0]
    return best.indices[:, 0], ((best.values[:, 0] - best.values[:, 1]) * 4).clamp(0, 1), radius
