"""Component configs of pocket-h3 as plain data; the classes they belong to are diffusers' and transformers' own."""

from typing import Any

AUDIO_RATE_HZ = 8000
AUDIO_HOP = 200  # 40 latents a second, as the real model
LATENT_CHANNELS = 24
AUDIO_CHANNELS = 16
TEXT_DIM = 64
# The pipeline reads hidden_states[50]. A trained language model's last features are about the next word (swapping a colour moved them by
# 19 % only), its second layer's about this word in its place (135 %): so two live layers, 48 exact identities, then the other six.
TEXT_FEATURE_LAYERS = 2
TEXT_HEAD_LAYERS = 6
TEXT_LAYERS = 50 + TEXT_HEAD_LAYERS
VOCABULARY = 512
# The released shifts. Where an object is and what it is gets decided at t = .003 to .02 (two clips lie about 600 apart in latent units): at
# shift 4 the first of 49 steps already reaches .005.
VIDEO_SHIFT = 12.0
AUDIO_SHIFT = 3.0

TRANSFORMER: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "num_layers": 10,
    "num_refiner_layers": 1,
    "ffn_dim": 576,
    "time_embed_hidden_dim": 256,
    "time_embed_dim": 32,
    "freq_dim": 256,
    "rope_freq_dim": 8,
    "rope_theta": 200.0,  # rows lie 4.1 apart and latent frames 6.7: 10,000 leaves two of eight frequencies that tell neighbours apart
    "patch_size": (1, 2, 2),
    "text_dim": TEXT_DIM,
    "in_channels": LATENT_CHANNELS,
    "audio_in_channels": AUDIO_CHANNELS,
}

VIDEO_VAE: dict[str, Any] = {
    "latent_channels": LATENT_CHANNELS,
    "block_out_channels": (8, 32, 64, 96),
    "layers_per_block": 1,
    "spatial_downsample_factors": (2, 2, 2, 1),  # 8-px patches: outlines are learnt several times sooner than with 16
    "temporal_downsample_factors": (1, 2, 2, 1),
    "norm_num_groups": 8,
    "decoder_num_layers": 3,
    "decoder_num_attention_heads": 5,
    "decoder_attention_head_dim": 64,
    "decoder_num_register_tokens": 4,
    "decoder_ffn_mult": 2,
    "latents_mean": (0.0,) * LATENT_CHANNELS,
    "latents_std": (1.0,) * LATENT_CHANNELS,
}

AUDIO_VAE: dict[str, Any] = {
    "encoder_dim": 8,
    "encoder_rates": (2, 4, 5, 5),
    "latent_dim": 64,
    "latent_channels": AUDIO_CHANNELS,
    "num_attention_heads": 2,
    "decoder_dim": 64,
    "decoder_rates": (5, 5, 4, 2),
    "decoder_kernel_sizes": (9, 9, 8, 4),
    "resblock_kernel_sizes": (3,),
    "resblock_dilation_sizes": ((1, 3),),
    "sampling_rate": AUDIO_RATE_HZ,
    "latents_mean": [0.0] * AUDIO_CHANNELS,
    "latents_std": [1.0] * AUDIO_CHANNELS,
}

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": TEXT_DIM,
    "intermediate_size": 96,
    "num_hidden_layers": TEXT_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],  # sums to head_dim / 2
        "mrope_interleaved": True,
    },
}

VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": TEXT_DIM,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}

# 64x64 at most: a few vision tokens a picture; what a picture shows reaches the transformer mainly through its VAE rows
IMAGE_PIXELS = {"min_pixels": 32**2, "max_pixels": 64**2}
VIDEO_PIXELS = {"shortest_edge": 32**2, "longest_edge": 64 * 32**2}

CANVAS = {"canvas_short_edge": 96, "canvas_max_pixels": 96 * 160, "reference_image_short_edge": 96}
HEIGHT, WIDTH = 96, 160
SMALL, LARGE = (HEIGHT, WIDTH), (144, 256)  # the canvases trained, height and width
CANVASES = {"small": SMALL, "large": LARGE}
