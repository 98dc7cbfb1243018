"""The ladder from sparse to dense, head by head: decided on measured errors, without tensors.

A head that is too far off is widened once, then dense. A layer that is too far off on average although its heads were widened,
or without any head to blame, is dense. With too many layers dense, the request is. All of it holds for the rest of the request.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from videogen.attention.options import Guard


@dataclass(frozen=True, slots=True)
class Verdict:
    """What changes in one layer: heads to widen, heads to make dense, and why the whole layer is to be dense, if it is."""

    widen: tuple[int, ...] = ()
    dense: tuple[int, ...] = ()
    layer: str = ""

    @property
    def is_calm(self) -> bool:
        """Whether nothing changes."""
        return not (self.widen or self.dense or self.layer)


def judge(errors: Sequence[float], widened: frozenset[int], dense: frozenset[int], guard: Guard) -> Verdict:
    """A layer's verdict from the relative L2 error of each head; `widened` and `dense` are the heads that were made so before."""
    if not all(math.isfinite(error) for error in errors):
        return Verdict(layer="not finite")
    mean = sum(errors) / len(errors)
    far = [head for head, error in enumerate(errors) if error > guard.head and head not in dense]
    if mean > guard.layer and (widened or not far):
        return Verdict(layer=f"mean error {mean:.3f} above {guard.layer:g}")
    return Verdict(tuple(head for head in far if head not in widened), tuple(head for head in far if head in widened))


def judge_request(dense_layers: Mapping[int, str], num_layers: int, guard: Guard) -> str:
    """Why the rest of the request is to be dense, or an empty text."""
    share = len(dense_layers) / num_layers
    return f"{len(dense_layers)} of {num_layers} layers dense, more than {guard.request:.0%}" if share > guard.request else ""


def is_probed(layer: int, forward: int, guard: Guard) -> bool:
    """Whether a layer's turn comes at the `forward`-th sparse forward (from 0): every `every`, a fifth of the layers in turn."""
    return forward % guard.every == 0 and (layer + forward // guard.every) % 5 == 0
