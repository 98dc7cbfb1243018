"""Writes a complete pocket-h3 folder: real component classes, seeded untrained weights; the training stages replace the weights."""

import argparse
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from transformers import (
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from videogen.pocket import sizes
from videogen.pocket.tokenizer import save_tokenizer

log = logging.getLogger(__name__)

SHARD = "14MB"
MIN_FRAMES = 22  # shorter than the released 5 s, so that a quick look takes seconds; trained at 39 and 124
_DIFFUSERS = {
    "transformer": "MiniMaxH3Transformer3DModel",
    "transformer_ref": "MiniMaxH3Transformer3DModel",
    "vae": "AutoencoderKLMiniMaxH3",
    "audio_vae": "AutoencoderKLMiniMaxH3Audio",
    "scheduler": "MiniMaxH3Scheduler",
    "audio_scheduler": "MiniMaxH3Scheduler",
}
_TRANSFORMERS = {
    "text_encoder": "Qwen3VLForConditionalGeneration",
    "tokenizer": "Qwen2TokenizerFast",
    "processor": "Qwen3VLProcessor",
}


def build_folder(folder: Path, *, seed: int = 0) -> None:
    """Write every component with untrained weights drawn from `seed`, the index and the card."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        write_text(folder)
        save_model(MiniMaxH3Transformer3DModel(**sizes.TRANSFORMER), folder / "transformer")
        save_model(new_video_vae(), folder / "vae")
        save_model(AutoencoderKLMiniMaxH3Audio(**sizes.AUDIO_VAE), folder / "audio_vae")
    MiniMaxH3Scheduler(shift=sizes.VIDEO_SHIFT).save_pretrained(folder / "scheduler")
    MiniMaxH3Scheduler(shift=sizes.AUDIO_SHIFT).save_pretrained(folder / "audio_scheduler")
    write_index(folder)
    write_card(folder, {"trained": False, "note": f"untrained weights from seed {seed}: output is noise"})


def write_text(folder: Path) -> None:
    """Write the tokenizer, the processor and an untrained text encoder."""
    tokenizer = save_tokenizer(folder / "tokenizer")
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, merge_size=2, temporal_patch_size=2, **sizes.IMAGE_PIXELS),
        tokenizer=tokenizer,
        video_processor=_video_processor(),
    )
    processor.save_pretrained(folder / "processor")
    save_model(new_text_encoder(tokenizer), folder / "text_encoder")


def new_text_encoder(tokenizer: Any) -> Any:
    """Live layers around 48 exact identities (see `sizes`); token embeddings of unit scale keep words apart."""
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end", "image_pad", "video_pad")}
    config = Qwen3VLConfig(
        tie_word_embeddings=True,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        text_config=dict(sizes.TEXT, tie_word_embeddings=True, eos_token_id=0, pad_token_id=0, bos_token_id=None),
        vision_config=sizes.VISION,
    )
    model = Qwen3VLForConditionalGeneration(config)
    language = model.model.language_model
    with torch.no_grad():
        torch.nn.init.normal_(language.embed_tokens.weight, std=1.0)
        language.norm.weight.fill_(0.125)  # tied head: keeps first logits near unit scale
        model.model.visual.merger.linear_fc2.weight.mul_(15)  # picture tokens on the scale of words
        for layer in language.layers[sizes.TEXT_FEATURE_LAYERS : 50]:
            for weight in (*layer.self_attn.parameters(), *layer.mlp.parameters()):
                if weight.ndim == 2:
                    weight.zero_()
    return model


def new_video_vae() -> Any:
    """The video VAE with its decoder blocks awake (they start switched off in the library)."""
    vae = AutoencoderKLMiniMaxH3(**sizes.VIDEO_VAE)
    with torch.no_grad():
        for block in vae.decoder.transformer_blocks:
            block.scale1.fill_(0.2)
            block.scale2.fill_(0.2)
    return vae


def save_model(model: Any, folder: Path) -> None:
    """Save in bf16, in shards under 15 MB; the model itself is left in bf16."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True, max_shard_size=SHARD)


def write_index(folder: Path) -> None:
    """Write `modular_model_index.json` in the published shape; one transformer folder serves both partitions."""
    index: dict[str, Any] = {
        "_class_name": "MiniMaxH3ModularPipeline",
        "_blocks_class_name": "MiniMaxH3Blocks",
        "_diffusers_version": "0.42.1",
        **sizes.CANVAS,
    }
    for library, parts in (("diffusers", _DIFFUSERS), ("transformers", _TRANSFORMERS)):
        for name, cls in parts.items():
            index[name] = [
                library,
                cls,
                {
                    "type_hint": [library, cls],
                    "pretrained_model_name_or_path": None,
                    "subfolder": "transformer" if name == "transformer_ref" else name,
                    "variant": None,
                    "revision": None,
                },
            ]
    (folder / "modular_model_index.json").write_text(json.dumps(index, indent=1) + "\n")


def write_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write `card.json`: what the weights are, and the sha256 of every other file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "card.json")
    digest = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    card = {"name": "pocket-h3", "licence": "Apache-2.0", "min_frames": MIN_FRAMES, **facts, "digest": digest}
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")


def _video_processor() -> Any:
    processor = Qwen3VLVideoProcessor(patch_size=16, merge_size=2, temporal_patch_size=2)
    processor.size = dict(sizes.VIDEO_PIXELS)
    return processor


def main() -> None:
    """`python -m videogen.pocket.build FOLDER`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build_folder(args.folder, seed=args.seed)
    size = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file())
    log.info("%s: %.1f MB, untrained", args.folder, size / 1e6)


if __name__ == "__main__":
    main()
