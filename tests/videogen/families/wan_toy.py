"""Wan's real classes at toy size with random weights, saved as the folders that diffusers publishes; seeds are fixed."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from videogen.source import POCKET_FOLDER

HEADS, HEAD_DIM, LAYERS, TEXT = 2, 12, 4, 32
IMAGE_DIM = 16


KINDS = ("one", "two", "i2v", "clip", "5b")


def transformer(seed: int, channels: tuple[int, int] = (16, 16), **more: Any) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    model = WanTransformer3DModel(
        num_attention_heads=more.pop("num_attention_heads", HEADS),
        attention_head_dim=HEAD_DIM,
        in_channels=channels[0],
        out_channels=channels[1],
        text_dim=TEXT,
        freq_dim=32,
        ffn_dim=48,
        num_layers=LAYERS,
        rope_max_seq_len=128,
        **more,
    )
    return model.eval()


def _vae(is_5b: bool) -> AutoencoderKLWan:
    torch.manual_seed(3)
    if not is_5b:
        return AutoencoderKLWan(base_dim=8, num_res_blocks=1).eval()
    return AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=16,
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    ).eval()


def _text() -> tuple[Any, UMT5EncoderModel]:
    tokenizer = AutoTokenizer.from_pretrained(POCKET_FOLDER / "tokenizer")
    torch.manual_seed(4)
    sizes = {"d_model": TEXT, "d_kv": 8, "d_ff": 48, "num_heads": 2, "num_layers": 2}
    config = UMT5Config(vocab_size=len(tokenizer), **sizes)
    return tokenizer, UMT5EncoderModel(config).eval()


def save(folder: Path, kind: str, **more: Any) -> Path:
    """Save one folder of `KINDS`: `one` (2.1 text to video), `two` (2.2, two experts), `i2v` (2.2), `clip` (2.1, image encoder), `5b`.

    `more` are settings of the transformers.
    """
    with torch.random.fork_rng():
        _pipeline(kind, more).save_pretrained(folder)
    return folder


def _pipeline(kind: str, own: dict[str, Any]) -> Any:
    tokenizer, text_encoder = _text()
    parts: dict[str, Any] = {"tokenizer": tokenizer, "text_encoder": text_encoder, "vae": _vae(kind == "5b")}
    parts["scheduler"] = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    if kind in ("one", "two", "5b"):
        parts["transformer"] = transformer(0, **own)
        parts["transformer_2"] = transformer(1, **own) if kind == "two" else None
        settings = {"boundary_ratio": 0.875 if kind == "two" else None, "expand_timesteps": kind == "5b"}
        return WanPipeline(**parts, **settings)
    more: dict[str, Any] = {}
    if kind == "clip":
        torch.manual_seed(5)
        sizes = {"hidden_size": IMAGE_DIM, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
        parts["image_encoder"] = CLIPVisionModel(CLIPVisionConfig(image_size=28, patch_size=14, **sizes)).eval()
        parts["image_processor"] = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
        more = {"image_dim": IMAGE_DIM, "added_kv_proj_dim": HEADS * HEAD_DIM}
    parts["transformer"] = transformer(0, (36, 16), **more)
    parts["transformer_2"] = transformer(1, (36, 16)) if kind == "i2v" else None
    return WanImageToVideoPipeline(**parts, boundary_ratio=0.9 if kind == "i2v" else None)
