"""A tiny real transformer, known factors for its layers, and every producer's way of writing them, spelled out by hand."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import save_file

from lora.adapter import Adapter
from lora.target import Target, target_of

LAYERS, HEADS, HEAD_DIM = 3, 4, 16
Truth = dict[str, tuple[torch.Tensor, torch.Tensor]]  # module -> (down, up)
Tensors = dict[str, torch.Tensor]

BLOCK = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
BLOCKS = (*(f"transformer_blocks.{i}" for i in range(LAYERS)), "token_refiner.refiner_blocks.0")
ALONE = {  # diffusers -> original
    "proj_in": "video_patch_proj",
    "audio_proj_in": "audio_patch_proj",
    "context_embedder": "condition_proj",
    "time_embedder.linear_1": "time_embedder.proj_in",
    "time_embedder.linear_2": "time_embedder.proj_out",
    "norm_out.linear": "final_layer.adaln_proj.linear",
    "proj_out": "final_layer.video_out",
    "audio_proj_out": "final_layer.audio_out",
}


def make_model(dtype: torch.dtype = torch.float32) -> MiniMaxH3Transformer3DModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MiniMaxH3Transformer3DModel(
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_DIM,
            hidden_size=64,
            num_layers=LAYERS,
            num_refiner_layers=1,
            ffn_dim=96,
            in_channels=4,
            audio_in_channels=8,
            text_dim=24,
            freq_dim=32,
            time_embed_hidden_dim=40,
            time_embed_dim=20,
            rope_freq_dim=2,
        )
    kept = set(model._keep_in_fp32_modules)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if kept & set(name.split(".")) else dtype)
    return model.eval()


TARGET: Target = target_of(make_model())
MODULES = (
    *(f"{block}.{leaf}" for block in BLOCKS for leaf in BLOCK),
    *(f"transformer_blocks.{i}.adaln_proj.linear" for i in range(LAYERS)),
    *ALONE,
)


def make_truth(
    modules: tuple[str, ...] = MODULES,
    *,
    rank: int = 4,
    adaln_rank: int = 2,
    is_shared: bool = True,
    is_spread: bool = False,
    seed: int = 1,
) -> Truth:
    """Factors of 0.1 on average. `is_shared`: q, k and v have one `down`; `is_spread`: their `up` differ in size."""
    rng = torch.Generator().manual_seed(seed)
    truth: Truth = {}
    for module in modules:
        rows, columns = TARGET.shapes[f"{module}.weight"]
        r = adaln_rank if "adaln" in module else rank
        down, up = torch.randn(r, columns, generator=rng) * 0.1, torch.randn(rows, r, generator=rng) * 0.1
        if is_shared and module.endswith((".to_k", ".to_v")):
            down = truth[f"{module.rpartition('.')[0]}.to_q"][0]
        if is_spread and module.endswith((".to_q", ".to_v")):
            up = up * (0.2 if module.endswith("q") else 5.0)
        truth[module] = (down, up)
    return truth


def diffusers(truth: Truth, prefix: str = "transformer.", infix: str = "", halves: tuple[str, str] = ("lora_A", "lora_B")) -> Tensors:
    tensors = {}
    for module, pair in truth.items():
        for half, tensor in zip(halves, pair):
            tensors[f"{prefix}{module}.{half}{infix}.weight"] = tensor
    return tensors


def original_truth(truth: Truth, *, order: str = "stacked", is_fused: bool = True) -> Truth:
    """The same by the original checkpoint's names and row orders."""
    found: Truth = {}
    for module, (down, up) in truth.items():
        block, _, leaf = module.partition(".attn.") if ".attn." in module else module.partition(".ff.")
        block = block.replace("transformer_blocks", "blocks").replace("token_refiner.refiner_blocks", "token_refiner.blocks")
        if module in ALONE:
            found[ALONE[module]] = (down, up)
        elif leaf == "to_out.0":
            found[f"{block}.attn.out_proj"] = (down, up)
        elif leaf == "net.0.proj":
            value, gate = up.chunk(2)
            found[f"{block}.mlp.fc1"] = (down, torch.cat([gate, value]))
        elif leaf == "net.2":
            found[f"{block}.mlp.fc2"] = (down, up)
        elif leaf in ("to_q", "to_k", "to_v"):
            if not is_fused:
                found[f"{block}.attn.{leaf}"] = (down, up)
            elif leaf == "to_q":
                found[f"{block}.attn.qkv_proj"] = _fused(truth, module.removesuffix("to_q"), order)
        else:
            found[block] = (down, up)  # adaln_proj.linear
    return found


def _fused(truth: Truth, stem: str, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [truth[f"{stem}to_{letter}"] for letter in "qkv"]
    if all(torch.equal(down, parts[0][0]) for down, _ in parts):
        down, up = parts[0][0], torch.cat([each for _, each in parts])
    else:
        down, up = torch.cat([each for each, _ in parts]), torch.block_diag(*[each for _, each in parts])
    if order == "interleaved":
        width = HEADS * HEAD_DIM
        rows = [part * width + head * HEAD_DIM + i for head in range(HEADS) for part in range(3) for i in range(HEAD_DIM)]
        up = up[rows]
    return down, up


def original(truth: Truth, prefix: str = "", infix: str = "", halves: tuple[str, str] = ("lora_A", "lora_B"), **how: object) -> Tensors:
    return diffusers(original_truth(truth, **how), prefix, infix, halves)  # type: ignore[arg-type]


def with_alpha(tensors: Tensors, alpha: float, form: str = ".alpha") -> Tensors:
    """The same with an alpha tensor for every pair."""
    stems = {name.partition(".lora_")[0].partition(".lora.")[0] for name in tensors}
    return tensors | {f"{stem}{form}": torch.tensor(alpha) for stem in stems}


def flat(tensors: Tensors, prefix: str = "lora_unet_") -> Tensors:
    """Kohya's names: every dot of the module an underscore."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, tail = name.rpartition(".alpha") if name.endswith(".alpha") else name.partition(".lora_")
        found[prefix + stem.replace(".", "_") + (".alpha" if name.endswith(".alpha") else f".lora_{tail}")] = tensor
    return found


def save(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path, dict(metadata or {}))
    return path


def check(adapter: Adapter, truth: Truth, scale: float = 1.0, tolerance: float = 1e-6) -> None:
    """Every delta is the known one, within `tolerance` relative; nothing more, nothing less."""
    assert set(adapter.factors) == set(truth)
    for name, (down, up) in truth.items():
        wanted = scale * (up.double() @ down.double())
        found = adapter.factors[name].scale * (adapter.factors[name].up.double() @ adapter.factors[name].down.double())
        assert float((found - wanted).norm() / wanted.norm()) <= tolerance, name


def forward(model: torch.nn.Module) -> torch.Tensor:
    """Video and audio velocities of one fixed small input, in one row."""
    rng = torch.Generator().manual_seed(5)
    video, audio, text = 6, 3, 4
    total = video + audio + text
    with torch.no_grad():
        out = model(
            hidden_states=torch.randn(1, video, 16, generator=rng),
            audio_hidden_states=torch.randn(1, audio, 8, generator=rng),
            encoder_hidden_states=torch.randn(1, text, 24, generator=rng),
            timestep=torch.tensor([0.3]),
            timestep_indices=torch.zeros(total, dtype=torch.long),
            token_tags=torch.tensor([1] * text + [0] * video + [2] * audio),
            position_ids=torch.arange(total * 3).view(total, 3).float() % 5,
            video_indices=torch.arange(text, text + video),
            audio_indices=torch.arange(text + video, total),
            text_indices=torch.arange(text),
            return_dict=False,
        )
    return torch.cat([part.float().flatten() for part in out])


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of every parameter's bits."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode() + parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
