"""Batches through the unmodified transformer's weights: B equal-length samples, each with its own timesteps, in one fast forward.

The stock forward shares one timestep table and one layout over its batch axis. Here every sample keeps its own timesteps: rows fall into
four groups (text, video, condition, audio) whose modulation is a (B, 4, ...) table spread by a one-hot product, whose backward is a matrix
product too. The arithmetic is the stock block's; `tests/videogen/pocket/test_packed.py` compares the two.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep, MiniMaxH3Ref2VAPrepareLayoutStep

from videogen.pocket.shapes import unflatten
from videogen.pocket.training import captured

TEXT, VIDEO, CONDITION, AUDIO = range(4)
ANCHOR_T = 0.999  # timestep and cleanliness of condition rows


@dataclass(frozen=True)
class Rows:
    """The layout one bucket of samples shares, in packed order: text, condition, audio, video."""

    text: int
    condition: int
    audio: int
    video: int
    positions: torch.Tensor  # (S, 3)
    groups: torch.Tensor  # (S,) one of TEXT, VIDEO, CONDITION, AUDIO
    hot: torch.Tensor  # (S, 4) one-hot of groups

    def to(self, device: torch.device) -> "Rows":
        """The same layout on a device."""
        moved = (t.to(device) for t in (self.positions, self.groups, self.hot))
        return Rows(self.text, self.condition, self.audio, self.video, *moved)

    @property
    def length(self) -> int:
        """Rows of one sample."""
        return self.text + self.condition + self.audio + self.video


def layout(text_tags: list[int], kind: str, latents: tuple[int, int, int], num_audio: int, picture: tuple[int, int]) -> Rows:
    """Rows of one request as the pipeline's own builders lay them out.

    `kind` is t (text), f, l, b (first, last, both frames) or r (one reference picture of `picture` latent size);
    `latents` is (T, h, w); `text_tags` holds 1 for words and 0 for vision tokens.
    """
    frames, height, width = latents
    tags = torch.tensor(text_tags)
    if kind == "r":
        shape = torch.zeros(1, 1, 1, *picture)
        built = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
            tags, [_Picture()], [shape], [], frames, height, width, num_audio, (1, 2, 2), 2, 2, 0
        )
    else:
        anchors = {"t": (), "f": ("first",), "l": ("last",), "b": ("first", "last")}[kind]
        built = MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, frames, height, width, num_audio, (1, 2, 2), 2, 2, 0, anchors)
    positions, row_tags, _, _, _, condition, _ = built
    groups = torch.where(row_tags == 2, AUDIO, torch.where(row_tags == 1, TEXT, VIDEO))
    groups[len(tags) : len(tags) + condition] = CONDITION
    hot = F.one_hot(groups, 4).float()
    video = len(groups) - len(tags) - condition - 2 * num_audio
    return Rows(len(tags), condition, 2 * num_audio, video, positions.float(), groups, hot)


class _Picture:
    kind = "image"
    has_audio = False


def block(
    h: torch.Tensor,
    table: torch.Tensor,
    hot: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    weights: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """One transformer block on (B, S, D) in h's dtype; `table` (B, 4, 6 D) holds the modulations of the four groups."""
    norm1, to_q, to_k, to_v, norm_q, norm_k, to_out, norm2, up, down = weights
    mod = torch.matmul(hot.to(h.dtype), table.to(h.dtype))
    shift1, scale1, gate1, shift2, scale2, gate2 = mod.chunk(6, dim=-1)
    x = _rms(h, norm1) * (1.0 + scale1) + shift1
    q, k, v = (unflatten(F.linear(x, w.to(x.dtype)), -1, (heads, -1)) for w in (to_q, to_k, to_v))
    q, k = _rope(_rms(q, norm_q), cos, sin), _rope(_rms(k, norm_k), cos, sin)
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    h = h + gate1 * F.linear(o.transpose(1, 2).flatten(2), to_out.to(h.dtype))
    x = _rms(h, norm2) * (1.0 + scale2) + shift2
    value, gate = F.linear(x, up.to(x.dtype)).chunk(2, dim=-1)
    return h + gate2 * F.linear(value * F.silu(gate), down.to(h.dtype))


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * weight).to(x.dtype)


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    other = torch.cat((-second, first), dim=-1)
    c, s = cos[None, :, None].to(x.dtype), sin[None, :, None].to(x.dtype)
    return torch.cat((turned * c + other * s, kept), dim=-1)


def block_weights(b: Any) -> tuple[torch.Tensor, ...]:
    """The parameters of a stock block in the order `block` takes them."""
    a = b.attn
    return (
        b.norm1.weight,
        a.to_q.weight,
        a.to_k.weight,
        a.to_v.weight,
        a.norm_q.weight,
        a.norm_k.weight,
        a.to_out[0].weight,
        b.norm2.weight,
        b.ff.net[0].proj.weight,
        b.ff.net[2].weight,
    )


class PackedForward:
    """Calls a stock `MiniMaxH3Transformer3DModel` on batches with their own timesteps; holds the (compiled) block function."""

    def __init__(self, model: Any, *, dtype: torch.dtype, compiled: bool = False) -> None:
        self.model, self.dtype = model, dtype
        self.fast = torch.compile(block, dynamic=True) if compiled else block
        self.compiled_sampling = False  # a second compilation, worth it for long evaluations only
        self.skip: frozenset[int] = frozenset()  # blocks left out, to see what mistreatment costs

    def __call__(
        self,
        rows: Rows,
        text: torch.Tensor,
        condition: torch.Tensor,
        audio: torch.Tensor,
        video: torch.Tensor,
        t_audio: torch.Tensor,
        t_video: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocities of (B, A, Ca) audio and (B, V, Cv) video rows; `condition` (B, C, Cv) rows are already at ANCHOR_T."""
        model, dtype = self.model, self.dtype
        size = len(text)
        cos, sin = model.rope(rows.positions)
        with torch.autocast(text.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            words = model.token_refiner(model.context_embedder(text))
            seen = model.proj_in(torch.cat([condition, video], dim=1))
            heard = model.audio_proj_in(audio)
        h = torch.cat([words, seen[:, : rows.condition], heard, seen[:, rows.condition :]], dim=1).to(dtype)
        temb = model.time_embedder(model.time_proj(torch.cat([t_video, t_video.clamp(min=ANCHOR_T), t_audio])))
        held = F.silu(temb)
        run = self.fast if torch.is_grad_enabled() or self.compiled_sampling else block
        for index, (b, table) in enumerate(zip(model.transformer_blocks, self._tables(held, size))):
            if index not in self.skip:
                h = run(h, table, rows.hot, cos, sin, b.attn.heads, block_weights(b))
        begin = rows.text + rows.condition
        out_v, _, out_a = model.norm_out.linear(held).view(3, size, 1, -1)
        heard, seen = h[:, begin : begin + rows.audio], h[:, begin + rows.audio :]
        return self._head(model.audio_proj_out, heard, out_a), self._head(model.proj_out, seen, out_v)

    def _tables(self, held: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
        """The modulations (B, 4, 6 D) of every block from one product: ten small ones would cost more in launches than in work."""
        linears = [b.adaln_proj.linear for b in self.model.transformer_blocks]
        weights, biases = torch.stack([m.weight for m in linears]), torch.stack([m.bias for m in linears])
        every = (torch.einsum("te,lfe->ltf", held, weights) + biases[:, None]).view(len(linears), 3, size, 3, -1)
        # time (video, condition, audio), sample, modality (video, text, audio)
        groups = (every[:, 0, :, 1], every[:, 0, :, 0], every[:, 1, :, 0], every[:, 2, :, 2])
        return torch.stack(groups, dim=2).unbind(0)

    def _head(self, proj: Any, h: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        shift, scale = out.to(h.dtype).chunk(2, dim=-1)
        x = _rms(h, self.model.norm_out.norm.weight) * (1.0 + scale) + shift
        return F.linear(x, proj.weight.to(x.dtype), proj.bias.to(x.dtype)).float()


def shifted(u: torch.Tensor, shift: float) -> torch.Tensor:
    """The noise level a shift makes of a base level."""
    return shift * u / (1 + (shift - 1) * u)


def patchify(latents: torch.Tensor) -> torch.Tensor:
    """(B, C, T, h, w) latents to (B, rows, 4 C), as the pipeline packs them."""
    b, c, t, h, w = latents.shape
    return latents.view(b, c, t, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6).reshape(b, t * h // 2 * w // 2, c * 4)


def unpatchify(rows: torch.Tensor, latents: tuple[int, int, int]) -> torch.Tensor:
    """The inverse of `patchify` for latents (T, h, w)."""
    t, h, w = latents
    b, c = len(rows), rows.shape[-1] // 4
    return rows.view(b, t, h // 2, w // 2, c, 2, 2).permute(0, 4, 1, 2, 5, 3, 6).reshape(b, c, t, h, w)


@torch.no_grad()
def sample(
    forward: PackedForward,
    rows: Rows,
    text: torch.Tensor,
    condition: torch.Tensor,
    channels: tuple[int, int],
    forwards: int,
    shifts: tuple[float, float],
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Euler from noise on the pipeline's own grid: audio (B, A, Ca) and video (B, V, Cv) rows after `forwards` evaluations."""
    device, size = text.device, len(text)
    video = torch.randn(size, rows.video, channels[1], generator=generator, device=device)
    audio = torch.randn(size, rows.audio, channels[0], generator=generator, device=device)
    grid = torch.linspace(1, 0, forwards + 1, device=device)
    levels = torch.stack([shifted(grid, shift) for shift in shifts])
    now, change = levels[:, 0].clone(), levels[:, 0] - levels[:, 1]

    def advance() -> torch.Tensor:
        t_audio, t_video = ((1 - now[i]).expand(size) for i in range(2))
        v_audio, v_video = forward(rows, text, condition, audio, video, t_audio, t_video)
        audio.add_(change[0] * v_audio)
        return video.add_(change[1] * v_video)

    captured(advance, device, warm=1, record=False)
    replay = captured(advance, device, warm=0) if forwards > 3 else advance  # capturing runs nothing
    for k in range(1, forwards):
        now.copy_(levels[:, k])
        change.copy_(levels[:, k] - levels[:, k + 1])
        replay()
    return audio, video
