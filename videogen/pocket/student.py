"""Which layers of the transformer are trained, and the packed forward with a student's weights in their place."""

from typing import Any

import torch
from torch import nn

from lora.trainable import LowRank
from videogen.pocket.bank import Forward
from videogen.pocket.packed import PackedForward


def trained_modules(model: nn.Module, rank: int, adaln_rank: int) -> dict[str, int]:
    """Module -> rank: attention and feed-forward of the main blocks and the heads; with `adaln_rank` modulation and time embedding."""
    layers = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
    found = {}
    linears = [(name, module.weight.shape) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, shape in linears:
        in_block = name.startswith("transformer_blocks.")
        if (in_block and name.endswith(layers)) or name in ("proj_out", "audio_proj_out"):
            found[name] = min(rank, *shape)
        if adaln_rank and ((in_block and name.endswith("adaln_proj.linear")) or name == "norm_out.linear"):
            found[name] = min(adaln_rank, *shape)
        if adaln_rank and name.startswith("time_embedder."):
            found[name] = min(rank, *shape)
    return found


class Merged(nn.Module):
    """A packed forward whose model is given other weights for one call."""

    def __init__(self, forward: PackedForward) -> None:
        super().__init__()
        self.model, self.packed = forward.model, forward

    def forward(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`PackedForward`'s call."""
        return self.packed(*args)

    def using(self, student: LowRank) -> Forward:
        """The forward with a student's weights, merged once for all calls of this handle."""
        weights = {f"model.{name}": weight for name, weight in student.merged().items()}

        def call(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            out: tuple[torch.Tensor, torch.Tensor] = torch.func.functional_call(self, weights, args, tie_weights=False)
            return out

        return call
