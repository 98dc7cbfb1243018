"""The savings of a recipe as frozen values, checked when made; imports no torch and attaches nothing."""

from dataclasses import dataclass

from videogen.checks import check_flag
from videogen.errors import bad

MATMULS = ("model", "auto", "bfloat16", "float8")
MAX_COUNT = 4096


@dataclass(frozen=True, slots=True)
class Savings:
    """Work a recipe does not do twice, each part with its switch; by default diffusers' own computation runs untouched.

    adaln_tables to lean_loop and encodings (how many are kept) are bit-identical, and so is decode_batch (VAE tiles in one
    call, 0 is stock) at 1; a larger one, kernels and matmul are close: docs/speed.md has their bounds. park_adaln keeps the
    projections behind the tables in host memory. attention is `model`, the name of a back end of diffusers, or `auto`: what
    `videogen doctor --save` found fastest on this device. matmul is `model` (the weights' own arithmetic), `bfloat16`, or
    `auto`: bfloat16 on a CPU where doctor found that faster or, unasked, that has instructions for it. `float8` is approximate.
    """

    adaln_tables: bool = False
    park_adaln: bool = False
    refined_text: bool = False
    rope_tables: bool = False
    text_cut: bool = False
    lean_loop: bool = False
    encodings: int = 0
    decode_batch: int = 0
    kernels: bool = False
    attention: str = "model"
    matmul: str = "model"

    def __post_init__(self) -> None:
        for name in ("adaln_tables", "park_adaln", "refined_text", "rope_tables", "text_cut", "lean_loop", "kernels"):
            check_flag(f"savings {name}", getattr(self, name))
        for name in ("encodings", "decode_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
                raise bad(f"savings {name}", value, f"a whole number from 0 to {MAX_COUNT}", f"change {name}")
        if self.matmul not in MATMULS:
            raise bad("savings matmul", self.matmul, f"one of {', '.join(MATMULS)}", "change matmul")
        if not isinstance(self.attention, str) or not self.attention:
            raise bad("savings attention", self.attention, "model, auto, or a back end of diffusers", "change attention")
        if self.park_adaln and not self.adaln_tables:
            raise bad("savings park_adaln without adaln_tables", True, "both", "switch adaln_tables on, or park_adaln off")


UNTOUCHED = Savings()
