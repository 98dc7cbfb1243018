"""`eval.cache_loss.loss_parts` of many pairs on the device: the same definitions, a hundred times faster than one CPU thread."""

import torch

from eval.cache_loss import WORST_FRAMES
from eval.metrics.pair import LUMA
from eval.metrics.sound import SILENCE_DB, log_power

_FRAMES = 124  # at a time


def parts_of(
    frames: torch.Tensor, sound: torch.Tensor, reference_frames: torch.Tensor, reference_sound: torch.Tensor
) -> list[dict[str, float]]:
    """Each pair's loss parts; frames (B, F, H, W, 3) uint8, sound (B, channels, samples), float32 without TF32 throughout."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # its convolutions would spoil SSIM's variances
    try:
        video = [_worst(1 - _ssim(new, old)) for new, old in zip(frames, reference_frames)]
    finally:
        torch.backends.cudnn.allow_tf32 = before
    motion = [_worst(_motion_error(new, old)) for new, old in zip(frames, reference_frames)]
    spectrum = [(log_power(new) - log_power(old)).square().mean(dim=1).sqrt().mean() for new, old in zip(sound, reference_sound)]
    level = (_level(sound) - _level(reference_sound)).abs()
    table = {"video": torch.stack(video), "motion": torch.stack(motion), "spectrum": torch.stack(spectrum), "level": level}
    columns = {name: column.tolist() for name, column in table.items()}
    return [{name: column[k] for name, column in columns.items()} for k in range(len(frames))]


def _worst(per_frame: torch.Tensor) -> torch.Tensor:
    return torch.quantile(per_frame.double(), WORST_FRAMES / 100)


def _ssim(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Of each frame of (F, H, W, 3) clips."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    values = []
    for begin in range(0, len(new), _FRAMES):
        pair = (clip[begin : begin + _FRAMES].permute(0, 3, 1, 2).float() for clip in (new, old))
        values.append(structural_similarity_index_measure(*pair, data_range=255.0, reduction="none").reshape(-1))
    return torch.cat(values)


def _motion_error(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor(LUMA, device=new.device)
    moved = ((new.float() - old.float()) * weights).sum(-1).diff(dim=0)
    return moved.square().mean(dim=(1, 2)).sqrt() if len(moved) else moved.new_zeros(1)


def _level(sound: torch.Tensor) -> torch.Tensor:
    """RMS in dB of each of (B, channels, samples); silence has one level."""
    rms = sound.double().square().mean(dim=(1, 2)).sqrt()
    return (20 * rms.log10()).clamp(min=SILENCE_DB)
