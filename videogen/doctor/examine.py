"""Runs the parts of a loaded model at one request's shape and says what really ran; the pipeline is as before afterwards."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from videogen.attention.install import project
from videogen.device_profile import DeviceProfile, device_key
from videogen.doctor import facts, rules
from videogen.doctor.candidates import TILES, try_all, winner
from videogen.doctor.report import Row
from videogen.doctor.seen import see, watching_masks
from videogen.families.base import Resolved
from videogen.families.h3_pipeline import LOOP, open_state, transformer_of
from videogen.kernels.check import Shape, arguments
from videogen.kernels.ops import FUSED, TORCH
from videogen.text.choose import choose
from videogen.timing import synchronizer, time_call
from videogen.transforms.attach import Transforms
from videogen.transforms.decode import decode_clip

_NAMES = {
    "rms_modulate": ("norms + modulation", 2),
    "qk_rotate": ("q/k norm + RoPE", 2),
    "gated_add": ("gated residual", 2),
    "swiglu": ("SwiGLU", 1),
}
"""Operation -> what people call it, and how often a block runs it."""


class _Caught(Exception):
    """Ends a forward at its first block."""


@dataclass(slots=True)
class Examination:
    """One loaded pipeline at one request's shape. `rows` fills as areas are looked at; `measured` is what a device profile keeps."""

    pipe: Any
    resolved: Resolved
    transforms: Transforms
    device: torch.device
    environment: dict[str, str]
    is_offline: bool
    rows: list[Row] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        """Whether that is a GPU."""
        return self.device.type == "cuda"

    def milliseconds(self, call: Callable[[], object]) -> float:
        """The median of five."""
        return 1e3 * time_call(call, warmup=1, synchronize=synchronizer(self.device)).median_s

    @torch.no_grad()
    def look(self) -> None:
        """Every area, in the order a clip meets them."""
        pipe, state = self.pipe, open_state(self.pipe, self.resolved, 0)
        for name, block in pipe._blocks.sub_blocks.items():
            if name == LOOP:
                break
            call = partial(self.transforms.call, name, block, pipe, state)
            if name == "text_encoder":
                self.text(call)
            else:
                call()
        loop, transformer = pipe._blocks.sub_blocks[LOOP], transformer_of(pipe)
        with self.transforms.around_loop(pipe, loop, transformer, state):
            args = self.first_block_inputs(loop, transformer, state)
            self.attention(transformer, args)
            self.linears(transformer.transformer_blocks[0], args[0])
        self.elementwise(transformer, args[0].shape[1])
        self.video_vae()
        self.process()

    def text(self, encode: Callable[[], None]) -> None:
        """One text encoding."""
        seen = see(encode, self.device)
        requested = str(self.pipe.text_encoder.config._attn_implementation or "sdpa")
        kept = self.transforms.told.get("encodings text_encoder") == "kept"
        executed = "not run: kept from an earlier request" if kept else rules.attention_family(seen.names)
        self.rows.append(Row("text encoder", requested, executed, self.transforms.told.get("text_cut", ""), f"{seen.ms:.1f} ms"))
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
        found = try_all(*getattr(attn.processor, "project", project)(attn, args[0], rope))
        best, own = winner(found), next(row for row in found if row["name"] == "native")
        executed = rules.attention_family(seen.names)
        ran = next((row for row in found if row["name"] == TILES), own) if executed == "bfloat16 tiles" else own
        pair = (best["name"], float(best["ms"])) if best else None
        mask = next((each for each in ("all true", "partial") if each in masks), "none")
        own_ms = float(ran["ms"] or seen.ms)
        self.rows.append(
            rules.check_attention(str(getattr(requested, "value", requested)), seen, mask, is_cuda=self.is_cuda, best=pair, own_ms=own_ms)
        )
        self.rows += rules.check_hub({"transformer": str(getattr(requested, "value", requested))}, is_offline=self.is_offline)
        self.measured |= {"rows": args[0].shape[1], "attention": found}

    def linears(self, block: Any, rows: torch.Tensor) -> None:
        """The widest product of a block as it runs."""
        linear = block.ff.net[0].proj
        seen, ms = see(lambda: linear(rows), self.device), self.milliseconds(lambda: linear(rows))
        tflops = 2 * rows.shape[1] * linear.weight.numel() / ms / 1e9
        made = str(linear(rows).dtype).removeprefix("torch.")
        row = rules.check_products("linears", str(linear.weight.dtype).removeprefix("torch."), made, seen)
        self.rows.append(Row(row.area, row.requested, row.executed, row.reason, f"{ms:.2f} ms, {tflops:.2f} TFLOP/s", row.fix, row.is_slow))

    def elementwise(self, transformer: Any, num_rows: int) -> None:
        """The four operations between the products, as the recipe runs them and as it could."""
        config, savings = transformer.config, self.transforms.savings
        sizes = (config.hidden_size, config.num_attention_heads, config.attention_head_dim, 6 * config.rope_freq_dim, config.ffn_dim)
        weight = transformer.transformer_blocks[0].ff.net[2].weight
        shape = Shape(1, num_rows, *sizes)
        for name in _NAMES:
            given = arguments(shape, weight.dtype, self.device)[name]
            area, count = _NAMES[name]
            used = FUSED if savings.kernels else TORCH
            seen, ms = see(partial(getattr(used, name), *given), self.device), self.milliseconds(partial(getattr(used, name), *given))
            cost = f"{count * ms:.2f} ms a block"
            executed = f"{used.name}, {sum(each > 0.02 * seen.ms for _, each in seen.kernels)} kinds of kernels"
            reason = self.transforms.told.get("kernels", "") if used is TORCH else ""
            self.rows.append(Row(area, used.name, executed, reason, cost))

    def video_vae(self) -> None:
        """One chunk decoded, one frame encoded."""
        vae, resolved = self.pipe.vae, self.resolved
        ratio, rng = vae.spatial_compression_ratio, torch.Generator().manual_seed(0)
        size = (vae.tokens_chunk_size + vae.token_overlap, resolved.height // ratio, resolved.width // ratio)
        latents = torch.randn(1, vae.config.latent_channels, *size, generator=rng).to(
            self.device, next(vae.post_quant_conv.parameters()).dtype
        )
        batch = self.transforms.savings.decode_batch
        with self.transforms.around_decoder(vae):
            seen = see(partial(decode_clip, vae, latents, batch) if batch else partial(vae._decode_clip, latents), self.device)
        dtype = str(latents.dtype).removeprefix("torch.")
        self.rows.append(Row("video VAE attention", dtype, rules.attention_family(seen.names), cost=f"{seen.ms:.1f} ms a chunk"))
        self.rows.append(rules.check_convolution("video VAE decode", dtype, seen, is_cuda=self.is_cuda))
        kind = next(vae.encoder.parameters()).dtype
        frame = torch.zeros(1, 3, 1, resolved.height, resolved.width, dtype=kind, device=self.device)
        seen = see(lambda: vae._encode_clip(frame), self.device)
        self.rows.append(rules.check_convolution("video VAE encode", str(kind).removeprefix("torch."), seen, is_cuda=self.is_cuda))

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

    def profile(self) -> DeviceProfile:
        """The winners of what was measured: diffusers' back end where another than its own is at least 5 % faster, and products."""
        rows = self.measured["attention"]
        own = next(row for row in rows if row["name"] == "native")
        best, tiles = winner(rows, own=False), next(row for row in rows if row["name"] == TILES)
        is_better = best is not None and own["ms"] is not None and best["ms"] * 1.05 < own["ms"]
        matmul = None
        if tiles["ms"] is not None and own["ms"] is not None:
            matmul = "bfloat16" if not tiles["reason"] and tiles["ms"] * 1.05 < own["ms"] else "model"
        return DeviceProfile(device_key(self.device), best["backend"] if best and is_better else None, matmul, self.measured)
