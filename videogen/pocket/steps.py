"""Training steps as CUDA graphs: gradients of one bucket's batch, their mean over the ranks, then one captured update."""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from videogen.pocket.muon import Muon
from videogen.pocket.ranks import Ranks, flat_gradients
from videogen.pocket.training import Average, adamw, captured, set_rate

STACKS = ("transformer_blocks", "token_refiner")  # their matrices are Muon's; all else is AdamW's


class Steps:
    """Optimisers, averages and the captured graphs of a model; `key` names a batch shape in calls."""

    def __init__(self, model: Any, ranks: Ranks, *, rate: float, muon_rate: float) -> None:
        self.ranks, self.rates = ranks, (rate, muon_rate)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        chosen = [p for name, p in named if muon_rate and p.ndim == 2 and name.startswith(STACKS) and "adaln" not in name]
        taken = {id(p) for p in chosen}
        self.parameters = [p for _, p in named]
        ranks.share([p.data for p in self.parameters])
        self.flat = flat_gradients(self.parameters)
        self.average = Average(self.parameters, 0.999)
        self.adam = adamw([p for p in self.parameters if id(p) not in taken], rate, ranks.device)
        self.muon = Muon(chosen, muon_rate) if chosen else None
        self._graphs: dict[Hashable, Callable[[], torch.Tensor]] = {}
        self._seen: set[Hashable] = set()
        self._finish: Callable[[], torch.Tensor] | None = None
        self._pool = torch.cuda.graph_pool_handle() if ranks.device.type == "cuda" else None

    def set_rate(self, factor: float) -> None:
        """Both learning rates as a share of their peaks."""
        set_rate(self.adam, self.rates[0] * factor)
        if self.muon is not None:
            set_rate(self.muon, self.rates[1] * factor)

    def __call__(self, key: Hashable, loss_of: Callable[[], torch.Tensor]) -> None:
        """One step. A shape's first batch runs eagerly, its second is captured, later ones are replayed with fresh random numbers."""

        def gradient() -> torch.Tensor:
            self.flat.zero_()
            loss = loss_of()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        on_gpu = self.ranks.device.type == "cuda"
        if not on_gpu:
            gradient()
        elif key not in self._seen:
            self._seen.add(key)
            captured(gradient, self.ranks.device, warm=1, record=False)
        else:
            if key not in self._graphs:
                self._graphs[key] = captured(gradient, self.ranks.device, warm=0, pool=self._pool)
            self._graphs[key]()
        self.ranks.mean(self.flat)
        if not on_gpu:
            self._update()
        elif self._finish is None:
            self._finish = captured(self._update, self.ranks.device, warm=1)
        else:
            self._finish()

    def _update(self) -> torch.Tensor:
        norm: torch.Tensor = torch.linalg.vector_norm(self.flat)
        self.flat.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        self.adam.step()
        if self.muon is not None:
            self.muon.step()
        self.average.update()
        return norm

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model."""
        return {
            "average": self.average.mean,
            "adam": self.adam.state_dict(),
            "muon": self.muon.state_dict() if self.muon is not None else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint's averages and moments; before the first step."""
        for held, saved in zip(self.average.mean, state["average"], strict=True):
            held.copy_(saved)
        self.adam.load_state_dict(state["adam"])
        if self.muon is not None and state["muon"] is not None:
            self.muon.load_state_dict(state["muon"])
