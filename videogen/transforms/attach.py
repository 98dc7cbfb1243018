"""Puts the savings of a recipe around the blocks of one request; the composition root owns what lives longer than that."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from videogen.errors import bad
from videogen.families.base import Resolved
from videogen.kernels.ops import FUSED
from videogen.text.identity import Watch
from videogen.transforms.adaln import TableShelf, adaln_tables, place_projections, visiting
from videogen.transforms.cpu_bfloat16 import bfloat16_products, refusal
from videogen.transforms.decode import Spread, alone, is_on_ladder, stream_video
from videogen.transforms.encodings import Encodings, First, Values, here, on_device, picture_key, text_key
from videogen.transforms.float8 import Float8Shelf, float8_products, products
from videogen.transforms.float8 import refusal as no_float8
from videogen.transforms.fused_blocks import fused_blocks
from videogen.transforms.fused_decoder import fused_decoder
from videogen.transforms.lean_loop import lean_loop
from videogen.transforms.options import Savings
from videogen.transforms.scope import attending, forward_as, once
from videogen.transforms.text_cut import text_cut

_KEYS = {"text_encoder": text_key, "vae_encoder": picture_key}


@dataclass(slots=True)
class Kept:
    """What outlives a request: it belongs to weights, and pipelines that share those share it."""

    tables: TableShelf = field(default_factory=TableShelf)
    encodings: Encodings = field(default_factory=Encodings)
    float8: dict[int, Float8Shelf] = field(default_factory=dict)
    watches: dict[int, Watch] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget all of it."""
        fresh = Kept()
        self.tables, self.encodings, self.float8, self.watches = fresh.tables, fresh.encodings, fresh.float8, fresh.watches

    def eight(self, expert: int = 0) -> Float8Shelf:
        """The scaled weights of one expert."""
        return self.float8.setdefault(expert, Float8Shelf())

    def watch(self, model: Any) -> Watch:
        """The watch over one model."""
        if id(model) not in self.watches:
            self.watches[id(model)] = Watch(model)
        return self.watches[id(model)]


@dataclass(slots=True)
class Transforms:
    """The settled savings of one request; `told` says what each did, for the record."""

    savings: Savings
    kept: Kept
    resolved: Resolved
    told: dict[str, str] = field(default_factory=dict)
    spread: Spread = alone
    first: First = here

    def call(self, name: str, block: Any, pipe: Any, state: PipelineState) -> None:
        """Run one of diffusers' blocks outside the loop, or do without."""
        if name == "decode.video" and self.savings.decode_batch and is_on_ladder(pipe.vae, state.get("latents")):
            with self.around_decoder(pipe.vae):
                state.set("videos", stream_video(pipe, state.get("latents"), self.savings.decode_batch, self.spread)[None])
            self.told["decode_batch"] = f"{self.savings.decode_batch} tiles a call, streamed"
            return
        if name == "text_encoder":
            values = on_device(self.first(lambda: self._encoded(name, block, pipe, state)), pipe._execution_device)
        elif name in _KEYS and self.savings.encodings:
            values = self._encoded(name, block, pipe, state)
        else:
            self._compute(name, block, pipe, state)
            return
        for output in block.intermediate_outputs:
            state.set(output.name, values[output.name], output.kwargs_type)

    def around_decoder(self, vae: Any) -> AbstractContextManager[None]:
        """The fused kernels in a video decoder that is streamed."""
        return fused_decoder(vae, FUSED) if self.savings.decode_batch and self.savings.kernels else nullcontext()

    def _encoded(self, name: str, block: Any, pipe: Any, state: PipelineState) -> Values:
        """The outputs of an encoding block, kept or computed."""

        def compute() -> Values:
            self._compute(name, block, pipe, state)
            return {output.name: state.get(output.name) for output in block.intermediate_outputs}

        if not self.savings.encodings:
            return compute()
        encoder = pipe.text_encoder if name == "text_encoder" else pipe.vae
        key = (*_KEYS[name](self.resolved), self.kept.watch(encoder).look())  # other weights or adapters, another encoding
        values, was_kept = self.kept.encodings.take(key, self.savings.encodings, compute)
        self.told[f"encodings {name}"] = "kept" if was_kept else "computed"
        return values

    def _compute(self, name: str, block: Any, pipe: Any, state: PipelineState) -> None:
        if name != "text_encoder":
            block(pipe, state)
            return
        with ExitStack() as stack:
            stack.enter_context(visiting(pipe.text_encoder, pipe._execution_device))  # where it lives in host memory
            if self.savings.text_cut:
                idle = stack.enter_context(text_cut(pipe.text_encoder, pipe.text_encoder_layer))
                self.told["text_cut"] = f"{idle} layers not run"
            block(pipe, state)

    @contextmanager
    def around_loop(self, pipe: Any, loop: Any, transformer: Any, state: PipelineState) -> Iterator[None]:
        """Everything that is attached while the denoising loop runs."""
        with ExitStack() as stack:
            for scope in self._scopes(pipe, loop, transformer, state):
                stack.enter_context(scope)
            yield

    def _scopes(self, pipe: Any, loop: Any, transformer: Any, state: PipelineState) -> Iterator[AbstractContextManager[Any]]:
        if self.savings.attention != "model":
            self.told["attention"] = self.savings.attention
            yield attending([block.attn.processor for block in transformer.transformer_blocks], self.savings.attention)
        if self.savings.matmul == "bfloat16":
            reason = refusal(transformer)
            self.told["matmul"] = f"model: {reason}" if reason else "bfloat16"
            if not reason:
                yield bfloat16_products(transformer)
        if self.savings.matmul == "float8":
            yield self.eight_bit([transformer])
        if self.savings.kernels:
            self.told["kernels"] = FUSED.name
            yield fused_blocks(transformer, FUSED)
        if self.savings.adaln_tables:
            yield self._tables(transformer, state)
        if self.savings.rope_tables:
            yield forward_as(transformer.rope, once)
        if self.savings.refined_text:
            yield forward_as(transformer.context_embedder, once)
            yield forward_as(transformer.token_refiner, once)
        if self.savings.lean_loop:
            yield lean_loop(pipe, loop)

    @contextmanager
    def eight_bit(self, transformers: Sequence[Any]) -> Iterator[None]:
        """Products of the block stacks in 8-bit floats. Raises RequestError where a stack or its device has none."""
        with ExitStack() as stack:
            num_bytes = 0
            for expert, transformer in enumerate(transformers):
                if reason := no_float8(transformer, next(products(transformer))[1].weight.device):
                    raise bad("savings matmul", f"float8, but {reason}", "a model and device that have it", "use auto")
                stack.enter_context(float8_products(transformer, self.kept.eight(expert)))
                num_bytes += self.kept.eight(expert).num_bytes
            self.told["matmul"] = f"float8, {num_bytes / 1e9:.3g} GB of scaled weights"
            yield

    @contextmanager
    def _tables(self, transformer: Any, state: PipelineState) -> Iterator[None]:
        timesteps = [each for each, _ in state.get("row_timestep_plan")]
        with adaln_tables(transformer, timesteps, self.kept.tables) as is_new:
            self.told["adaln_tables"] = "made" if is_new else "kept"
            if self.savings.park_adaln:  # now that they are not needed
                place_projections(transformer, torch.device("cpu"))
                self.told["park_adaln"] = "projections in host memory"
            yield
