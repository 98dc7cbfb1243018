"""Small routed problems (odd lengths, unequal budgets, one dense head), and H3 at toy size."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel

from videogen.attention.blocks import Blocks
from videogen.attention.route import Pooled, Route, band_mask, pool, priorities, select


@dataclass(frozen=True)
class Problem:
    """One layer's tensors (B, S, H, D) with a route over them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    blocks: Blocks
    pooled: Pooled
    route: Route

    @property
    def layer(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Blocks, Route, Pooled]:
        return self.query, self.key, self.value, self.blocks, self.route, self.pooled


def problem(rows: int, first: int, block: tuple[int, int], budgets: list[int], *, batch: int = 1, width: int = 16) -> Problem:
    """Random projections as one fused tensor's views; budgets above the number of key blocks mean dense."""
    draw = torch.Generator().manual_seed(rows)
    fused = torch.randn(batch, rows, 3, len(budgets), width, generator=draw)
    query, key, value = 2 * fused[:, :, 0], fused[:, :, 1], fused[:, :, 2]
    blocks = Blocks(first, rows, *block)
    pooled = pool(query, key, value, blocks)
    wanted = torch.tensor(budgets, dtype=torch.int32).clamp(max=blocks.num_k)
    longest = int(wanted[wanted < blocks.num_k].max()) if (wanted < blocks.num_k).any() else blocks.num_k
    route = select(priorities(pooled, "variance"), band_mask(blocks, query.device), wanted, longest)
    return Problem(query, key, value, blocks, pooled, route)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((found - wanted).norm() / wanted.norm())


GRID, TEXT, AUDIO, GIVEN = (9, 4, 5), 6, 8, 20  # GIVEN: rows of a keyframe
FIRST = TEXT + GIVEN + AUDIO
ROWS = FIRST + math.prod(GRID)


def tiny_model(num_layers: int = 2) -> Any:
    """H3's transformer with random weights, four heads of 64."""
    torch.manual_seed(0)
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=4, attention_head_dim=64, hidden_size=32, num_layers=num_layers, num_refiner_layers=1, ffn_dim=48,
        in_channels=4, audio_in_channels=4, text_dim=8, freq_dim=16, time_embed_hidden_dim=16, time_embed_dim=8, rope_freq_dim=8,
    ).eval()  # fmt: skip


def packed_inputs() -> dict[str, Any]:
    """Everything its forward takes, for text, a keyframe, sound and video on `GRID`."""
    torch.manual_seed(1)
    tags = torch.zeros(ROWS, dtype=torch.long)
    tags[:TEXT], tags[TEXT + GIVEN : FIRST] = 1, 2
    return {
        "hidden_states": torch.randn(1, GIVEN + math.prod(GRID), 16),
        "audio_hidden_states": torch.randn(1, AUDIO, 4),
        "encoder_hidden_states": torch.randn(1, TEXT, 8),
        "timestep": torch.tensor([0.4]),
        "timestep_indices": torch.zeros(ROWS, dtype=torch.long),
        "token_tags": tags,
        "position_ids": torch.rand(ROWS, 3, dtype=torch.float64) * 20,
        "video_indices": torch.cat([torch.arange(TEXT, TEXT + GIVEN), torch.arange(FIRST, ROWS)]),
        "audio_indices": torch.arange(TEXT + GIVEN, FIRST),
        "text_indices": torch.arange(TEXT),
        "return_dict": False,
    }
