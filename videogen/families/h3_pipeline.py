"""MiniMax-H3 at work: drives diffusers' own modular blocks, with phases, steps and a stop between steps.

There is no second denoising loop here: diffusers' loop block runs, and its progress bar is replaced by one that reports.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from diffusers import MiniMaxH3ModularPipeline
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from caches.policy import Budget
from caches.step_hook import Channel, step_cache
from caches.trace import Trace
from videogen.attention.install import dense_record, settle, sparse_attention
from videogen.attention.options import OFF, SparseAttention
from videogen.attention.order import reordered, snake_order
from videogen.config import StepCache
from videogen.families.base import Resolved
from videogen.images import picture_of
from videogen.parallel.sharding import ALONE, Sharding
from videogen.progress import PhaseClock, StepBar
from videogen.result import RawClip
from videogen.transforms.attach import Kept, Transforms
from videogen.transforms.options import Savings

LOOP = "denoise.denoise"
_PHASE_OF_BLOCK = {"text_encoder": "text", LOOP: "denoise", "denoise.after_denoise": "decode"}


class H3Pipeline(MiniMaxH3ModularPipeline):  # type: ignore[misc]
    """H3 with its 5 s floor lifted: `H3Family` has checked the length against the folder's own shortest clip."""

    @property
    def min_duration(self) -> float:
        """Seconds; no floor here."""
        return 0.0

    @property
    def _execution_device(self) -> torch.device:
        """Where the video VAE is: other components may live in host memory and visit."""
        parameter: torch.nn.Parameter = next(self.vae.parameters())
        return parameter.device


@contextmanager
def _reporting(pipe: Any, clock: PhaseClock) -> Iterator[None]:
    loop = pipe._blocks.sub_blocks[LOOP]
    loop.progress_bar = lambda total: StepBar(total, clock)
    try:
        yield
    finally:
        del loop.progress_bar


@contextmanager
def _unsaid() -> Iterator[None]:
    """Diffusers' blocks log the trace of every error they pass on; who catches it says what it means."""
    log = logging.getLogger(PipelineState.__module__)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _scheduled(pipe: Any, resolved: Resolved) -> Iterator[None]:
    """The request's own shifts, or sigmas, on both schedulers inside the scope; the model's own again afterwards."""
    schedulers = (pipe.scheduler, pipe.audio_scheduler)
    before = [scheduler.shift for scheduler in schedulers]
    try:
        for index, scheduler in enumerate(schedulers):
            scheduler.set_shift(resolved.shifts[index])
            if resolved.sigmas is not None:
                scheduler.set_timesteps = _explicit(scheduler, resolved.sigmas[index])
        yield
    finally:
        for scheduler, shift in zip(schedulers, before):
            scheduler.set_shift(shift)
            scheduler.__dict__.pop("set_timesteps", None)


def _explicit(scheduler: Any, sigmas: tuple[float, ...]) -> Callable[..., None]:
    """`set_timesteps` of a scheduler with these sigmas (the final 0 included) in place of its grid; diffusers' block names none."""
    stock = type(scheduler).set_timesteps

    def set_timesteps(num_inference_steps: int, device: Any = None) -> None:
        del num_inference_steps
        stock(scheduler, sigmas=list(sigmas), device=device)

    return set_timesteps


def _phase(block: str) -> str:
    return _PHASE_OF_BLOCK.get(block, "decode" if block.startswith("decode.") else "prepare")


def block_inputs(resolved: Resolved, seed: int) -> dict[str, Any]:
    """The keyword arguments diffusers' blocks take for this request. Noise comes from a CPU generator of its own.

    `num_inference_steps` counts grid points, terminal 0 included: one more than forwards.
    """
    inputs: dict[str, Any] = {
        "prompt": resolved.prompt,
        "height": resolved.height,
        "width": resolved.width,
        "num_frames": resolved.frames,
        "num_inference_steps": resolved.steps + 1,
        "generator": torch.Generator("cpu").manual_seed(seed),
        "output_type": "np",
    }
    references = [MiniMaxH3ImageReference(picture_of(i.media)) for i in resolved.inputs if i.role == "reference"]
    inputs.update({i.role: picture_of(i.media) for i in resolved.inputs if i.role != "reference"})
    return inputs | ({"references": references} if references else {})


def sigmas_of(pipe: Any) -> dict[str, list[float]]:
    """The sigmas of the schedule in force, per modality, the last 0 included."""
    return {"video": pipe.scheduler.sigmas.tolist(), "audio": pipe.audio_scheduler.sigmas.tolist()}


def _channels(pipe: Any, state: PipelineState, options: StepCache, sharding: Sharding) -> dict[str, Channel]:
    """The generated rows of each modality, in this rank's stretch of the packed sequence, with the sigmas they step through."""
    sigmas, orders = sigmas_of(pipe), {"video": options.video_order, "audio": options.audio_order}
    device = pipe._execution_device
    rows = {name: state.get(f"{name}_indices")[state.get(f"num_condition_{name}_rows") or 0 :].to(device) for name in orders}
    rows = {name: sharding.own(each, _num_rows(state)) for name, each in rows.items()}
    prior = options.prior
    return {
        name: Channel(rows[name], sigmas[name], order, options.drift_order, None if prior is None else prior.of(name, sigmas[name][:-1]))
        for name, order in orders.items()
    }


def _num_rows(state: PipelineState) -> int:
    return int(state.get("position_ids").shape[0])


def transformer_of(pipe: Any) -> Any:
    """The transformer that the pipeline's denoising loop drives: `transformer` or `transformer_ref`."""
    return getattr(pipe, pipe._blocks.sub_blocks[LOOP].sub_blocks["denoiser"].transformer_name)


def _cached(pipe: Any, state: PipelineState, options: StepCache, sharding: Sharding) -> AbstractContextManager[Trace]:
    """The step cache around the denoising loop of one request; with lambda 0 nothing is touched, nor asked of the stack."""
    if options.lam == 0:
        return nullcontext(Trace(options.lam, len(state.get("timesteps"))))
    budget = Budget(lam=options.lam, max_streak=options.max_streak, warm_up=options.warm_up)
    channels = _channels(pipe, state, options, sharding)
    return step_cache(transformer_of(pipe), "transformer_blocks", channels, budget, agree=sharding.agree)


@contextmanager
def _sharded(pipe: Any, state: PipelineState, cache: StepCache, sparse: SparseAttention, sharding: Sharding) -> Iterator[tuple[Trace, Any]]:
    """Everything that replaces blocks or their attention, in the order that fits; yields the trace and the attention's record."""
    transformer, rows = transformer_of(pipe), _num_rows(state)
    for name in ("latents", "audio_latents"):  # noise is drawn once
        state.set(name, sharding.share(state.get(name)))
    with (
        sharding.attention(transformer, rows),
        attending_sparsely(pipe, state, sparse) as attention,
        _cached(pipe, state, cache, sharding) as trace,
        sharding.stack(transformer, rows),
    ):
        yield trace, attention


@contextmanager
def attending_sparsely(pipe: Any, state: PipelineState, options: SparseAttention) -> Iterator[dict[str, Any]]:
    """Sparse attention around the denoising loop, the video rows in tile order first; yields its record, filled at the end."""
    positions = state.get("position_ids")
    told: dict[str, Any] = {}
    _, patch_h, patch_w = pipe.patch_size
    grid = (state.get("num_latent_frames"), state.get("latent_height") // patch_h, state.get("latent_width") // patch_w)
    rows, transformer = positions.shape[0], transformer_of(pipe)
    choice = settle(options, transformer, first=rows - math.prod(grid), rows=rows, grid=grid)
    if choice.is_sparse:
        positions, video = reordered(positions, state.get("video_indices"), snake_order(grid, choice.tile))
        state.set("position_ids", positions)
        state.set("video_indices", video)
    with sparse_attention(transformer, options, choice, rows, len(state.get("timesteps"))) as request:
        yield told
        told |= request.record() if request else dense_record(options, choice)


def open_state(pipe: Any, resolved: Resolved, seed: int) -> PipelineState:
    """The state that a request's blocks begin with."""
    state, inputs = PipelineState(), block_inputs(resolved, seed)
    for parameter in pipe._blocks.inputs:
        if parameter.name is not None:
            state.set(parameter.name, inputs.get(parameter.name, parameter.default), parameter.kwargs_type)
    return state


def run(
    pipe: Any,
    resolved: Resolved,
    seed: int,
    clock: PhaseClock,
    cache: StepCache,
    transforms: Transforms | None = None,
    sparse: SparseAttention = OFF,
    sharding: Sharding = ALONE,
) -> RawClip:
    """Render one clip with a loaded pipeline of the request's workflow; without `transforms` nothing of it is changed.

    Raises CancelledRender between steps or blocks when a stop is wanted; nothing of the request outlives the call.
    """
    transforms = transforms or Transforms(Savings(), Kept(), resolved)
    state = open_state(pipe, resolved, seed)
    with torch.no_grad(), _unsaid(), _reporting(pipe, clock), _scheduled(pipe, resolved):
        for name, block in pipe._blocks.sub_blocks.items():
            clock.enter(_phase(name))
            if name != LOOP:
                transforms.call(name, block, pipe, state)
                continue
            around = transforms.around_loop(pipe, block, transformer_of(pipe), state)
            with around, _sharded(pipe, state, cache, sparse, sharding) as (trace, attention):
                block(pipe, state)
    clock.close()
    frames, audio = np.asarray(state.get("videos"))[0], state.get("audio")[0].float().cpu().numpy()
    return RawClip(frames, audio, int(state.get("sampling_rate")), sigmas_of(pipe), trace, attention)
