"""A small random model with four heads, and recipes that use every lever."""

from dataclasses import replace

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import save_file

from tests.conftest import link_model
from videogen import Recipe
from videogen.attention.options import SparseAttention
from videogen.config import Adapters, AdapterUse, StepCache
from videogen.pipeline import Pipeline, open_pipeline
from videogen.pocket import sizes
from videogen.recipes import EXACT

SMALL = {"num_layers": 2, "hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4, "attention_head_dim": 32, "rope_freq_dim": 4}
SPARSE = SparseAttention(budget=0.3, min_rows=0, tile=(2, 2, 2), block=(8, 4), dense_first=0, guard=None)


@pytest.fixture(scope="package")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = link_model(tmp_path_factory.mktemp("model") / "four")
    (folder / "transformer").unlink()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MiniMaxH3Transformer3DModel(**sizes.TRANSFORMER | SMALL).save_pretrained(folder / "transformer")
    pipeline = open_pipeline(str(folder), Recipe(savings=EXACT), device="cpu")
    pipeline.load("t2va")
    return pipeline


@pytest.fixture(scope="package")
def recipes(tmp_path_factory: pytest.TempPathFactory, four_heads: Pipeline) -> dict[str, Recipe]:
    rng, path = torch.Generator().manual_seed(1), tmp_path_factory.mktemp("lora") / "a.safetensors"
    module, down, up = "transformer_blocks.1.ff.net.2", torch.randn(4, 96, generator=rng), torch.randn(64, 4, generator=rng)
    head = four_heads.load("t2va").transformer.proj_out
    head_down, head_up = (torch.randn(size, generator=rng) / 10 for size in ((4, head.in_features), (head.out_features, 4)))
    factors = {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    save_file(factors | {"proj_out.lora_A.weight": head_down, "proj_out.lora_B.weight": head_up}, path, {"alpha": "4"})
    adapters = Adapters((AdapterUse(str(path), 0.5),))
    everything = Recipe("all", steps=8, savings=replace(EXACT, decode_batch=0), cache=StepCache(lam=0.3), sparse=SPARSE, adapters=adapters)
    return {"plain": Recipe("plain", steps=3), "all": everything}
