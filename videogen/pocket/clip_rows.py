"""A clip's rows and what they decode to: lengths of the latents of a canvas and number of frames."""

import torch

from videogen.pocket import packed, sizes
from videogen.pocket.cache import REFERENCE, Bucket, Canvas, Models
from videogen.pocket.fast_vae import from_vae
from videogen.pocket.shapes import parts, unflatten


def latent_frames(num_frames: int) -> int:
    """Latent frames of 17n + 5 frames."""
    return (num_frames - 5) // 17 * 5 + 2


def audio_latents(num_frames: int) -> int:
    """Audio latents a channel of a clip."""
    return round(num_frames / 24 * 40)


def latent_size(num_frames: int, canvas: Canvas) -> tuple[int, int, int]:
    """Latent frames, height and width of a clip."""
    return latent_frames(num_frames), canvas[0] // 8, canvas[1] // 8


def rows_of(bucket: Bucket, num_frames: int) -> packed.Rows:
    """The layout of a bucket's requests at a clip length, on the bucket's device."""
    size = latent_size(num_frames, bucket.canvas)
    built = packed.layout(bucket.tags, bucket.kind, size, audio_latents(num_frames), (REFERENCE // 8, REFERENCE // 8))
    return built.to(bucket.clip.device)


@torch.no_grad()
def decode(
    models: Models, audio: torch.Tensor, video: torch.Tensor, num_frames: int, canvas: Canvas = sizes.SMALL
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed rows to pictures (B, T, H, W, 3) in [0, 1] and stereo samples (B, 2, N) through the stock decoders."""
    z = packed.unpatchify(video, latent_size(num_frames, canvas))
    z = z * models.std[:, None, None, None] + models.mean[:, None, None, None]
    frames = []
    for part in parts(z, 16):
        frames.append(from_vae(models.vae.decode(part).sample.permute(0, 2, 3, 4, 1)))
    mean, std = models.audio_scale
    heard = unflatten(audio, 1, (2, -1)).flatten(0, 1) * std + mean
    samples = torch.cat([models.audio.decode(part.transpose(1, 2)).sample[:, 0] for part in parts(heard, 64)])
    return torch.cat(frames), unflatten(samples, 0, (-1, 2))
