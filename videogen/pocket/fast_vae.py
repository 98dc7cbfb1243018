"""The video VAE's encoder written with 2-D convolutions over stacked time taps: same weights, same numbers, several times faster."""

from typing import Any

import torch
import torch.nn.functional as F

from videogen.pocket.shapes import unflatten

PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)


def to_vae(frames: torch.Tensor) -> torch.Tensor:
    """[0, 1] pictures with colours last to the VAE's normalised space."""
    return (frames - _channels(PIXEL_MEAN, frames)) / _channels(PIXEL_STD, frames)


def from_vae(x: torch.Tensor) -> torch.Tensor:
    """VAE space, colours last, back to [0, 1] pictures."""
    return (x * _channels(PIXEL_STD, x) + _channels(PIXEL_MEAN, x)).clamp(0, 1)


def _channels(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    """A small constant made by fills: a copy from the host is not allowed while a CUDA graph is captured."""
    return torch.stack([torch.full((), value, device=like.device, dtype=like.dtype) for value in values])


def encode_chunk(vae: Any, x: torch.Tensor) -> torch.Tensor:
    """Moments (B, T', 2C, h, w) of frames (B, T, 3, H, W) encoded as one causal chunk; equals the stock encoder on it."""
    encoder = vae.encoder
    x = _conv(encoder.conv_in, x)
    for block in encoder.down_blocks:
        for resnet in block.resnets:
            x = _resnet(resnet, x)
        for down in block.downsamplers or ():
            if down.spatial_stride == 2:
                x = _pad(x, (0, 1, 0, 1), down.spatial_padding_mode)
            x = _conv(down.conv, x)
    x = _conv(encoder.conv_out, F.silu(_norm(encoder.norm_out, x)))
    flat: torch.Tensor = F.conv2d(x.flatten(0, 1), vae.quant_conv.weight[:, :, 0], vae.quant_conv.bias)
    return unflatten(flat, 0, x.shape[:2])


def encode_window(vae: Any, x: torch.Tensor, *, autocast: torch.dtype | None = None) -> torch.Tensor:
    """Moments of 17n + 5 frames (B, T, 3, H, W), chunk by chunk without the padded frames the stock encoder later drops."""
    clip = vae.config.clip_length
    with torch.autocast(x.device.type, autocast or torch.bfloat16, enabled=autocast is not None, cache_enabled=False):
        whole = x.shape[1] // clip
        parts = []
        if whole:
            body = unflatten(x[:, : whole * clip], 1, (whole, clip)).flatten(0, 1)
            parts.append(unflatten(encode_chunk(vae, body), 0, (x.shape[0], whole)).flatten(1, 2))
        if x.shape[1] % clip:
            parts.append(encode_chunk(vae, x[:, whole * clip :]))
    return torch.cat(parts, dim=1)


def _pad(x: torch.Tensor, sides: tuple[int, int, int, int], mode: str) -> torch.Tensor:
    return unflatten(F.pad(x.flatten(0, 1), sides, mode=mode), 0, x.shape[:2])


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return unflatten(F.group_norm(x.flatten(0, 1), norm.num_groups, norm.weight, norm.bias, norm.eps), 0, x.shape[:2])


def _resnet(block: Any, x: torch.Tensor) -> torch.Tensor:
    y = _conv(block.conv1, F.silu(_norm(block.norm1, x)))
    y = _conv(block.conv2, F.silu(_norm(block.norm2, y)))
    return (x if block.conv_shortcut is None else _conv(block.conv_shortcut, x)) + y


def _conv(conv: Any, x: torch.Tensor) -> torch.Tensor:
    """A causal 3-D convolution of (B, T, C, H, W) as one 2-D convolution whose input channels are the time taps."""
    taps, step = conv.kernel_size[0], conv.stride[0]
    if conv.spatial_padding:
        x = _pad(x, (conv.spatial_padding,) * 4, conv.spatial_padding_mode)
    if taps == 1 or x.shape[1] == 1:  # one frame meets only the last tap: the others see the zeros before the clip
        weight, stacked = conv.weight[:, :, -1], x
    else:
        before = x.new_zeros(x.shape[0], taps - 1, *x.shape[2:])
        padded = torch.cat([before, x], dim=1)
        last = padded.shape[1] - taps + 1
        stacked = torch.cat([padded[:, tap : tap + last : step] for tap in range(taps)], dim=2)
        weight = conv.weight.transpose(1, 2).flatten(1, 2)
    out = F.conv2d(stacked.flatten(0, 1), weight, conv.bias, stride=conv.stride[1:])
    return unflatten(out, 0, stacked.shape[:2])
