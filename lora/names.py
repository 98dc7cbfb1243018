"""The naming rules: what each producer calls the model's modules. Derived from the model's own names; reads no file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lora.target import Target

_RENAMES = (  # diffusers' module path -> the original checkpoint's, whole or as a part
    (re.compile(r"^transformer_blocks\."), "blocks."),
    (re.compile(r"^token_refiner\.refiner_blocks\."), "token_refiner.blocks."),
    (re.compile(r"\.attn\.to_out\.0$"), ".attn.out_proj"),
    (re.compile(r"\.attn\.norm_([qk])$"), r".attn.\1_norm"),
    (re.compile(r"\.ff\.net\.0\.proj$"), ".mlp.fc1"),
    (re.compile(r"\.ff\.net\.2$"), ".mlp.fc2"),
    (re.compile(r"^proj_in$"), "video_patch_proj"),
    (re.compile(r"^audio_proj_in$"), "audio_patch_proj"),
    (re.compile(r"^context_embedder$"), "condition_proj"),
    (re.compile(r"^time_embedder\.linear_1$"), "time_embedder.proj_in"),
    (re.compile(r"^time_embedder\.linear_2$"), "time_embedder.proj_out"),
    (re.compile(r"^norm_out\.linear$"), "final_layer.adaln_proj.linear"),
    (re.compile(r"^norm_out\.norm$"), "final_layer.norm"),
    (re.compile(r"^proj_out$"), "final_layer.video_out"),
    (re.compile(r"^audio_proj_out$"), "final_layer.audio_out"),
)
_WAN_RENAMES = (  # the same for Wan
    (re.compile(r"\.attn1\b"), ".self_attn"),
    (re.compile(r"\.attn2\b"), ".cross_attn"),
    (re.compile(r"_attn\.to_([qkv])$"), r"_attn.\1"),
    (re.compile(r"_attn\.to_out\.0$"), "_attn.o"),
    (re.compile(r"_attn\.add_([kv])_proj$"), r"_attn.\1_img"),
    (re.compile(r"_attn\.norm_added_k$"), "_attn.norm_k_img"),
    (re.compile(r"\.ffn\.net\.0\.proj$"), ".ffn.0"),
    (re.compile(r"\.ffn\.net\.2$"), ".ffn.2"),
    (re.compile(r"^(blocks\.\d+)\.norm2$"), r"\1.norm3"),
    (re.compile(r"^condition_embedder\.time_embedder\.linear_1$"), "time_embedding.0"),
    (re.compile(r"^condition_embedder\.time_embedder\.linear_2$"), "time_embedding.2"),
    (re.compile(r"^condition_embedder\.time_proj$"), "time_projection.1"),
    (re.compile(r"^condition_embedder\.text_embedder\.linear_1$"), "text_embedding.0"),
    (re.compile(r"^condition_embedder\.text_embedder\.linear_2$"), "text_embedding.2"),
    (re.compile(r"^condition_embedder\.image_embedder\.norm1$"), "img_emb.proj.0"),
    (re.compile(r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj$"), "img_emb.proj.1"),
    (re.compile(r"^condition_embedder\.image_embedder\.ff\.net\.2$"), "img_emb.proj.3"),
    (re.compile(r"^condition_embedder\.image_embedder\.norm2$"), "img_emb.proj.4"),
    (re.compile(r"^proj_out$"), "head.head"),
    (re.compile(r"^scale_shift_table$"), "head.modulation"),
    (re.compile(r"\.scale_shift_table$"), ".modulation"),
)
_SPLIT = re.compile(r"\.to_[qkv]$")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a matrix goes: one module, or q, k and v of one attention. `gate_first` is set for SwiGLU, by its name's habit."""

    modules: tuple[str, ...]
    gate_first: bool | None = None

    @property
    def is_qkv(self) -> bool:
        """Whether it is fused over q, k and v."""
        return len(self.modules) == 3


def is_swiglu(module: str, target: Target) -> bool:
    """Whether a module holds both halves of a SwiGLU: diffusers' name, and twice the width of what follows."""
    if not module.endswith(".ff.net.0.proj"):
        return False
    after = target.shapes.get(f"{module.removesuffix('0.proj')}2.weight")
    return after is not None and target.rows(module) == 2 * after[1]


def is_wan(target: Target) -> bool:
    """Whether a model is a Wan transformer, by its own names."""
    return any(name.startswith("condition_embedder.time_embedder.") for name in target.shapes)


def is_table(name: str) -> bool:
    """Whether a parameter is a table of modulation, which is neither a weight nor a bias of a module."""
    return name.rpartition(".")[2] == "scale_shift_table"


def parameter_name(module: str, leaf: str) -> str:
    """The parameter of a place: its weight or bias, or the place itself where it is a table."""
    return module if is_table(module) and leaf == "weight" else f"{module}.{leaf}"


def original_name(module: str, *, of_wan: bool = False) -> str:
    """A module's name in the original checkpoint, q, k and v still apart."""
    for pattern, replacement in _WAN_RENAMES if of_wan else _RENAMES:
        module = pattern.sub(replacement, module)
    return module


def rules_for(target: Target) -> dict[str, dict[str, Place]]:
    """Rule -> (name of a module, prefixes taken off -> its place)."""
    modules = sorted({name.rpartition(".")[0] for name in target.shapes})
    if is_wan(target):  # q, k and v are apart in every layout, and nothing is a SwiGLU; tables of modulation are places of their own
        plain = {module: Place((module,)) for module in (*modules, *(name for name in target.shapes if is_table(name)))}
        dotted = {"diffusers names": plain, "original names": {original_name(m, of_wan=True): place for m, place in plain.items()}}
        return dotted | {f"flat {name}": _flat(rule) for name, rule in dotted.items()}
    swiglu = {module: is_swiglu(module, target) for module in modules}
    diffusers = {module: Place((module,), False if swiglu[module] else None) for module in modules}
    apart = {original_name(module): Place((module,), True if swiglu[module] else None) for module in modules}
    apart |= {name.replace(".attn.out_proj", ".attn.to_out.0"): place for name, place in apart.items()}
    original = {name: place for name, place in apart.items() if not _SPLIT.search(name)} | _fused(modules)
    dotted = {"diffusers names": diffusers, "original names": original, "original names with split q/k/v": apart}
    return dotted | {f"flat {name}": _flat(rule) for name, rule in dotted.items()}


def _fused(modules: list[str]) -> dict[str, Place]:
    owners = [module.removesuffix(".to_q") for module in modules if module.endswith(".to_q")]
    places = {owner: tuple(f"{owner}.to_{letter}" for letter in "qkv") for owner in owners}
    whole = {owner: names for owner, names in places.items() if set(names) <= set(modules)}
    return {f"{original_name(owner)}.qkv_proj": Place(names) for owner, names in whole.items()}


def _flat(rule: Mapping[str, Place]) -> dict[str, Place]:
    return {name.replace(".", "_"): place for name, place in rule.items()}
