"""Learned metrics, each an adapter to a package and weights that a user may have: looks for them and never downloads any.

`*_lacks()` says why a metric cannot run here, or is empty. Weights are looked for where their own libraries keep them.
"""

import importlib.util
import json
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache

from eval.metrics.pair import Clip, NotMeasurable, Pair
from videogen.media import Encoding, write_clip

CLIP_MODEL = "openai/clip-vit-base-patch32"
_ALEXNET = Path("checkpoints") / "alexnet-owt-7be5be79.pth"
_VBENCH_DIMENSION = "motion_smoothness"
_VBENCH_WEIGHTS = ("amt_model/amt-s.pth", "amt_model/AMT-S.yaml")
_VBENCH_LIMIT_S = 1800.0
_FRAMES = 16


def _picks(clip: Clip) -> Any:
    """Up to 16 frames of a clip, evenly spaced."""
    return clip.frames[np.unique(np.linspace(0, len(clip.frames) - 1, _FRAMES).round().astype(int))]


def lpips_lacks() -> str:
    """Why LPIPS cannot run here."""
    for package in ("torchmetrics", "torchvision"):
        if importlib.util.find_spec(package) is None:
            return f"package {package} is not installed"
    is_there = (Path(torch.hub.get_dir()) / _ALEXNET).is_file()
    return "" if is_there else f"weights not found: {_ALEXNET} in torch.hub's folder (233 MB, never downloaded from here)"


def lpips(pair: Pair) -> float:
    """Zhang et al. 2018 with AlexNet, mean over up to 16 frames."""
    from torchmetrics.functional.image.lpips import learned_perceptual_image_patch_similarity

    if lacks := lpips_lacks():
        raise NotMeasurable(lacks)
    both = (torch.from_numpy(_picks(clip)).permute(0, 3, 1, 2).float() / 255 for clip in (pair.new, pair.reference))
    return float(learned_perceptual_image_patch_similarity(*both, net_type="alex", normalize=True))


def clip_lacks() -> str:
    """Why CLIP cannot run here."""
    for name in ("config.json", "preprocessor_config.json", "tokenizer_config.json"):
        if not isinstance(try_to_load_from_cache(CLIP_MODEL, name), str):
            return f"weights not found: {CLIP_MODEL} in the hub's cache (605 MB, never downloaded from here)"
    return ""


@lru_cache(maxsize=1)  # 605 MB: read once for all pairs
def _clip_model(name: str) -> tuple[Any, Any]:
    from transformers import CLIPModel, CLIPProcessor

    try:
        return CLIPModel.from_pretrained(name, local_files_only=True).eval(), CLIPProcessor.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise NotMeasurable(f"{name} does not load: {str(error).strip().splitlines()[0][:200]}") from error


def _embeddings(clip: Clip, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors of up to 16 frames, (F, D), and of the prompt's first 77 tokens, (1, D)."""
    model, processor = _clip_model(CLIP_MODEL)
    with torch.no_grad():
        found = model(**processor(text=[prompt], images=list(_picks(clip)), return_tensors="pt", padding=True, truncation=True))
    return found.image_embeds, found.text_embeds


def clip_similarity(pair: Pair) -> float:
    """Cosine between CLIP's embeddings (Radford et al. 2021) of frames at one time in both clips, mean over up to 16."""
    new, reference = (_embeddings(clip, "a video")[0] for clip in (pair.new, pair.reference))
    return float((new * reference).sum(dim=1).mean())


def clip_score(pair: Pair) -> float:
    """Change of CLIPScore (Hessel et al. 2021: 100 times the cosine of frame and prompt), new minus reference."""
    if not pair.prompt:
        raise NotMeasurable("the prompt is not known")
    new, reference = (float((frames @ text.T).clamp(min=0).mean()) for frames, text in (_embeddings(c, pair.prompt) for c in _arms(pair)))
    return 100 * (new - reference)


def _arms(pair: Pair) -> tuple[Clip, Clip]:
    return pair.new, pair.reference


def vbench_lacks() -> str:
    """Why VBench cannot run here. It pins old packages, so it is a command of an environment of its own."""
    if shutil.which("vbench") is None:
        return "command vbench is not on the PATH (install VBench in an environment of its own)"
    folder = Path.home() / ".cache" / "vbench"
    missing = [name for name in _VBENCH_WEIGHTS if not (folder / name).is_file()]
    return f"weights not found: {missing[0]} in {folder} (never downloaded from here)" if missing else ""


def vbench(pair: Pair) -> float:
    """Change of VBench's motion smoothness (Huang et al. 2023) in points of 100, new minus reference, from H.264 at CRF 0.

    Tried with a stand-in for the command only: VBench itself was never run here.
    """
    if lacks := vbench_lacks():
        raise NotMeasurable(lacks)
    with tempfile.TemporaryDirectory(prefix="videogen-vbench-") as name:
        folder = Path(name)
        (folder / "clips").mkdir()
        for arm, clip in zip(("new", "reference"), _arms(pair)):
            path = folder / "clips" / f"{arm}.mp4"
            write_clip(path, clip.frames, None, fps=clip.fps, sampling_rate=clip.sampling_rate, encoding=Encoding(crf=0), comment="")
        options = ("--dimension", _VBENCH_DIMENSION, "--mode", "custom_input", "--load_ckpt_from_local", "True")
        alone = ("env", "-u", "VBENCH_CACHE_DIR", "HF_HUB_OFFLINE=1")  # it fetches what it does not find, so it looks where we looked
        command = [*alone, "vbench", "evaluate", "--videos_path", str(folder / "clips"), "--output_path", str(folder / "out"), *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_VBENCH_LIMIT_S, cwd=folder, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotMeasurable(f"vbench did not run: {type(error).__name__}") from error
        scores = _vbench_scores(folder / "out")
        if scores.keys() != {"new", "reference"}:
            last = (done.stderr or done.stdout).strip().splitlines()
            raise NotMeasurable(f"vbench gave no score for both clips: {last[-1][:200] if last else 'no message'}")
        return 100 * (scores["new"] - scores["reference"])


def _vbench_scores(folder: Path) -> dict[str, float]:
    """Scores by arm from the results file, which lists one entry per clip after the mean."""
    for path in folder.glob("*_eval_results.json"):
        try:
            _, rows = json.loads(path.read_text(encoding="utf-8"))[_VBENCH_DIMENSION]
            return {Path(row["video_path"]).stem: float(row["video_results"]) for row in rows}
        except (ValueError, KeyError, TypeError):
            return {}
    return {}
