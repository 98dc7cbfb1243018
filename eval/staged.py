"""A clip's blocks one by one, timed, with the text encoder gone before the transformer comes: the two need not fit together.

It runs diffusers' own blocks as `h3_pipeline.run` does and makes no clip of its own; how often a block runs is all it adds.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.modular_pipelines.modular_pipeline import BlockState, PipelineState

from eval.timing import Timing, time_call, time_once
from videogen.families.base import Resolved
from videogen.families.h3_pipeline import LOOP, H3Pipeline, block_inputs
from videogen.load import load_pipeline
from videogen.source import ModelSource

REPEAT_BELOW_S = 2.0  # a stage that takes longer is timed once, without warm-up
_GIB = 2**30
_TRANSFORMERS, _TEXT = ("transformer", "transformer_ref"), ("text_encoder",)


@dataclass(slots=True)
class Stage:
    """One stage's seconds, and the most device memory in use while it ran (None on the CPU)."""

    timing: Timing
    first_s: float
    peak_gib: float | None

    def row(self) -> dict[str, Any]:
        """Plain data for a report."""
        return self.timing.row() | {"first_s": self.first_s, "peak_gib": self.peak_gib}


@dataclass(slots=True)
class Meter:
    """Times a call on a device and reads its memory."""

    device: torch.device
    synchronize: Callable[[], None]

    def run(self, call: Callable[[], object], *, is_repeatable: bool = False) -> Stage:
        """Once; a repeatable call that took less than `REPEAT_BELOW_S` is then timed properly."""
        self.reset_peak()
        first_s = time_once(call, synchronize=self.synchronize)
        timing = Timing((first_s,), 0)
        if is_repeatable and first_s < REPEAT_BELOW_S:
            timing = time_call(call, warmup=1, synchronize=self.synchronize)
        return Stage(timing, first_s, self.peak_gib())

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float | None:
        """Most device memory in use since the last reset, in GiB."""
        return torch.cuda.max_memory_allocated(self.device) / _GIB if self.device.type == "cuda" else None


def weight_gib(model: torch.nn.Module) -> dict[str, float]:
    """Billions of parameters and GiB of weights and buffers, tied ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    return {"parameters_b": sum(t.numel() for t in tensors) / 1e9, "gib": sum(t.numel() * t.element_size() for t in tensors) / _GIB}


class Components:
    """A model's weights for the two phases. What a phase does not run is not in memory while it runs."""

    def __init__(self, source: ModelSource, device: torch.device, dtype: torch.dtype) -> None:
        self.source, self.device, self.dtype = source, device, dtype
        self.shared: dict[str, Any] = {}
        self.weights: dict[str, dict[str, float]] = {}

    def open(self, workflow: str, *, without: tuple[str, ...]) -> Any:
        """The pipeline of a workflow whose components named in `without` are stand-ins: of no weight, never to be run."""
        specs = H3Pipeline.from_pretrained(str(self.source.folder), workflow=workflow)._component_specs
        keys = {name: f"{spec.type_hint.__name__}:{spec.subfolder or name}" for name, spec in specs.items() if spec.type_hint}
        for name in (*_TRANSFORMERS, *_TEXT):
            if name in keys and name in without:
                self.shared[keys[name]] = self._stand_in(specs[name])
            elif name in keys and isinstance(self.shared.get(keys[name]), StandIn):
                del self.shared[keys[name]]
        self._forget(set(keys.values()))
        pipe = load_pipeline(self.source, workflow, device=self.device, dtype=self.dtype, shared=self.shared)
        for name, key in keys.items():
            if isinstance(self.shared.get(key), torch.nn.Module):
                self.weights[name] = weight_gib(self.shared[key])
        return pipe

    def _stand_in(self, spec: Any) -> "StandIn":
        is_diffusers = issubclass(spec.type_hint, ModelMixin)
        return StandIn(spec.type_hint.load_config(self.source.folder, subfolder=spec.subfolder) if is_diffusers else {})

    def _forget(self, kept: set[str]) -> None:
        """Free what this workflow does not name: the other workflow's transformer, where a folder has two."""
        for key in [key for key, held in self.shared.items() if key not in kept and isinstance(held, torch.nn.Module)]:
            del self.shared[key]
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class StandIn:
    """Holds the place of a component that is not in memory: the blocks before the loop only ask a transformer its patch size."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = _Config(config)


class _Config(dict[str, Any]):
    __getattr__ = dict.__getitem__


@dataclass(slots=True)
class StagedClip:
    """One request on its way through the blocks. `stages` by block name, in the order they ran; `vae_s` is in `decode.video`."""

    name: str
    resolved: Resolved
    state: PipelineState = field(default_factory=PipelineState)
    stages: dict[str, Stage] = field(default_factory=dict)
    vae_s: list[float] = field(default_factory=list)

    def prepare(self, components: Components, meter: Meter, seed: int) -> None:
        """Every block before the denoising loop, the text encoder among them."""
        pipe = components.open(self.resolved.workflow, without=_TRANSFORMERS)
        inputs = block_inputs(self.resolved, seed)
        for parameter in pipe._blocks.inputs:
            if parameter.name is not None:
                self.state.set(parameter.name, inputs.get(parameter.name, parameter.default), parameter.kwargs_type)
        for name, block in pipe._blocks.sub_blocks.items():
            if name == LOOP:
                return
            self._run(name, block, pipe, meter, is_repeatable=name in ("text_encoder", "vae_encoder"))

    def open_loop(self, components: Components) -> "Loop":
        """The denoising loop over this clip's rows, with its transformer loaded and the text encoder gone."""
        pipe = components.open(self.resolved.workflow, without=_TEXT)
        with torch.no_grad():  # again: another clip may have used the schedulers since
            pipe._blocks.sub_blocks["denoise.set_timesteps"](pipe, self.state)
        return Loop(pipe, pipe._blocks.sub_blocks[LOOP], self.state)

    def decode(self, pipe: Any, meter: Meter) -> None:
        """Every block after the loop; the video VAE's own share of its block is timed apart."""
        names, decode = list(pipe._blocks.sub_blocks), pipe.vae.decode

        def timed(*args: Any, **kwargs: Any) -> Any:
            made: list[Any] = []
            self.vae_s.append(time_once(lambda: made.append(decode(*args, **kwargs)), synchronize=meter.synchronize))
            return made[0]

        pipe.vae.decode = timed
        try:
            for name in names[names.index(LOOP) + 1 :]:
                self._run(name, pipe._blocks.sub_blocks[name], pipe, meter, is_repeatable=name.startswith("decode."))
        finally:
            del pipe.vae.decode

    def decode_part(self, pipe: Any) -> None:
        """The video VAE over the first chunks of the decoded latents: every tile has one shape, so a few show the kernels of all."""
        vae = pipe.vae
        with torch.no_grad():
            vae.decode(self.state.get("latents")[:, :, : vae.tokens_chunk_size + 2], return_dict=False)

    def _run(self, name: str, block: Any, pipe: Any, meter: Meter, *, is_repeatable: bool) -> None:
        with torch.no_grad():
            self.stages[name] = meter.run(lambda: block(pipe, self.state), is_repeatable=is_repeatable)


@contextmanager
def rows_put_back(state: PipelineState) -> Iterator[None]:
    """What tile order changes of a clip lies afterwards as it lay before."""
    laid = {name: state.get(name) for name in ("position_ids", "video_indices")}
    try:
        yield
    finally:
        for name, value in laid.items():
            state.set(name, value)


class Loop:
    """Diffusers' denoising loop, one step at a time."""

    def __init__(self, pipe: Any, block: Any, state: PipelineState) -> None:
        self.pipe, self.block, self.state = pipe, block, state
        self.rows: BlockState = block.get_block_state(state)
        self.done = 0

    @property
    def transformer(self) -> Any:
        """The model that the loop drives."""
        return getattr(self.pipe, self.block.sub_blocks["denoiser"].transformer_name)

    @property
    def num_steps(self) -> int:
        """Forwards of the whole clip."""
        return len(self.rows.timesteps)

    @property
    def num_rows(self) -> int:
        """Rows of the packed sequence: text, references, audio and video."""
        return int(self.rows.denoiser_input_fields["position_ids"].shape[0])

    def forward(self) -> None:
        """One evaluation of the model at the next step; nothing is written back to the latents."""
        with torch.no_grad():
            self.block.sub_blocks["denoiser"](self.pipe, self.rows, i=self.done, t=self.rows.timesteps[self.done])

    def step(self) -> None:
        """One evaluation and the update of the latents, as the loop does it."""
        with torch.no_grad():
            self.block.loop_step(self.pipe, self.rows, i=self.done, t=self.rows.timesteps[self.done])
        self.done += 1

    def close(self) -> None:
        """Hand the latents on to the decoders."""
        self.block.set_block_state(self.state, self.rows)
