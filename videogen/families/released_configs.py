"""Writes the config-only folder of the released MiniMax-H3 sizes, for `random:h3`: diffusers' own defaults, no weights.

The text encoder is Qwen3-VL-32B cut to the 51 layers that the pipeline reads, with its head tied: what is left out never
influences a clip. Its tokenizer is pocket's, since no vocabulary can be fetched here; only its speed matters.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
from transformers import Qwen3VLConfig

TEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 51,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
}
VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 5120,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0
_PIXELS = {"shortest_edge": 65_536, "longest_edge": 16_777_216}


def write_released_configs(folder: Path, pocket: Path) -> None:
    """Write index and configs into `folder`; tokenizer and processor are taken from `pocket`, at the released picture size."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        MiniMaxH3Transformer3DModel().save_config(folder / "transformer")
        AutoencoderKLMiniMaxH3().save_config(folder / "vae")
        audio = AutoencoderKLMiniMaxH3Audio(latents_mean=[0.0] * 32, latents_std=[1.0] * 32)
        audio.save_config(folder / "audio_vae")
    MiniMaxH3Scheduler(shift=VIDEO_SHIFT).save_config(folder / "scheduler")
    MiniMaxH3Scheduler(shift=AUDIO_SHIFT).save_config(folder / "audio_scheduler")
    for part in ("tokenizer", "processor"):
        shutil.copytree(pocket / part, folder / part, dirs_exist_ok=True)
    processor = json.loads((folder / "processor" / "processor_config.json").read_text())
    processor["image_processor"]["size"] = _PIXELS
    (folder / "processor" / "processor_config.json").write_text(json.dumps(processor, indent=1) + "\n")
    small = json.loads((pocket / "text_encoder" / "config.json").read_text())
    ids = {key: small[key] for key in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")}
    config = Qwen3VLConfig(tie_word_embeddings=True, text_config=TEXT | {"tie_word_embeddings": True}, vision_config=VISION, **ids)
    config.save_pretrained(folder / "text_encoder")
    index = json.loads((pocket / "modular_model_index.json").read_text())
    kept = {k: v for k, v in index.items() if k not in ("canvas_short_edge", "canvas_max_pixels", "reference_image_short_edge")}
    (folder / "modular_model_index.json").write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    """`python -m videogen.families.released_configs FOLDER POCKET`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pocket", type=Path)
    args = parser.parse_args()
    write_released_configs(args.folder, args.pocket)


if __name__ == "__main__":
    main()
