"""Full-reference picture metrics on the frames as rendered: torchmetrics, and libvmaf and XPSNR inside the bundled ffmpeg."""

import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from eval.metrics.pair import Pair
from videogen.errors import EnvironmentFault, say
from videogen.ffmpeg import EXACT_SCALE, run_ffmpeg

_CHUNK = 8  # frames at a time: 8 of 1344x768 are 100 MB in float32
_SLOWEST_PIXELS_PER_S = 200_000.0  # VMAF on two busy cores
MS_SSIM_MIN_SIDE = 161  # five scales, the coarsest as wide as the 11-pixel window: (side - 1) / 16 >= 10
VMAF_MIN_SIDE = 32  # libvmaf crashes below


def _chunks(pair: Pair) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(new, reference) as (B, 3, H, W) float32 in grey levels, on the CPU: a GPU's TF32 convolutions would spoil SSIM's variances."""
    for begin in range(0, pair.num_frames, _CHUNK):
        both = (clip.frames[begin : begin + _CHUNK] for clip in (pair.new, pair.reference))
        new, reference = (torch.from_numpy(np.ascontiguousarray(part)).permute(0, 3, 1, 2).float() for part in both)
        yield new, reference


def psnr(pair: Pair) -> float:
    """From the squared error pooled over the whole clip, so that one identical frame does not make it infinite."""
    from torchmetrics.image import PeakSignalNoiseRatio

    metric = PeakSignalNoiseRatio(data_range=255.0)
    for new, reference in _chunks(pair):
        metric.update(new, reference)
    return float(metric.compute())


def psnr_curve(pair: Pair) -> list[float]:
    """PSNR of each frame in dB; infinite where the frames are equal."""
    out = []
    for new, reference in zip(pair.new.frames, pair.reference.frames):
        error = float(np.mean((new.astype(np.float32) - reference) ** 2, dtype=np.float64))
        out.append(10 * math.log10(255**2 / error) if error else math.inf)
    return out


def ssim_curve(pair: Pair) -> list[float]:
    """SSIM of each frame: Wang et al. 2004, Gaussian window of 11, mean over channels.

    In float32, so that bright flat areas cost up to 2e-4; float64 has no fast convolution and takes 15 times as long.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    values = [structural_similarity_index_measure(n, r, data_range=255.0, reduction="none") for n, r in _chunks(pair)]
    return [float(value) for value in torch.cat([value.reshape(-1) for value in values])]


def ssim(pair: Pair) -> float:
    """The mean of `ssim_curve`."""
    return math.fsum(ssim_curve(pair)) / pair.num_frames


def ms_ssim(pair: Pair) -> float:
    """Wang et al. 2003, five scales with their default weights."""
    from torchmetrics.functional.image import multiscale_structural_similarity_index_measure

    values = [
        multiscale_structural_similarity_index_measure(n, r, data_range=255.0, reduction="none", normalize="relu") for n, r in _chunks(pair)
    ]
    return float(torch.cat([value.reshape(-1) for value in values]).mean())


def vmaf(pair: Pair) -> float:
    """Netflix VMAF v0.6.1 on 4:2:0 luma, mean over frames; trained on television distances, so read differences, not levels."""
    log, _ = _filtered(pair, "libvmaf=model=version=vmaf_v0.6.1:log_fmt=json:log_path=vmaf.json")
    return float(json.loads(log)["pooled_metrics"]["vmaf"]["mean"])


def xpsnr(pair: Pair) -> float:
    """Luma XPSNR (Helmrich et al. 2020): PSNR weighted by what is visible."""
    _, text = _filtered(pair, "xpsnr")
    found = re.search(r"XPSNR\s+y:\s*(\S+)", text)
    if not found:
        raise EnvironmentFault(say("ffmpeg's xpsnr", "no result", "a line with 'XPSNR  y:'", "reinstall imageio-ffmpeg"))
    return float(found.group(1))


def _filtered(pair: Pair, measure: str) -> tuple[str, str]:
    """Run a two-input filter over both clips as raw RGB; the log file vmaf.json (if it wrote one) and ffmpeg's text."""
    height, width = pair.sides
    form = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-video_size", f"{width}x{height}", "-framerate", "24")
    to_yuv = f"{EXACT_SCALE}:out_color_matrix=bt709:out_range=tv,format=yuv420p"
    graph = f"[0:v]{to_yuv}[new];[1:v]{to_yuv}[reference];[new][reference]{measure}"
    with tempfile.TemporaryDirectory(prefix="videogen-eval-") as name:
        folder = Path(name)
        for clip, file in ((pair.new, "new.rgb"), (pair.reference, "reference.rgb")):
            np.ascontiguousarray(clip.frames).tofile(folder / file)
        limit_s = 120.0 + pair.num_frames * height * width / _SLOWEST_PIXELS_PER_S
        inputs = (*form, "-i", "new.rgb", *form, "-i", "reference.rgb")
        _, text = run_ffmpeg(*inputs, "-lavfi", graph, "-f", "null", "-", limit_s=limit_s, cwd=folder)
        log = folder / "vmaf.json"
        return log.read_text(encoding="utf-8") if log.is_file() else "", text
