"""Adapters on Wan: what diffusers' loader drops without a word is exact here or refused; pairs find their experts."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lora.apply import Use, attach, attached_to
from lora.convert import load_adapter
from lora.target import Target, target_of
from lora.write import write_adapter
from tests.videogen.families.wan_toy import transformer
from videogen.adapters import settle
from videogen.config import Adapters, AdapterUse, Recipe, Request, recipe_record
from videogen.errors import RequestError
from videogen.families.wan_adapters import expert_of
from videogen.jobs.values import adapter_use
from videogen.media import to_uint8
from videogen.pipeline import Pipeline
from videogen.recipes import parse_adapter
from videogen.source import find_model

REQUEST = Request("a fox runs", size=(64, 32), frames=5, steps=8, seed=3)
WIDTH = 24
MODULES = {  # the original checkpoint's names -> diffusers' and the shape (out, in)
    "blocks.0.self_attn.q": ("blocks.0.attn1.to_q", (WIDTH, WIDTH)),
    "blocks.1.self_attn.o": ("blocks.1.attn1.to_out.0", (WIDTH, WIDTH)),
    "blocks.2.cross_attn.k": ("blocks.2.attn2.to_k", (WIDTH, WIDTH)),
    "blocks.3.ffn.0": ("blocks.3.ffn.net.0.proj", (48, WIDTH)),
    "blocks.3.ffn.2": ("blocks.3.ffn.net.2", (WIDTH, 48)),
    "time_embedding.0": ("condition_embedder.time_embedder.linear_1", (WIDTH, 32)),
    "time_projection.1": ("condition_embedder.time_proj", (6 * WIDTH, WIDTH)),
    "text_embedding.2": ("condition_embedder.text_embedder.linear_2", (WIDTH, WIDTH)),
    "head.head": ("proj_out", (64, WIDTH)),
}


@pytest.fixture(scope="module")
def target() -> Target:
    with torch.device("meta"):
        return target_of(transformer(0))


def pairs(names: dict[str, str], halves: tuple[str, str], alpha: float | None) -> dict[str, torch.Tensor]:
    """Low-rank pairs of rank 4 under these names, the same numbers whatever the names."""
    out: dict[str, torch.Tensor] = {}
    for seed, (original, name) in enumerate(names.items()):
        rows, columns = MODULES[original][1]
        generator = torch.Generator().manual_seed(seed)
        out[f"{name}.{halves[0]}.weight"] = torch.randn(4, columns, generator=generator) * 0.1
        out[f"{name}.{halves[1]}.weight"] = torch.randn(rows, 4, generator=generator) * 0.1
        if alpha is not None:
            out[f"{name}.alpha"] = torch.tensor(alpha)
    return out


ORIGINAL = {name: name for name in MODULES}
SPELLINGS: dict[str, tuple[dict[str, str], tuple[str, str], float | None]] = {
    "ComfyUI with alpha": ({k: f"diffusion_model.{k}" for k in MODULES}, ("lora_down", "lora_up"), 2.0),
    "ComfyUI A and B": ({k: f"diffusion_model.{k}" for k in MODULES}, ("lora_A", "lora_B"), None),
    "native, no prefix": (ORIGINAL, ("lora_down", "lora_up"), 2.0),
    "musubi without alpha": ({k: "lora_unet_" + k.replace(".", "_") for k in MODULES}, ("lora_down", "lora_up"), None),
    "diffusers": ({k: f"transformer.{v[0]}" for k, v in MODULES.items()}, ("lora_A", "lora_B"), None),
    "diffusers, no prefix": ({k: v[0] for k, v in MODULES.items()}, ("lora_A", "lora_B"), None),
    "peft": ({k: f"base_model.model.{v[0]}" for k, v in MODULES.items()}, ("lora_A", "lora_B"), None),
    "one block of musubi": ({"blocks.0.self_attn.q": "lora_unet_blocks_0_self_attn_q"}, ("lora_down", "lora_up"), 2.0),
    "the head alone": ({"head.head": "diffusion_model.head.head"}, ("lora_down", "lora_up"), 2.0),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_exact(spelling: str, target: Target, tmp_path: Path) -> None:
    names, halves, alpha = SPELLINGS[spelling]
    given = pairs(names, halves, alpha)
    save_file(given, tmp_path / "a.safetensors")
    adapter = load_adapter(tmp_path / "a.safetensors", target)
    assert adapter.factors.keys() == {MODULES[name][0] for name in names}
    for original, name in names.items():
        found = adapter.factors[MODULES[original][0]]
        wanted = given[f"{name}.{halves[1]}.weight"] @ given[f"{name}.{halves[0]}.weight"] * ((alpha or 4) / 4)
        torch.testing.assert_close(found.up @ found.down * found.scale, wanted)


def test_payloads_that_diffusers_drops_are_patches(target: Target, tmp_path: Path) -> None:
    given = {
        "diffusion_model.blocks.0.norm3.diff": torch.randn(WIDTH),
        "diffusion_model.blocks.0.norm3.diff_b": torch.randn(WIDTH),
        "diffusion_model.blocks.0.self_attn.norm_q.diff": torch.randn(WIDTH),
        "diffusion_model.blocks.1.ffn.0.diff_b": torch.randn(48),
        "diffusion_model.patch_embedding.diff": torch.randn(WIDTH, 16, 1, 2, 2),
        "diffusion_model.blocks.0.diff_m": torch.randn(1, 6, WIDTH),
        "diffusion_model.blocks.1.modulation.diff": torch.randn(1, 6, WIDTH),
        "diffusion_model.head.diff_m": torch.randn(1, 2, WIDTH),
    }
    save_file(given, tmp_path / "a.safetensors")
    adapter = load_adapter(tmp_path / "a.safetensors", target)
    names = ("blocks.0.norm2.weight", "blocks.0.norm2.bias", "blocks.0.attn1.norm_q.weight", "blocks.1.ffn.net.0.proj.bias")
    tables = ("blocks.0.scale_shift_table", "blocks.1.scale_shift_table", "scale_shift_table")
    for layout in (None, "comfyui", "diffusers", "kohya"):
        if layout is not None:
            write_adapter(adapter, target, layout, tmp_path / f"{layout}.safetensors", {})
        found = adapter.patches if layout is None else load_adapter(tmp_path / f"{layout}.safetensors", target).patches
        for name, value in zip((*names, "patch_embedding.weight", *tables), given.values(), strict=True):
            assert torch.equal(found[name].value, value) and not found[name].is_replacement
    with torch.random.fork_rng():
        model = transformer(0)
    before = {name: model.get_parameter(name).detach().clone() for name in tables}
    handle = attach(model, [Use(adapter, 0.5)])
    for name, value in zip(tables, [*given.values()][-3:]):
        torch.testing.assert_close(model.get_parameter(name), before[name] + 0.5 * value)
    handle.detach()
    assert all(torch.equal(model.get_parameter(name), value) for name, value in before.items())


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("diffusion_model.blocks.0.modulation.diff", (1, 2, WIDTH)),
        ("diffusion_model.blocks.0.modulation.diff_b", (1, 6, WIDTH)),
        ("diffusion_model.blocks.0.ffn.0.diff_m", (1, 6, WIDTH)),
        ("diffusion_model.blocks.0.self_attn.q.dora_scale", (WIDTH, 1)),
        ("diffusion_model.blocks.9.self_attn.q.lora_down.weight", (4, WIDTH)),
        ("diffusion_model.blocks.0.self_attn.q.lora_down.weight", (4, WIDTH)),  # half a pair
    ],
)
def test_what_cannot_be_exact_is_refused(key: str, shape: tuple[int, ...], target: Target, tmp_path: Path) -> None:
    given = pairs({"head.head": "diffusion_model.head.head"}, ("lora_down", "lora_up"), 2.0) | {key: torch.randn(shape)}
    save_file(given, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="got"):
        load_adapter(tmp_path / "a.safetensors", target)
    zero = pairs({"head.head": "diffusion_model.head.head"}, ("lora_down", "lora_up"), 0.0)
    save_file(zero, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="alpha"):
        load_adapter(tmp_path / "a.safetensors", target)


def saved(folder: Path, name: str, seed: int) -> AdapterUse:
    given = pairs({k: f"diffusion_model.{k}" for k in MODULES}, ("lora_down", "lora_up"), 4.0)
    save_file({key: value * (3 + seed) for key, value in given.items()}, folder / name)
    return AdapterUse(str(folder / name))


def test_a_pair_goes_to_its_experts_and_off_again(two: Pipeline, tmp_path: Path, folders: dict[str, Path]) -> None:
    high, low = saved(tmp_path, "high_noise_model.safetensors", 0), saved(tmp_path, "low_noise_model.safetensors", 1)
    source, plain = find_model(str(folders["two"])), two.render(REQUEST).frames
    with pytest.raises(RequestError, match="high and a low"):
        settle(Recipe(adapters=Adapters((high,))), source)
    recipe = Recipe("pair", adapters=Adapters((high, low), stated=("forwards=8", "shift_video=5")))
    turbo = two.sharing(recipe)
    resolved = turbo.family.resolve(replace(REQUEST, steps=None), turbo.recipe)
    assert (resolved.steps, resolved.shifts, resolved.guidance) == (8, (5.0, 5.0), (1.0, 1.0))
    assert any("high-noise expert" in note for note in resolved.notes)
    guided = turbo.render(replace(REQUEST, guidance=(4.0, 3.0)))
    experts = two.load("t2v").transformers  # another recipe: they are off again
    assert [attached_to(each) for each in experts] == [None, None]
    assert np.array_equal(two.render(REQUEST).frames, plain)
    by_hand: dict[str, Any] = {}
    for expert, use in zip(experts, (high, low)):
        for name, factors in load_adapter(use.file, target_of(expert)).factors.items():
            weight = expert.get_submodule(name).weight
            by_hand[f"{id(expert)} {name}"] = (weight, weight.detach().clone())
            with torch.no_grad():
                weight += factors.up @ factors.down * factors.scale
    merged = two.sharing(Recipe("by hand")).render(turbo.family.resolve(replace(REQUEST, guidance=(4.0, 3.0)), Recipe("by hand")))
    with torch.no_grad():
        for weight, before in by_hand.values():
            weight.copy_(before)
    for three, five in zip(merged.record["sigmas"]["video"], guided.record["sigmas"]["video"]):
        unshifted = three / (3 - 2 * three)
        assert five == pytest.approx(5 * unshifted / (1 + 4 * unshifted), abs=1e-5)
    assert [row["name"] for row in guided.record["adapters"]["attached"]] == ["high_noise_model", "low_noise_model"]
    plainly = two.sharing(Recipe("x", adapters=Adapters((high, low)))).render(replace(REQUEST, guidance=(4.0, 3.0)))
    assert np.abs(plainly.frames.astype(int) - merged.frames).max() <= 1 and not np.array_equal(plainly.frames, plain)


def test_a_published_pair_runs_euler_over_its_own_sigmas(two: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"wan2.2_t2v_lightx2v_4steps_lora_v1.1_{expert}_noise.safetensors" for expert in ("high", "low")]
    turbo = two.sharing(Recipe("turbo", adapters=Adapters(tuple(saved(tmp_path, name, k) for k, name in enumerate(names)))))
    parts, before = turbo.load("t2v"), two.load("t2v").pipe.scheduler
    monkeypatch.setattr(parts.pipe.vae, "decode", lambda latents, **_: (latents[:, :3],))
    result = turbo.render(replace(REQUEST, steps=None))
    assert result.record["resolved"]["guidance"] == [1.0, 1.0] and parts.pipe.scheduler is before
    sigmas = result.record["sigmas"]["video"]
    assert sigmas == pytest.approx([1, 0.9375, 5 / 6, 0.625, 0]) and any("not tried" in note for note in result.record["notes"])
    latents = torch.randn(1, 16, 2, 4, 8, generator=torch.Generator().manual_seed(3))
    embeds = parts.pipe.encode_prompt(REQUEST.prompt, None, False, max_sequence_length=512)[0]
    turbo.load("t2v")
    with torch.no_grad():
        for step, (now, after) in enumerate(pairwise(sigmas)):
            expert = parts.transformers[step // 2]  # two on each
            latents = latents + (after - now) * expert(latents, torch.tensor([now * 1000]), embeds, return_dict=False)[0]
    config = parts.pipe.vae.config
    scale, shift = (torch.tensor(values)[None, :3, None, None, None] for values in (config.latents_std, config.latents_mean))
    wanted = to_uint8(((latents[:, :3] * scale + shift)[0] / 2 + 0.5).clamp(0, 1).permute(1, 2, 3, 0).detach().numpy())
    assert np.abs(result.frames.astype(int) - wanted).max() <= 1 and wanted.std() > 10


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("high_noise_model.safetensors", "high"),
        ("Wan22_A14B_T2V_LOW_4steps.safetensors", "low"),
        ("HighNoise-v2.safetensors", "high"),
        ("wan22-lownoise.safetensors", "low"),
        ("highway_style.safetensors", "both"),
        ("high_and_low.safetensors", "both"),
    ],
)
def test_the_name_says_the_expert(name: str, expert: str) -> None:
    assert expert_of(AdapterUse(f"/low/{name}")) == expert


def test_what_is_said_of_an_expert_stands_above_the_name(two: Pipeline, folders: dict[str, Path], tmp_path: Path) -> None:
    style = saved(tmp_path, "style_high.safetensors", 0)
    assert parse_adapter("a/style.safetensors:1.5:low") == AdapterUse("a/style.safetensors", 1.5, expert="low")
    assert parse_adapter("a:b:high") == AdapterUse("a:b", expert="high") and parse_adapter("low") == AdapterUse("low")
    jobs = [adapter_use("x", {"file": "s", "strength": 2, "expert": "both"}, tmp_path), adapter_use("x", "s:2:both", tmp_path)]
    assert jobs[0] == jobs[1] and jobs[0].expert == "both"
    one = two.sharing(Recipe("low", adapters=Adapters((replace(style, expert="low"),))))  # one of a pair, but said
    assert [attached_to(each) is not None for each in one.load("t2v").transformers] == [False, True]
    uses = (replace(style, strength=3.0, expert="high"), replace(style, strength=1.5, expert="low"))
    each = two.sharing(Recipe("each", adapters=Adapters(uses)))
    strengths = [attached_to(expert).record()[0]["strength"] for expert in each.load("t2v").transformers]  # type: ignore[union-attr]
    assert strengths == [3.0, 1.5] and each.recipe.adapters.identity != one.recipe.adapters.identity
    two.load("t2v")
    assert recipe_record(each.recipe)["adapters"]["uses"][1]["expert"] == "low"
    with pytest.raises(RequestError, match="drop :high"):
        settle(Recipe(adapters=Adapters((replace(style, expert="low"),))), find_model(str(folders["one"])))
    with pytest.raises(RequestError, match="one of high, low, both"):
        adapter_use("x", {"file": "s", "expert": "middle"}, tmp_path)


def test_a_file_for_neither_goes_to_both(two: Pipeline, tmp_path: Path) -> None:
    style = two.sharing(Recipe("style", adapters=Adapters((saved(tmp_path, "style.safetensors", 0),))))
    assert all(attached_to(each) for each in style.load("t2v").transformers)
    two.load("t2v")
    swapped = [saved(tmp_path, name, 0) for name in ("a-high.safetensors", "b-low.safetensors")]
    identities = [settle(Recipe(adapters=Adapters(uses)), two.source).adapters.identity for uses in (tuple(swapped), tuple(swapped[::-1]))]
    assert style.recipe.adapters.identity not in identities
