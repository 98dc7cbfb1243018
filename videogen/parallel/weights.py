"""Where a model's weights live: whole on the device, sharded over the ranks of a clip, or in host memory and visiting: block by block,
or one expert of two at a time.

Attention and feed-forward of every block are what is sharded or visits (of H3 40 of 66 GB, of a Wan expert 28). H3's AdaLN projections
(25) stay in host memory with every kind but `whole`, where the recipe makes tables of them. All compute with the same weights, so outputs
are those of whole weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from videogen.errors import bad
from videogen.parallel.comm import Peers
from videogen.timing import WallClock

KINDS, TEXTS = ("whole", "parked", "fsdp", "offload", "offload-idle"), ("resident", "visiting")


@dataclass(frozen=True, slots=True)
class Placement:
    """How components come to a device: the denoiser as `kind` says (`fsdp` needs the peers of a clip), the text encoder to stay or,
    with `text` `visiting`, once for every prompt that is not kept."""

    kind: str = "whole"
    peers: Peers | None = None
    text: str = "resident"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise bad("--weights", self.kind, f"one of {', '.join(KINDS)}", "change --weights")
        if self.text not in TEXTS:
            raise bad("--text-encoder", self.text, f"one of {', '.join(TEXTS)}", "change --text-encoder")
        if self.kind == "fsdp" and (self.peers is None or self.peers.count < 2):
            raise bad("--weights", "fsdp", "several ranks of one clip", "add --ulysses, or use --weights offload")

    def is_hosted(self, name: str) -> bool:
        """Whether a component must be loaded into host memory first."""
        return (self.kind != "whole" and name.startswith("transformer")) or (self.text == "visiting" and name == "text_encoder")

    def is_elsewhere(self, name: str) -> bool:
        """Whether only the first rank of a clip needs a component."""
        return name == "text_encoder" and self.peers is not None and self.peers.rank > 0

    def place(self, name: str, module: nn.Module, device: torch.device) -> nn.Module:
        """The component on its device, or as far as it belongs there."""
        if not self.is_hosted(name):
            return module.to(device)
        if name == "text_encoder":
            park(module, device)
        elif self.kind == "fsdp":
            assert self.peers is not None
            shard(module, self.peers, device)
        elif self.kind == "offload":
            stream(module, device)
        elif self.kind == "offload-idle":
            wait_at_home(module, device)
        else:
            _move_rest(module, device, is_large_moved=True)
        return module


WHOLE = Placement()
_HOME = "_videogen_home"


def _blocks(transformer: Any) -> Any:
    """The block stack: H3's, or Wan's."""
    return transformer.transformer_blocks if hasattr(transformer, "transformer_blocks") else transformer.blocks


def _parts(block: Any) -> tuple[nn.Module, ...]:
    """What of a block is sharded or visits, in the order it runs."""
    return (block.attn, block.ff) if hasattr(block, "attn") else (block.attn1, block.attn2, block.ffn)


def _move_rest(transformer: Any, device: torch.device, *, is_large_moved: bool = False) -> None:
    """Everything to the device but the AdaLN projections and, unless they move too, the blocks' large parts."""
    staying = [block.adaln_proj for block in _blocks(transformer) if hasattr(block, "adaln_proj")]
    staying += [] if is_large_moved else [part for block in _blocks(transformer) for part in _parts(block)]
    large = {id(tensor) for part in staying for tensor in part.parameters()}
    for tensor in (*transformer.parameters(), *transformer.buffers()):
        if id(tensor) not in large:
            tensor.data = tensor.data.to(device)


def park(module: nn.Module, device: torch.device) -> None:
    """Parameters stay in host memory, pinned where the device is CUDA; buffers, which do not visit, go to the device."""
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
    if device.type == "cuda":
        for parameter in module.parameters():
            parameter.data = parameter.data.pin_memory()


def shard(transformer: Any, peers: Peers, device: torch.device) -> None:
    """Fully sharded (FSDP2, as accelerate does it) over the peers: a part is gathered before it runs and let go after it.

    Ranks skip the same blocks, because they decide together, so a step cache works.
    """
    mesh = DeviceMesh.from_group(peers.group, device.type)
    _move_rest(transformer, device)
    for block in _blocks(transformer):
        for part in _parts(block):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
    large = {id(each) for block in _blocks(transformer) for part in _parts(block) for each in part.parameters()}
    # a root without parameters of its own, so that one part is gathered while another computes
    fully_shard(transformer, mesh=mesh, ignored_params={each for each in transformer.parameters() if id(each) not in large})


@dataclass(slots=True)
class _Visitor:
    """The large parts of one block or expert: their home in host memory, and whether they are on the device or under way."""

    parameters: list[nn.Parameter]
    homes: list[torch.Tensor] = field(default_factory=list)
    is_here: bool = False
    arrived: Any = None

    def come(self, device: torch.device, lane: Any) -> None:
        """Begin the copy, on a lane of its own where there is one."""
        if self.is_here:
            return
        self.is_here, self.homes = True, [parameter.data for parameter in self.parameters]
        with nullcontext() if lane is None else torch.cuda.stream(lane):
            for parameter in self.parameters:
                parameter.data = parameter.data.to(device, non_blocking=True, copy=True)
        self.arrived = lane.record_event() if lane is not None else None

    def wait(self) -> None:
        """Let computing begin after the copy, and the memory go only after computing."""
        if self.arrived is not None:
            now = torch.cuda.current_stream()
            now.wait_event(self.arrived)
            for parameter in self.parameters:
                parameter.data.record_stream(now)

    def leave(self) -> None:
        """Back to the host's own tensors; nothing is copied, weights do not change on a device."""
        if self.is_here:
            for parameter, home in zip(self.parameters, self.homes):
                parameter.data = home
            self.is_here = False


def stream(transformer: Any, device: torch.device) -> None:
    """From here on the blocks' large parts visit the device, the next block's while one runs; pinned where the device is CUDA."""
    _move_rest(transformer, device)
    visitors = [_Visitor([p for part in _parts(block) for p in part.parameters()]) for block in _blocks(transformer)]
    make_lane: Any = torch.cuda.Stream
    lane = make_lane(device) if device.type == "cuda" else None
    _pin(visitors, device)

    def before(index: int) -> Any:
        def hook(*_: object) -> None:
            for other in visitors[:index] + visitors[index + 2 :]:
                other.leave()  # those of blocks that were skipped
            visitors[index].come(device, lane)
            visitors[index].wait()
            if index + 1 < len(visitors):
                visitors[index + 1].come(device, lane)

        return hook

    def after(index: int) -> Any:
        return lambda *_: visitors[index].leave()

    for index, block in enumerate(_blocks(transformer)):
        first, *_, last = _parts(block)
        first.register_forward_pre_hook(before(index))
        last.register_forward_hook(after(index))


def _pin(visitors: Sequence[_Visitor], device: torch.device) -> None:
    if device.type == "cuda":
        for visitor in visitors:
            for parameter in visitor.parameters:
                parameter.data = parameter.data.pin_memory()


def wait_at_home(transformer: Any, device: torch.device) -> None:
    """The blocks' large parts of an expert stay in host memory, pinned where the device is CUDA, until `taking_turns` calls for them."""
    _move_rest(transformer, device)
    visitor = _Visitor([parameter for block in _blocks(transformer) for part in _parts(block) for parameter in part.parameters()])
    _pin([visitor], device)
    setattr(transformer, _HOME, visitor)


@contextmanager
def taking_turns(transformers: Sequence[Any], device: torch.device) -> Iterator[list[dict[str, int | float]]]:
    """Inside the scope an expert that waits in host memory comes to the device when it is asked and goes when another one is.

    Yields the moves as they happen: which expert, after how many forwards, its bytes, and the seconds that all waited. Afterwards all
    are at home, so that adapters are written where the weights live. Experts that do not wait there are left alone.
    """
    visitors: list[Any] = [getattr(transformer, _HOME, None) for transformer in transformers]
    moves: list[dict[str, int | float]] = []
    asked, clock = [0], WallClock()
    finish: Callable[[], None] = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None

    def come(expert: int) -> None:
        for other in visitors[:expert] + visitors[expert + 1 :]:
            if other is not None:
                other.leave()
        visitor = visitors[expert]
        if not visitor.is_here:
            finish()
            began = clock.now()
            visitor.come(device, None)
            finish()
            num_bytes = sum(parameter.nbytes for parameter in visitor.parameters)
            moves.append({"expert": expert, "forwards": asked[0], "num_bytes": num_bytes, "seconds": clock.now() - began})
        asked[0] += 1

    with ExitStack() as stack:
        for expert, (transformer, visitor) in enumerate(zip(transformers, visitors)):
            if visitor is not None:
                stack.callback(visitor.leave)
                stack.callback(transformer.register_forward_pre_hook(lambda *_, expert=expert: come(expert)).remove)
        yield moves
