"""Text models with random weights, by family: tiny for tests, released sizes (cut where said) for timing; speed needs no training."""

from typing import Any

import torch
import transformers

from videogen.errors import EnvironmentFault, bad, say

SEED = 0
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "num_position_embeddings": 16}
_SMALL = {"hidden_size": 16, "intermediate_size": 16}
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_PLAIN = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 4096}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
_MLA = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 8}
_INDEX = {"index_topk": 24, "index_head_dim": 8, "index_n_heads": 16}  # fewer index heads tie exactly, and ties move with the length

# family: (configuration class, model class, tiny values of its text config, values beside the text config or None for a plain one)
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any] | None]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _PLAIN | _HEADS | _ENDS, None),
    "qwen3_vl": (
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        _PLAIN | _HEADS | _ENDS | {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}},
        {"vision_config": _VISION | {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}},
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        _PLAIN | _ENDS | _EXPERTS | _INDEX | {"num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8}
        | {"sliding_window": 16, "hc_mult": 2, "hc_sinkhorn_iters": 4, "num_hidden_layers": 4}
        | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}}
        | {"layer_types": ["sliding_attention", *2 * ["compressed_sparse_attention"], "heavily_compressed_attention"]},
        None,
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        _PLAIN | _ENDS | _EXPERTS | _INDEX | _MLA | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "first_k_dense_replace": 1},
        None,
    ),
    "glm5_next": (
        "Glm5NextConfig",
        "Glm5NextForConditionalGeneration",
        _PLAIN | _ENDS | _EXPERTS | _INDEX | _MLA
        | {"qk_nope_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2, "hc_sinkhorn_iters": 4, "index_kpool": 4}
        | {"num_hidden_layers": 4},
        {"vision_config": {"depth": 1, "num_heads": 2, "image_size": 28, "out_hidden_size": 32} | _SMALL},
    ),
    "minimax_m3_vl": (
        "MiniMaxM3VLConfig",
        "MiniMaxM3SparseForConditionalGeneration",
        _PLAIN | _HEADS | _ENDS | {"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 48, "rotary_dim": 4}
        | {"shared_intermediate_size": 16, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 16, "index_topk_blocks": 3}
        | {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
        {
            "vision_config": {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28} | _SMALL,
            "projector_hidden_size": 32,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _PLAIN | _HEADS | _ENDS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 4}
        | {"shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        None,
    ),
}  # fmt: skip

# name: (family, released values); a cut says how many of the released layers it keeps
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-bench": ("qwen3", {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 16384}),
    "qwen3-4b": ("qwen3", {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144}),
    "qwen3-vl-32b": ("qwen3_vl", {"vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
        "rope_parameters": _ROPE | {"rope_theta": 5e6}}),
    "deepseek-v4-cut": ("deepseek_v4", {"num_hidden_layers": 6, "max_position_embeddings": 262144}),
    "glm-dsa-cut": ("glm_moe_dsa", {"num_hidden_layers": 6, "max_position_embeddings": 202752}),
}  # fmt: skip


def random_model(name: str, device: torch.device, dtype: torch.dtype, **changes: Any) -> Any:
    """A model of a family (tiny) or of a size, seeded, made on the device in its own dtype; `changes` are values of its text config.

    Raises RequestError for a name that is neither, EnvironmentFault where the installed transformers lacks the family.
    """
    family, values = SIZES.get(name, (name, None))
    if family not in FAMILIES:
        raise bad("random text model", name, f"one of {', '.join([*FAMILIES, *SIZES])}", "change the name")
    config_name, model_name, tiny, beside = FAMILIES[family]
    config_class: Any = getattr(transformers, config_name, None)
    model_class: Any = getattr(transformers, model_name, None)
    if config_class is None or model_class is None:
        raise EnvironmentFault(
            say(f"text model {name}", f"transformers {transformers.__version__}", f"one with {model_name}", "install a newer one")
        )
    text = (tiny if values is None else _ENDS | values) | changes
    config = config_class(**text) if beside is None else config_class(text_config=text, **beside)
    config._attn_implementation = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(SEED)
        torch.set_default_dtype(dtype)
        try:
            return _settled(model_class(config), config)
        finally:
            torch.set_default_dtype(before)


def _settled(model: Any, config: Any) -> Any:
    """Ends that no random answer meets by its own configuration stay with the caller; sampling is never the default."""
    model.generation_config.do_sample = False
    model.generation_config.pad_token_id = config.get_text_config().pad_token_id
    return model.eval()


def parameters(model: Any) -> int:
    """How many parameters take part in a text forward: without a vision tower."""
    return sum(p.numel() for name, p in model.named_parameters() if ".visual." not in name and "vision" not in name)
