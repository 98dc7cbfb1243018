"""Writes the config-only folder of Wan2.2-T2V-A14B's sizes, for `random:wan22-t2v`: two experts, UMT5-XXL's encoder, no weights.

The tokenizer is pocket's, since no vocabulary can be fetched here; only its speed matters, every prompt being padded to 512 rows.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from transformers import UMT5Config

TEXT: dict[str, Any] = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_heads": 64,
    "num_layers": 24,
    "feed_forward_proj": "gated-gelu",
}
BOUNDARY, SHIFT = 0.875, 3.0
_PARTS = {
    "scheduler": ("diffusers", "UniPCMultistepScheduler"),
    "text_encoder": ("transformers", "UMT5EncoderModel"),
    "tokenizer": ("transformers", "AutoTokenizer"),
    "transformer": ("diffusers", "WanTransformer3DModel"),
    "transformer_2": ("diffusers", "WanTransformer3DModel"),
    "vae": ("diffusers", "AutoencoderKLWan"),
}


def write_released_configs(folder: Path, pocket: Path) -> None:
    """Write index and configs into `folder`; the tokenizer is taken from `pocket`. Sizes are diffusers' defaults, which are A14B's."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        for part in ("transformer", "transformer_2"):
            WanTransformer3DModel().save_config(folder / part)
        AutoencoderKLWan().save_config(folder / "vae")
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
    scheduler.save_config(folder / "scheduler")
    UMT5Config(**TEXT).save_pretrained(folder / "text_encoder")
    shutil.copytree(pocket / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    index: dict[str, Any] = {"_class_name": "WanPipeline", "_diffusers_version": diffusers.__version__, "boundary_ratio": BOUNDARY}
    (folder / "model_index.json").write_text(json.dumps(index | _PARTS, indent=1) + "\n")


def main() -> None:
    """`python -m videogen.families.wan_configs FOLDER POCKET`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pocket", type=Path)
    args = parser.parse_args()
    write_released_configs(args.folder, args.pocket)


if __name__ == "__main__":
    main()
