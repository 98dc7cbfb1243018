"""Weights that live in host memory and visit a device: a stack's blocks two at a time, the next one copied while one runs.

A block's weights lie together in one page-locked stretch, so that a visit is one copy at the link's speed, and of their own size: torch's
`pin_memory` rounds every tensor up to a power of two, which makes 62.5 GiB of the 35.9 of H3's blocks.
"""

import logging
import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

_APART = 512  # bytes between the beginnings of two tensors divide by it, as the CUDA allocator's do
_MARK, _TURNS = "_videogen_visits", "_videogen_turns"


def comes_alone(tensor: torch.Tensor) -> bool:
    """Whether a parameter comes to its device when its block runs, so that nobody else is to bring it."""
    return getattr(tensor, _MARK, False)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Home:
    """Where some parameters live: one stretch of host memory, page-locked where the device is CUDA."""

    parameters: list[nn.Parameter]
    memory: torch.Tensor  # bytes
    at_home: list[torch.Tensor]

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' tensors in a stretch of memory, on any device, that is laid out as this one."""
        found, at = [], 0
        for parameter in self.parameters:
            found.append(memory[at : at + parameter.nbytes].view(parameter.dtype).view(parameter.shape))
            at += _room(parameter)
        return found

    def visit(self, memory: torch.Tensor) -> None:
        """Begin the copy to a device's memory; from here on the parameters are what lies there."""
        memory[: len(self.memory)].copy_(self.memory, non_blocking=True)
        for parameter, view in zip(self.parameters, self.views(memory)):
            parameter.data = view

    def leave(self) -> None:
        """Back to the host's own tensors; nothing is copied, weights do not change on a device."""
        for parameter, view in zip(self.parameters, self.at_home):
            parameter.data = view


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _APART) * _APART


def settle_down(parameters: Iterable[nn.Parameter], device: torch.device) -> Home:
    """Move parameters into a stretch of host memory of their own, whence they visit `device`."""
    unique = list({id(each): each for each in parameters}.values())
    size = sum(map(_room, unique))
    memory = _pages(size)
    home = Home(unique, memory, [])
    home.at_home = home.views(memory)
    for parameter, view in zip(unique, home.at_home):
        view.copy_(parameter.data)
    home.leave()
    if device.type == "cuda" and size:
        _lock(home, device)
    return home


def _pages(size: int) -> torch.Tensor:
    """Bytes on pages of their own, so that nobody else locks one of them; on large pages where the kernel has them."""
    try:
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of host memory: {error}") from error
    with suppress(OSError, AttributeError):  # a Linux kernel's
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:size]


def _lock(home: Home, device: torch.device) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = home.memory.data_ptr()
    code = int(runtime.cudaHostRegister(address, len(home.memory), 0))
    if code:
        with suppress(RuntimeError):  # the error stays behind, and the next kernel would be blamed for it
            torch.zeros(1, device=device)
        logger.warning("host memory is not page-locked (CUDA error %d): weights visit more slowly", code)
        return
    weakref.finalize(home, _unlock, runtime, address).atexit = False


def _unlock(runtime: Any, address: int) -> None:
    with suppress(RuntimeError):  # a copy may be under way where a clip was given up
        torch.cuda.synchronize()
    runtime.cudaHostUnregister(address)


@dataclass(slots=True, eq=False)
class _Room:
    """Device memory for one block: which one is there or under way, when it has arrived, and when what was there before is done with."""

    memory: torch.Tensor
    free: Any
    guest: int | None = None
    arrived: Any = None


class Turns:
    """The blocks of one stack on their way between host and device: never more than two there, and none when the stack is done."""

    def __init__(self, homes: Sequence[Home], device: torch.device) -> None:
        self.homes, self.device = homes, device
        make_lane: Any = torch.cuda.Stream
        self._lane = make_lane(device) if device.type == "cuda" else None
        self._rooms: list[_Room] = []

    def begin(self, index: int) -> None:
        """A block is about to run: it is waited for, and the next one is sent for."""
        wanted = [number for number in (index, index + 1) if number < len(self.homes)]
        if not self._rooms:
            size = max(len(home.memory) for home in self.homes)
            self._rooms = [_Room(torch.empty(size, dtype=torch.uint8, device=self.device), self._now()) for _ in range(2)]
        for room in self._rooms:
            if room.guest is not None and room.guest not in wanted:  # of a block that was skipped
                self._empty(room)
        for number in wanted:
            if not any(room.guest == number for room in self._rooms):
                self._send(number, next(room for room in self._rooms if room.guest is None))
        self._wait_for(next(room for room in self._rooms if room.guest == index))

    def end(self, index: int) -> None:
        """A block has run."""
        for room in self._rooms:
            if room.guest == index:
                self._empty(room)

    def close(self) -> None:
        """All are at home, and the device's memory is given back."""
        for room in self._rooms:
            if room.guest is not None:
                self._empty(room)
        self._rooms = []

    def _now(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event() if self._lane is not None else None

    def _send(self, number: int, room: _Room) -> None:
        with nullcontext() if self._lane is None else torch.cuda.stream(self._lane):
            if self._lane is not None:
                self._lane.wait_event(room.free)
            self.homes[number].visit(room.memory)
            room.arrived = None if self._lane is None else self._lane.record_event()
        room.guest = number

    def _wait_for(self, room: _Room) -> None:
        if room.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(room.arrived)

    def _empty(self, room: _Room) -> None:
        assert room.guest is not None
        self._wait_for(room)  # what is under way lands before its memory is anyone else's
        self.homes[room.guest].leave()
        room.guest, room.free = None, self._now()


def take_turns(owner: nn.Module, blocks: Sequence[Sequence[nn.Module]], device: torch.device) -> None:
    """From here on the weights of `blocks`, each the modules of one in the order that they run, visit `device` while `owner` runs.

    Whatever the owner's forward skips or raises, afterwards every block is at home, so that adapters are written where weights live.
    Raises ValueError where two blocks share a parameter.
    """
    if not blocks:
        return
    homes = [settle_down((p for part in parts for p in part.parameters()), device) for parts in blocks]
    turns = Turns(homes, device)
    for parameter in (parameter for home in homes for parameter in home.parameters):
        if comes_alone(parameter):
            raise ValueError("a parameter of two blocks cannot visit with both")
        setattr(parameter, _MARK, True)

    def at(step: Callable[[int], None], index: int) -> Callable[..., None]:
        return lambda *_: step(index)

    for index, parts in enumerate(blocks):
        parts[0].register_forward_pre_hook(at(turns.begin, index))
        parts[-1].register_forward_hook(at(turns.end, index))
    stock = owner.forward

    @wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return stock(*args, **kwargs)
        finally:  # a hook is not called for Ctrl-C
            turns.close()

    owner.forward = forward
    setattr(owner, _TURNS, turns)


def send_home(model: nn.Module) -> None:
    """Send home whatever blocks of a model are away: they stay where one was run by itself, outside its owner's forward."""
    for module in model.modules():
        turns: Turns | None = getattr(module, _TURNS, None)
        if turns is not None:
            turns.close()


def largest_stack(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The module that runs the list of blocks which holds most of a model's weights, and those blocks. Raises ValueError without one."""
    stacks = [(owner, each) for owner in model.modules() for each in owner.children() if isinstance(each, nn.ModuleList)]
    owner, blocks = max(stacks, key=lambda found: sum(p.nbytes for p in found[1].parameters()))
    return owner, [*blocks]
