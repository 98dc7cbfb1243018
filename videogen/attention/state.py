"""One request under sparse attention: how every layer attends in this forward, what the guard found, what the record says.

Counting and deciding happen between forwards, outside the blocks, so that a compiled block sees a few settings and tensors only.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from videogen.attention.blocks import Blocks
from videogen.attention.dense import dense
from videogen.attention.guard import is_probed, judge, judge_request
from videogen.attention.options import Guard, SparseAttention
from videogen.attention.route import Pooled, Route, band_mask, head_budgets, list_width, mean_budget, priorities, select
from videogen.attention.select import Choice
from videogen.errors import EnvironmentFault, say

# Sums over ranks, in place of nothing on one device; every rank calls it at the same forwards.
Agree = Callable[[torch.Tensor], torch.Tensor]
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Pool = Callable[..., Pooled]

DENSE, FIRST, PROBE, SPARSE = "dense", "first", "probe", "sparse"


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of the model, and those of this rank: `local` from `offset` on, budgets balanced within groups of `group`."""

    total: int
    local: int
    offset: int = 0

    @property
    def mine(self) -> slice:
        """Those of this rank among all."""
        return slice(self.offset, self.offset + self.local)

    @property
    def group(self) -> int:
        """An eighth of the heads, or half where they are few."""
        return self.total // 8 if self.total >= 32 and self.total % 8 == 0 else self.total // 2 if self.total % 2 == 0 else self.total


@dataclass(slots=True, eq=False)
class Layer:
    """One layer. budgets and errors (local heads,) are views of the request's tensors."""

    budgets: torch.Tensor
    errors: torch.Tensor
    mode: str = DENSE
    has_run: bool = False  # in this forward
    is_started: bool = False
    is_watched: bool = False
    is_stale: bool = True
    route: Route | None = None
    uncounted: int = 0  # sparse calls since budgets were last read


@dataclass(slots=True, eq=False)
class Request:
    """Everything sparse attention keeps for one request; dies with its scope."""

    options: SparseAttention
    choice: Choice
    blocks: Blocks
    heads: Heads
    attend_blocks: Attend
    pool: Pool
    forwards: int
    agree: Agree
    budgets: torch.Tensor  # (layers, local heads) int32
    errors: torch.Tensor  # (layers, local heads) float32
    band: torch.Tensor
    layers: list[Layer] = field(default_factory=list)
    step: int = 0
    executed: int = 0
    sparse_forwards: int = 0
    reason: str = ""  # why the rest of the request is dense
    dense_layers: dict[int, str] = field(default_factory=dict)
    widened: dict[int, frozenset[int]] = field(default_factory=dict)
    dense_heads: dict[int, frozenset[int]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    kept: float = 0.0
    probes: list[float] = field(default_factory=list)
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    draw: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def mean_budget(self) -> int:
        """Key blocks per query block that a head gets on average."""
        assert self.options.budget is not None
        return mean_budget(self.options.budget, self.blocks)

    @property
    def width(self) -> int:
        """The longest list."""
        assert self.options.budget is not None
        return list_width(self.options.budget, self.blocks)

    def begin(self) -> None:
        """Before a forward: settle how each layer attends, if it comes to run."""
        shared, guard = self._reason(), self.options.guard
        for index, layer in enumerate(self.layers):
            layer.has_run = False
            is_turn = guard is not None and (layer.is_watched or is_probed(index, self.sparse_forwards, guard))
            is_dense = bool(shared or index in self.dense_layers)
            layer.mode = DENSE if is_dense else FIRST if not layer.is_started else PROBE if is_turn else SPARSE
            layer.is_stale = self.sparse_forwards % self.options.refresh == 0 or layer.route is None
        if any(layer.mode in (FIRST, PROBE) for layer in self.layers):
            rows = torch.randint(self.blocks.first, self.blocks.rows, ((guard or Guard()).rows,), generator=self.draw)
            self.rows = rows.to(self.budgets.device)

    def _reason(self) -> str:
        if self.reason:
            return self.reason
        if self.executed < math.ceil(self.options.dense_first * self.forwards):
            return "first forwards"
        return "last forwards" if self.step >= self.forwards - self.options.dense_last else ""

    def refuse(self, layer: Layer, reason: str) -> None:
        """What cannot be done sparsely is done densely from here on, or is an EnvironmentFault, as the options say."""
        if self.options.on_unsupported == "error":
            raise EnvironmentFault(say("sparse attention", reason, "none", "drop --sparse-budget, or allow dense"))
        layer.mode, self.reason = DENSE, reason

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of one layer over the whole sequence and this rank's heads, (B, S, H, D)."""
        if query.shape[1] != self.blocks.rows:
            raise ValueError(f"sparse attention: got {query.shape[1]} rows, expected {self.blocks.rows}; open a scope for this layout")
        pooled = self.pool(query, key, value, self.blocks)
        route = layer.route
        if route is None or layer.is_stale:
            route = select(priorities(pooled, self.options.tail), self.band, layer.budgets, self.width)
            layer.route = route if self.options.refresh > 1 else None
        out, _ = self.attend_blocks(query, key, value, self.blocks, route, pooled, self.options.tail)
        if layer.mode != SPARSE:
            apart, size = row_errors(query, key, value, out, self.rows)
            layer.errors.copy_(apart / size)
            if layer.mode == FIRST and self.options.per_head:
                least, group, mine = self.blocks.widest_band, self.heads.group, self.heads.mine
                everyone = head_budgets(self._everywhere(apart).sqrt(), self.mean_budget, least, self.width, group)
                layer.budgets.copy_(everyone[mine])
                layer.route = None
        return out

    def _everywhere(self, local: torch.Tensor) -> torch.Tensor:
        """Values (..., local heads) of every rank as (..., all heads) on all of them."""
        whole = local.new_zeros(*local.shape[:-1], self.heads.total)
        whole[..., self.heads.mine] = local
        return self.agree(whole)

    def end(self) -> None:
        """After a forward: count what ran, and let the guard look at what was probed."""
        shared = self._reason()
        ran = [(index, layer) for index, layer in enumerate(self.layers) if layer.has_run]
        for index, layer in ran:
            is_dense = layer.mode == DENSE
            self.calls[(shared or self.dense_layers[index]) if is_dense else SPARSE] += 1
            layer.uncounted += not is_dense
            layer.is_started |= not is_dense
        probed = [index for index, layer in ran if layer.mode in (FIRST, PROBE)]
        self.step += 1
        if self.layers[-1].has_run:  # a reused step of a cache runs the first block only
            self.executed += 1
            self.sparse_forwards += any(layer.mode != DENSE for _, layer in ran)
        if probed and self.options.guard is not None:
            self._judge(probed)

    def _judge(self, probed: list[int]) -> None:
        """The only place where the host waits for the device."""
        guard = self.options.guard
        assert guard is not None
        read = torch.cat([self._everywhere(self.errors).flatten(), self.budgets.flatten().float()]).tolist()
        errors = [read[k * self.heads.total : (k + 1) * self.heads.total] for k in range(len(self.layers))]
        self._count(torch.tensor(read[len(self.layers) * self.heads.total :]).view(len(self.layers), -1))
        for index in probed:
            self.probes += errors[index]
            widened, dense_heads = (kept.get(index, frozenset()) for kept in (self.widened, self.dense_heads))
            verdict = judge(errors[index], widened, dense_heads, guard)
            self.layers[index].is_watched = not verdict.is_calm
            self.widened[index], self.dense_heads[index] = widened | {*verdict.widen}, dense_heads | {*verdict.dense}
            if verdict.layer:
                self.dense_layers[index] = verdict.layer
            for head in (*verdict.widen, *verdict.dense):
                self._widen(index, head, is_dense=head in verdict.dense)
        self.reason = judge_request(self.dense_layers, len(self.layers), guard)

    def _widen(self, index: int, head: int, *, is_dense: bool) -> None:
        """Double a head's budget, or give it every block; dense also where its list is full."""
        local = head - self.heads.offset
        if 0 <= local < self.heads.local:
            self.layers[index].route = None
            budget = self.layers[index].budgets[local]
            is_full = is_dense | (budget >= self.width)
            budget.copy_(torch.where(is_full, self.blocks.num_k, (2 * budget).clamp_max(self.width)))

    def _count(self, budgets: torch.Tensor) -> None:
        """Add up the key blocks kept since the last time, before budgets change."""
        for layer, budget in zip(self.layers, budgets.float().mean(1).tolist()):
            self.kept += layer.uncounted * budget
            layer.uncounted = 0

    def record(self) -> dict[str, Any]:
        """The sidecar's `attention` entry, over the heads of all ranks; every rank asks for it."""
        self._count(self.budgets.cpu())
        sparse, blocks = self.calls[SPARSE], self.blocks
        kept = self.agree(torch.tensor(self.kept * self.heads.local / self.heads.total, device=self.errors.device))
        density = float(kept) / max(sparse, 1) / blocks.num_k
        told = {"budget": self.options.budget, "tail": self.options.tail, "tile": list(self.choice.tile), "block": list(self.choice.block)}
        exact = blocks.first * blocks.rows + blocks.num_video * (blocks.first + density * blocks.num_video)
        return told | {
            "backend": self.choice.backend,
            "reason": self.reason if sparse else self.reason or "every forward belongs to the dense ones",
            "rows": {"all": blocks.rows, "exact": blocks.first},
            "forwards": {"steps": self.step, "executed": self.executed, "sparse": self.sparse_forwards},
            "calls": dict(sorted(self.calls.items())),
            "kept_blocks": round(density, 4) if sparse else None,
            "exact_pairs": round(exact / blocks.rows**2, 4) if sparse else None,
            "guard": self._guard_record(),
        }

    def _guard_record(self) -> dict[str, Any] | None:
        if self.options.guard is None:
            return None
        finite = sorted(error for error in self.probes if math.isfinite(error))
        return {
            "head_errors": len(self.probes),
            "median": round(finite[len(finite) // 2], 4) if finite else None,
            "worst": round(finite[-1], 4) if finite else None,
            "widened_heads": _pairs(self.widened),
            "dense_heads": _pairs(self.dense_heads),
            "dense_layers": dict(sorted(self.dense_layers.items())),
        }


def _pairs(heads: dict[int, frozenset[int]]) -> list[list[int]]:
    return sorted([layer, head] for layer, found in heads.items() for head in found)


def row_errors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """L2 error of each head's output at `rows` against exact attention, and the size of the latter: (H,) float32; tensors (B, S, H, D)."""
    exact = dense(query[:, rows], key, value).float()
    apart = (out[:, rows].float() - exact).square().sum((0, 1, 3))
    return apart.sqrt(), exact.square().sum((0, 1, 3)).sqrt()


def open_request(
    options: SparseAttention,
    choice: Choice,
    blocks: Blocks,
    heads: Heads,
    num_layers: int,
    device: torch.device,
    *,
    implementation: tuple[Pool, Attend],
    forwards: int,
    agree: Agree,
) -> Request:
    """A request before its first forward: every layer dense, every head at the mean budget."""
    pool, attend = implementation
    budgets = torch.zeros(num_layers, heads.local, dtype=torch.int32, device=device)
    errors = torch.zeros(num_layers, heads.local, device=device)
    request = Request(options, choice, blocks, heads, attend, pool, forwards, agree, budgets, errors, band_mask(blocks, device))
    budgets.fill_(request.mean_budget)
    request.layers = [Layer(budgets[index], errors[index]) for index in range(num_layers)]
    return request
