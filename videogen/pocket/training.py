"""What every training stage shares: a JSONL log, a time-based schedule, averaged weights, checkpoints and captured steps."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)


class Log:
    """Appends one JSON object a line to a file and echoes it; `t` counts seconds since the stage began."""

    def __init__(self, path: Path, stage: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self._stage, self._start = stage, time.perf_counter()

    def __call__(self, **facts: Any) -> None:
        row = {"stage": self._stage, "t": round(self.seconds(), 1), **{k: _plain(v) for k, v in facts.items()}}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        log.info("%s", json.dumps(row))

    def seconds(self) -> float:
        """Seconds since the stage began."""
        return time.perf_counter() - self._start


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.tolist() if value.ndim else value.item()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def rate_at(done: float, *, warm: float = 0.02, hold: float = 0.4) -> float:
    """Learning-rate factor at the share `done` of a stage: linear warm-up, a plateau, then a cosine down to 2 %."""
    if done < warm:
        return done / warm
    if done < hold:
        return 1.0
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - hold) / (1 - hold))))


class Average:
    """An exponential moving average of parameters, kept beside the model."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], decay: float) -> None:
        self.live = [p for p in parameters if p.requires_grad]
        self.mean = [p.detach().clone() for p in self.live]
        self.decay = decay

    def update(self) -> None:
        """Move the averages towards the live weights."""
        torch._foreach_lerp_(self.mean, [p.detach() for p in self.live], 1 - self.decay)

    def swap(self) -> None:
        """Exchange averages and live weights; call twice to return."""
        for mean, live in zip(self.mean, self.live):
            held = live.detach().clone()
            live.data.copy_(mean)
            mean.copy_(held)


def adamw(parameters: Iterable[torch.nn.Parameter], rate: float, device: torch.device, decay: float = 0.01) -> torch.optim.AdamW:
    """AdamW whose learning rate is a tensor, so that a captured step can be given another one."""
    on_gpu = device.type == "cuda"
    lr = torch.tensor(rate, device=device) if on_gpu else rate
    return torch.optim.AdamW(
        [p for p in parameters if p.requires_grad], lr=lr, betas=(0.9, 0.95), weight_decay=decay, fused=on_gpu, capturable=on_gpu
    )


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Give every group another learning rate, in place where it is a tensor."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def optimise(
    loss_of: Callable[[], torch.Tensor], optimiser: torch.optim.Optimizer, average: Average | None = None
) -> Callable[[], torch.Tensor]:
    """One whole training step (forward, backward, clip, update, average) as a function without arguments; returns the loss."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]

    def step() -> torch.Tensor:
        optimiser.zero_grad(set_to_none=False)
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimiser.step()
        if average is not None:
            average.update()
        return loss.detach()

    return step


def captured(
    step: Callable[[], torch.Tensor], device: torch.device, *, warm: int = 3, record: bool = True, pool: Any = None
) -> Callable[[], torch.Tensor]:
    """The step as one CUDA graph (these nets are launch-bound: 3-10 times the steps a second); on a CPU the step itself.

    It really runs `warm` times first, on a side stream; with `record` false that is all. Graphs of one `pool` share memory.
    """
    if device.type != "cuda":
        for _ in range(warm if not record else 0):
            step()
        return step
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            step()
    torch.cuda.current_stream().wait_stream(side)
    if not record:
        return step
    graph = torch.cuda.CUDAGraph()
    # other threads (NCCL's watchdog) may ask the driver things meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def save_state(path: Path, **parts: Any) -> None:
    """Write a checkpoint so that an interruption leaves the previous one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = path.with_suffix(".part")
    torch.save(parts, held)
    held.replace(path)


def load_state(path: Path, device: torch.device) -> dict[str, Any] | None:
    """A checkpoint written by `save_state`, or None where there is none."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state
