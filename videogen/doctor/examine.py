"""Runs the parts of a loaded model at one request's shape and says what really ran; the pipeline is as before afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from videogen.attention.install import project
from videogen.device_profile import Winners
from videogen.doctor import facts, rules
from videogen.doctor.candidates import try_all, winner
from videogen.doctor.report import Row
from videogen.doctor.seen import see, watching_masks
from videogen.families.base import Resolved
from videogen.families.h3_pipeline import LOOP, open_state, transformer_of
from videogen.kernels.check import Shape, arguments
from videogen.kernels.ops import FUSED, TORCH
from videogen.text.choose import choose
from videogen.timing import synchronizer, time_call
from videogen.transforms.attach import Transforms
from videogen.transforms.cpu_bfloat16 import Bfloat16Processor, bfloat16_products, refusal
from videogen.transforms.decode import decode_clip

_NAMES = {
    "rms_modulate": ("norms + modulation", 2),
    "qk_rotate": ("q/k norm + RoPE", 2),
    "gated_add": ("gated residual", 2),
    "swiglu": ("SwiGLU", 1),
}
"""Operation -> what people call it, and how often a block runs it."""
_BFLOAT16 = "c10::BFloat16"  # as the profiler names the format


class _Caught(Exception):
    """Ends a forward at its first block."""


@dataclass(slots=True)
class Examination:
    """One loaded pipeline at one request's shape. `rows` fills as areas are looked at; `measured` is what a device profile keeps:
    no rows where the denoiser cannot run. `has_tiles`: our own bfloat16 processor attended."""

    pipe: Any
    resolved: Resolved
    transforms: Transforms
    device: torch.device
    environment: dict[str, str]
    is_offline: bool
    rows: list[Row] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=lambda: {"rows": 0, "attention": []})
    has_tiles: bool = False

    @property
    def is_cuda(self) -> bool:
        """Whether that is a GPU."""
        return self.device.type == "cuda"

    def milliseconds(self, call: Callable[[], object]) -> float:
        """The median of five."""
        return 1e3 * time_call(call, warmup=1, synchronize=synchronizer(self.device)).median_s

    @torch.no_grad()
    def look(self) -> None:
        """Every area that can run, in the order a clip meets them."""
        backends = facts.attention_backends(self.pipe)
        missing = facts.missing_kernels(backends.values())
        self.rows += rules.check_hub(backends, is_offline=self.is_offline, missing=missing)
        cannot = {component for component, backend in backends.items() if backend in missing}
        self.denoiser(is_whole="transformer" not in cannot)
        self.video_vae(has_decoder="vae" not in cannot)
        self.process()

    def denoiser(self, *, is_whole: bool) -> None:
        """What comes before the loop and, where its back end can be called, the parts of the first block."""
        pipe, state = self.pipe, open_state(self.pipe, self.resolved, 0)
        for name, block in pipe._blocks.sub_blocks.items():
            if name == LOOP:
                break
            call = partial(self.transforms.call, name, block, pipe, state)
            if name == "text_encoder":
                self.text(call)
            else:
                call()
        if not is_whole:
            return
        loop, transformer = pipe._blocks.sub_blocks[LOOP], transformer_of(pipe)
        first = transformer.transformer_blocks[0]
        with self.transforms.around_loop(pipe, loop, transformer, state):
            args = self.first_block_inputs(loop, transformer, state)
            self.attention(transformer, args)
            self.linears(first, args[0])
        if not refusal(transformer):
            self.measured["block"] = self.both_products(first, args)
        self.elementwise(transformer, args[0].shape[1])

    def text(self, encode: Callable[[], None]) -> None:
        """One text encoding."""
        with watching_masks() as masks:
            seen = see(encode, self.device)
        requested = str(self.pipe.text_encoder.config._attn_implementation or "sdpa")
        if self.transforms.told.get("encodings text_encoder") == "kept":
            row = Row("text encoder", requested, "not run: kept from an earlier request", "", f"{seen.ms:.1f} ms")
        else:
            row = rules.check_attention(requested, seen, _worst(masks), is_cuda=self.is_cuda, area="text encoder", unit="text")
        cut = self.transforms.told.get("text_cut", "")
        self.rows.append(replace(row, reason="; ".join(each for each in (row.reason, cut) if each)))
        choice = choose(self.pipe.text_encoder.config)  # what would answer with it: `videogen text`
        self.rows.append(Row("text engine", choice.engine, choice.engine, choice.reason))

    def first_block_inputs(self, loop: Any, transformer: Any, state: Any) -> tuple[Any, ...]:
        """What the first block gets in the first step."""
        caught: list[tuple[Any, ...]] = []

        def catch(_: Any, args: tuple[Any, ...]) -> None:
            caught.append(args)
            raise _Caught

        rows = loop.get_block_state(state)
        handle = transformer.transformer_blocks[0].register_forward_pre_hook(catch)
        try:
            loop.sub_blocks["denoiser"](self.pipe, rows, i=0, t=rows.timesteps[0])
        except _Caught:
            pass
        finally:
            handle.remove()
        return caught[0]

    def attention(self, transformer: Any, args: tuple[Any, ...]) -> None:
        """The first block as it stands, and every candidate on its own queries, keys and values."""
        attn, rope = transformer.transformer_blocks[0].attn, args[3]
        with watching_masks() as masks:
            seen = see(lambda: attn(args[0], rope, *args[4:]), self.device)
        requested = attn.processor._attention_backend or _AttentionBackendRegistry.get_active_backend()[0]
        requested = str(getattr(requested, "value", requested))
        found = try_all(*getattr(attn.processor, "project", project)(attn, args[0], rope))
        self.has_tiles = isinstance(attn.processor, Bfloat16Processor) and _BFLOAT16 in seen.products
        executed, by_name = rules.attention_family(seen.names, is_tiled=self.has_tiles), {row["name"]: row for row in found}
        ran = by_name[rules.TILES] if executed == rules.TILES else by_name.get(requested, by_name["native"])
        best = winner(found)
        row = rules.check_attention(
            requested,
            seen,
            _worst(masks),
            is_cuda=self.is_cuda,
            best=(best["name"], float(best["ms"])) if best else None,
            own_ms=None if executed == rules.EAGER or ran["ms"] is None else float(ran["ms"]),  # no candidate is like it
            is_tiled=self.has_tiles,
        )
        self.rows.append(row)
        self.measured |= {"rows": args[0].shape[1], "attention": found}

    def linears(self, block: Any, rows: torch.Tensor) -> None:
        """The widest product of a block as it runs."""
        linear = block.ff.net[0].proj

        def call() -> Any:
            return linear(rows.view_as(rows))  # another tensor each time: float8 keeps the scales of the last one

        seen, ms = see(call, self.device), self.milliseconds(call)
        tflops = 2 * rows.shape[1] * linear.weight.numel() / ms / 1e9
        made = str(call().dtype).removeprefix("torch.")
        row = rules.check_products("linears", str(linear.weight.dtype).removeprefix("torch."), made, seen)
        self.rows.append(Row(row.area, row.requested, row.executed, row.reason, f"{ms:.2f} ms, {tflops:.2f} TFLOP/s", row.fix, row.is_slow))

    def both_products(self, block: Any, args: tuple[Any, ...]) -> dict[str, float]:
        """Milliseconds of a block's attention and feed-forward in the weights' own arithmetic and with bfloat16 products."""

        def call() -> None:
            block.attn(args[0], args[3])
            block.ff(args[0])

        own = self.milliseconds(call)
        with bfloat16_products(SimpleNamespace(transformer_blocks=[block])):
            return {"model": own, "bfloat16": self.milliseconds(call)}

    def elementwise(self, transformer: Any, num_rows: int) -> None:
        """The four operations between the products, as the recipe runs them and as it could."""
        config, savings = transformer.config, self.transforms.savings
        sizes = (config.hidden_size, config.num_attention_heads, config.attention_head_dim, 6 * config.rope_freq_dim, config.ffn_dim)
        weight = transformer.transformer_blocks[0].ff.net[2].weight
        shape = Shape(1, num_rows, *sizes)
        for name in _NAMES:
            kind = torch.bfloat16 if self.has_tiles and name == "swiglu" else weight.dtype  # between two products in that format
            given = arguments(shape, kind, self.device)[name]
            area, count = _NAMES[name]
            used = FUSED if savings.kernels else TORCH
            asked = FUSED if "kernels" in self.transforms.told else TORCH
            call = partial(getattr(used, name), *given)
            seen, ms = see(call, self.device), self.milliseconds(call)
            own = "with the bfloat16 attention" if self.has_tiles and name == "qk_rotate" else ""
            reason = self.transforms.told.get("kernels", "") if used is TORCH else ""
            cost = f"{count * ms:.2f} ms a block"
            self.rows.append(rules.check_elementwise(area, name, asked.name, seen, cost, reason, is_cuda=self.is_cuda, own=own))

    def video_vae(self, *, has_decoder: bool) -> None:
        """One chunk decoded, where its back end can be called, and one frame encoded."""
        vae, resolved = self.pipe.vae, self.resolved
        if has_decoder:
            self.decoder(vae)
        kind = next(vae.encoder.parameters()).dtype
        frame = torch.zeros(1, 3, 1, resolved.height, resolved.width, dtype=kind, device=self.device)
        seen = see(lambda: vae._encode_clip(frame), self.device)
        self.rows.append(rules.check_convolution("video VAE encode", str(kind).removeprefix("torch."), seen, is_cuda=self.is_cuda))

    def decoder(self, vae: Any) -> None:
        """One chunk of video."""
        ratio, rng = vae.spatial_compression_ratio, torch.Generator().manual_seed(0)
        size = (vae.tokens_chunk_size + vae.token_overlap, self.resolved.height // ratio, self.resolved.width // ratio)
        kind = next(vae.post_quant_conv.parameters()).dtype
        latents = torch.randn(1, vae.config.latent_channels, *size, generator=rng).to(self.device, kind)
        batch = self.transforms.savings.decode_batch
        with self.transforms.around_decoder(vae), watching_masks() as masks:
            seen = see(partial(decode_clip, vae, latents, batch) if batch else partial(vae._decode_clip, latents), self.device)
        area, dtype = "video VAE attention", str(kind).removeprefix("torch.")
        backend = facts.attention_backends(self.pipe)["vae"]
        self.rows.append(rules.check_attention(backend, seen, _worst(masks), is_cuda=self.is_cuda, area=area, unit="chunk"))
        self.rows.append(rules.check_convolution("video VAE decode", dtype, seen, is_cuda=self.is_cuda))

    def process(self) -> None:
        """What holds for the process as a whole."""
        environment, (gpus, can_reach) = self.environment, facts.peers()
        version, has_extension = facts.xformers_state()
        found = [
            rules.check_xformers(version, has_extension),
            rules.check_cudnn(facts.cudnn_version(), facts.cudnn_files(), is_hopper_or_later=facts.is_hopper_or_later(self.device)),
            rules.check_compile(facts.compile_counters()),
            rules.check_collectives(environment, gpus=gpus, has_peer_access=can_reach),
            None if self.is_cuda else rules.check_threads(torch.get_num_threads(), facts.processors(), environment.get("OMP_WAIT_POLICY")),
        ]
        self.rows += [row for row in found if row is not None]

    def winners(self) -> Winners | None:
        """What was fastest: diffusers' back end where another than its own is at least 5 % faster, and products, by the whole block.

        None where the denoiser could not run.
        """
        rows = self.measured["attention"]
        if not rows:
            return None
        by_name, best = {row["name"]: row for row in rows}, winner(rows, own=False)
        own, tiles = by_name["native"], by_name[rules.TILES]
        is_better = best is not None and own["ms"] is not None and best["ms"] * 1.05 < own["ms"]
        matmul = None
        if "block" in self.measured:
            took = self.measured["block"]
            matmul = "bfloat16" if not tiles["reason"] and took["bfloat16"] * 1.05 < took["model"] else "model"
        dtype = str(transformer_of(self.pipe).transformer_blocks[0].ff.net[2].weight.dtype).removeprefix("torch.")
        return Winners(dtype, self.measured["rows"], best["backend"] if best and is_better else None, matmul, self.measured)


def _worst(masks: Sequence[str]) -> str:
    return next((each for each in ("all true", "partial") if each in masks), "none")
