"""The step cache on a batch, every clip deciding for itself: one real `caches.step_hook.State` per clip around one shared stack.

Scores, decisions and predictions are the production code's, on slices of one clip. What differs is that the blocks run on the clips that
compute, gathered into parts of one fixed width, so that a clip's arithmetic does not depend on what its neighbours decided.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from caches.policy import Budget
from caches.step_hook import Channel, State, replaced
from caches.trace import Trace


class _First(nn.Module):
    def __init__(self, block: nn.Module, states: Sequence[State]) -> None:
        super().__init__()
        self.block, self.states = block, states

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Run the first block on all, then let each clip decide."""
        out: torch.Tensor = self.block(hidden_states, *args, **kwargs)
        for k, state in enumerate(self.states):
            state.look(hidden_states[k : k + 1], out[k : k + 1])
        return out


class _Rest(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module], states: Sequence[State], width: int) -> None:
        super().__init__()
        self.blocks, self.states, self.width = nn.ModuleList(blocks), states, width

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Run the blocks for the clips that compute, predict the others."""
        computing = [k for k, state in enumerate(self.states) if not state.is_reusing]
        out = hidden_states.clone()
        for begin in range(0, len(computing), self.width):
            part = computing[begin : begin + self.width]
            hidden = hidden_states[part + part[-1:] * (self.width - len(part))]
            for block in self.blocks:
                hidden = block(hidden, *args, **kwargs)
            out[part] = hidden[: len(part)]
        for k, state in enumerate(self.states):
            own = hidden_states[k : k + 1]
            if state.is_reusing:
                out[k : k + 1] = state.predict(own)
            else:
                state.keep(own, out[k : k + 1])
            state.finish()
        return out


@contextmanager
def batched_cache(
    owner: nn.Module, stack: str, channels: Mapping[str, Channel], budget: Budget, *, clips: int, width: int
) -> Iterator[list[Trace]]:
    """Cache the steps of `clips` requests that run as one batch; `width` clips share a pass through the stack.

    Yields one trace a clip. At lambda 0 every step is computed by the same passes, so that a cached clip and its dense one
    differ by what was reused alone.
    """
    blocks: nn.ModuleList = getattr(owner, stack)
    states = [State(budget, channels) for _ in range(clips)]
    with replaced(owner, stack, [_First(blocks[0], states), _Rest(list(blocks)[1:], states, width)]):
        yield [state.trace for state in states]
