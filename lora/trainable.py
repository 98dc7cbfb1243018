"""Low-rank updates under training: stacked by shape so that a step merges them in few products, and their way into a file."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from lora.adapter import Adapter, Factors
from lora.contract import Contract, resolve_contract
from lora.convert import load_adapter
from lora.errors import bad
from lora.target import Target
from lora.write import write_adapter

LAYOUT = "diffusers-bare"  # no prefix: it would name one partition, and what we train may serve both
_MAX_ROUNDING = 0.01  # of an update's norm; bfloat16 factors lose about 0.3 %


class LowRank(nn.Module):
    """Trainable factors of many linear weights, with alpha = rank: the update is `up @ down`, and zero at the start.

    `weights` are the frozen originals by module name, `ranks` say which modules are trained. Modules of one shape and rank share one
    stack: `down` (n, r, in), `up` (n, out, r).
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], ranks: Mapping[str, int], *, seed: int = 0) -> None:
        super().__init__()
        groups: dict[tuple[torch.Size, int], list[str]] = defaultdict(list)
        for name, rank in ranks.items():
            if name not in weights or weights[name].ndim != 2 or not 1 <= rank <= min(weights[name].shape):
                shape = tuple(weights[name].shape) if name in weights else "no weight"
                raise bad("trained module", f"{name} ({shape}) at rank {rank}", "a matrix and a rank it can hold", "lower the rank")
            groups[weights[name].shape, rank].append(name)
        generator = torch.Generator().manual_seed(seed)
        self.names = list(groups.values())
        self.bases, self.downs, self.ups = [], nn.ParameterList(), nn.ParameterList()
        for ((rows, columns), rank), names in groups.items():
            base = torch.stack([weights[name].detach().float() for name in names])
            bound = columns**-0.5
            down = (torch.rand(len(names), rank, columns, generator=generator) * 2 - 1) * bound
            self.bases.append(base)
            self.downs.append(nn.Parameter(down.to(base.device)))
            self.ups.append(nn.Parameter(torch.zeros(len(names), rows, rank, device=base.device)))

    def merged(self) -> dict[str, torch.Tensor]:
        """Whole weights by parameter name, float32, with gradients to the factors; for `torch.func.functional_call`."""
        found: dict[str, torch.Tensor] = {}
        for names, base, down, up in zip(self.names, self.bases, self.downs, self.ups):
            for name, weight in zip(names, torch.baddbmm(base, up, down).unbind(0)):
                found[f"{name}.weight"] = weight
        return found

    def adapter(self, name: str, dtype: torch.dtype = torch.float32) -> Adapter:
        """The factors as they are now, on the CPU."""
        factors = {
            module: Factors(down[i].detach().to("cpu", dtype).contiguous(), up[i].detach().to("cpu", dtype).contiguous(), 1.0)
            for names, down, up in zip(self.names, self.downs, self.ups)
            for i, module in enumerate(names)
        }
        return Adapter(name, "", "trained", dict(sorted(factors.items())), {})


def write_trained(student: LowRank, target: Target, path: Path, contract: Contract, notes: Mapping[str, str]) -> float:
    """Write the factors in bfloat16 with their contract inside, replacing `path`; returns the largest relative rounding of an update.

    The file is read again by our own loader: every update must be the trained one within 1 %, and `resolve_contract` must find the same
    contract. Raises ValueError, and leaves no file, otherwise.
    """
    trained = student.adapter(path.stem)
    write_adapter(student.adapter(path.stem, torch.bfloat16), target, LAYOUT, path, contract.to_metadata() | dict(notes), overwrite=True)
    again = load_adapter(path, target)
    found = resolve_contract(str(path), again.metadata, partition=again.partition)
    try:
        if found.to_metadata() != contract.to_metadata():
            raise bad("written contract", found.to_metadata(), str(contract.to_metadata()), "report this as a bug")
        return max(_rounding(name, factors, again) for name, factors in trained.factors.items())
    except ValueError:
        path.unlink()
        raise


def _rounding(name: str, factors: Factors, again: Adapter) -> float:
    wanted = factors.delta()
    off = float((again.factors[name].delta() - wanted).norm() / wanted.norm().clamp(min=1e-12))
    if not off <= _MAX_ROUNDING:
        raise bad("written adapter", f"{name} off by {off:.3g} of the trained update", f"at most {_MAX_ROUNDING:g}", "report this as a bug")
    return off
