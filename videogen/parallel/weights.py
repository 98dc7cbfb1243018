"""Where a model's weights live: whole on the device, sharded over the ranks of a clip, or in host memory and visiting: block by block,
or one expert of two at a time.

Attention and feed-forward of every block are what is sharded or visits (of H3 38.5 of 66 GB, of a Wan expert 28). H3's AdaLN projections
(26) stay in host memory with every kind but `whole`, where the recipe makes tables of them. All compute with the same weights, so outputs
are those of whole weights.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from videogen.errors import bad
from videogen.parallel.comm import Peers
from videogen.parallel.visits import Home, comes_alone, largest_stack, settle_down, take_turns
from videogen.timing import WallClock

KINDS, TEXTS = ("auto", "whole", "parked", "fsdp", "offload", "offload-idle"), ("auto", "resident", "visiting", "offload")


@dataclass(frozen=True, slots=True)
class Placement:
    """How components come to a device: the denoiser as `kind` says (`fsdp` needs the peers of a clip), the text encoder to stay or, for
    every prompt that is not kept, as a whole (`text` `visiting`) or layer by layer (`offload`). With `kind` `offload` the video decoder's
    blocks visit too. `auto` is settled when a pipeline is opened."""

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
        if name == "text_encoder":
            return self.text != "resident"
        return (self.kind != "whole" and name.startswith("transformer")) or (self.kind == "offload" and name == "vae")

    def is_elsewhere(self, name: str) -> bool:
        """Whether only the first rank of a clip needs a component."""
        return name == "text_encoder" and self.peers is not None and self.peers.rank > 0

    def place(self, name: str, module: nn.Module, device: torch.device) -> nn.Module:
        """The component on its device, or as far as it belongs there."""
        if not self.is_hosted(name):
            return module.to(device)
        if name == "text_encoder":
            if self.text == "offload":
                take_turns(*text_stack(module), device)
            park(module, device)
        elif name == "vae":
            take_turns(*decoder_stack(module), device)
            _move(module, device)
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


WHOLE, AUTO = Placement(), Placement("auto", text="auto")
_HOME = "_videogen_home"


def blocks_of(transformer: Any) -> Any:
    """The block stack: H3's, or Wan's."""
    return transformer.transformer_blocks if hasattr(transformer, "transformer_blocks") else transformer.blocks


def large_parts(block: Any) -> tuple[nn.Module, ...]:
    """What of a block is sharded or visits, in the order it runs."""
    return (block.attn, block.ff) if hasattr(block, "attn") else (block.attn1, block.attn2, block.ffn)


def text_stack(encoder: nn.Module) -> tuple[nn.Module, list[list[nn.Module]]]:
    """What runs a text encoder's layers, and those that visit one by one."""
    owner, blocks = largest_stack(encoder)
    return owner, [[block] for block in blocks]


def decoder_stack(vae: Any) -> tuple[nn.Module, list[list[nn.Module]]]:
    """The same of a video decoder; Wan's has none."""
    return vae.decoder, [[block] for block in getattr(vae.decoder, "transformer_blocks", ())]


def _move_rest(transformer: Any, device: torch.device, *, is_large_moved: bool = False) -> None:
    """Everything to the device but the AdaLN projections and, unless they move too, the blocks' large parts."""
    staying = [block.adaln_proj for block in blocks_of(transformer) if hasattr(block, "adaln_proj")]
    staying += [] if is_large_moved else [part for block in blocks_of(transformer) for part in large_parts(block)]
    _move(transformer, device, {id(tensor) for part in staying for tensor in part.parameters()})


def _move(module: nn.Module, device: torch.device, staying: Set[int] = frozenset()) -> None:
    """Everything to the device but what comes by itself, and the tensors with these ids."""
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in staying and not comes_alone(tensor):
            tensor.data = tensor.data.to(device)


def park(module: nn.Module, device: torch.device) -> None:
    """Parameters stay in host memory, page-locked where the device is CUDA; buffers, which do not visit, go to the device."""
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)
    if device.type == "cuda":
        groups = [*(list(block.parameters()) for block in largest_stack(module)[1]), list(module.parameters())]
        settled = set[int]()
        homes = list[Home]()
        for group in groups:  # a block at a time, then what is left: twice in host memory is one of them
            homes.append(settle_down([each for each in group if id(each) not in settled and not comes_alone(each)], device))
            settled |= set(map(id, group))
        setattr(module, _HOME, homes)


def shard(transformer: Any, peers: Peers, device: torch.device) -> None:
    """Fully sharded (FSDP2, as accelerate does it) over the peers: a part is gathered before it runs and let go after it.

    Ranks skip the same blocks, because they decide together, so a step cache works.
    """
    mesh = DeviceMesh.from_group(peers.group, device.type)
    _move_rest(transformer, device)
    for block in blocks_of(transformer):
        for part in large_parts(block):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
    large = {id(each) for block in blocks_of(transformer) for part in large_parts(block) for each in part.parameters()}
    # a root without parameters of its own, so that one part is gathered while another computes
    fully_shard(transformer, mesh=mesh, ignored_params={each for each in transformer.parameters() if id(each) not in large})


def stream(transformer: Any, device: torch.device) -> None:
    """From here on the blocks' large parts visit the device, the next block's while one runs."""
    _move_rest(transformer, device)
    take_turns(transformer, [large_parts(block) for block in blocks_of(transformer)], device)


@dataclass(slots=True)
class _Expert:
    """The large parts of one expert, a home a block, and whether they are on the device."""

    homes: list[Home]
    is_here: bool = False

    def come(self, device: torch.device) -> None:
        """All of it to the device."""
        self.is_here = True
        for home in self.homes:
            home.visit(torch.empty_like(home.memory, device=device))

    def leave(self) -> None:
        """Back to host memory."""
        if self.is_here:
            for home in self.homes:
                home.leave()
            self.is_here = False


def wait_at_home(transformer: Any, device: torch.device) -> None:
    """The blocks' large parts of an expert stay in host memory, pinned where the device is CUDA, until `taking_turns` calls for them."""
    _move_rest(transformer, device)
    setattr(
        transformer,
        _HOME,
        _Expert([settle_down((p for part in large_parts(block) for p in part.parameters()), device) for block in blocks_of(transformer)]),
    )


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
            visitor.come(device)
            finish()
            num_bytes = sum(parameter.nbytes for home in visitor.homes for parameter in home.parameters)
            moves.append({"expert": expert, "forwards": asked[0], "num_bytes": num_bytes, "seconds": clock.now() - began})
        asked[0] += 1

    with ExitStack() as stack:
        for expert, (transformer, visitor) in enumerate(zip(transformers, visitors)):
            if visitor is not None:
                stack.callback(visitor.leave)
                stack.callback(transformer.register_forward_pre_hook(lambda *_, expert=expert: come(expert)).remove)
        yield moves
