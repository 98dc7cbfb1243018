"""Wan at work: drives diffusers' own pipelines, with phases, steps and a stop between steps.

There is no second denoising loop here: diffusers' call runs, and its progress bar is replaced by one that reports. Prompts are encoded
before it, by its own method, so that what was encoded before is not encoded again.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from caches.policy import decide
from caches.step_hook import Rule
from videogen.attention.options import OFF, SparseAttention
from videogen.config import StepCache
from videogen.errors import bad
from videogen.families.base import Resolved
from videogen.families.wan import I2V, MAX_TEXT_TOKENS, WanResolved
from videogen.families.wan_attention import sites, wan_sparse
from videogen.families.wan_cache import Schedule, wan_cache
from videogen.families.wan_parts import WanParts
from videogen.families.wan_sequence import seats
from videogen.images import picture_of
from videogen.kernels.wan import FUSED, fault
from videogen.parallel.sharding import ALONE, Sharding
from videogen.parallel.weights import taking_turns
from videogen.progress import PhaseClock, StepBar
from videogen.result import RawClip
from videogen.transforms.adaln import visiting
from videogen.transforms.attach import Kept, Transforms
from videogen.transforms.encodings import Values, on_device
from videogen.transforms.fused_wan import fused_wan, stock_of
from videogen.transforms.options import Savings
from videogen.transforms.scope import attending

_NO_EFFECT = ("adaln_tables", "refined_text", "rope_tables", "text_cut", "lean_loop", "decode_batch")


class _Bar(StepBar):
    """The loop's bar, which also knows when preparing ends and decoding begins."""

    def __enter__(self) -> "_Bar":
        self.clock.enter("denoise")
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.clock.enter("decode")


@contextmanager
def _reporting(pipe: Any, clock: PhaseClock) -> Iterator[None]:
    pipe.progress_bar = lambda total: _Bar(total, clock)
    try:
        yield
    finally:
        del pipe.progress_bar


@contextmanager
def _scheduled(pipe: Any, resolved: WanResolved) -> Iterator[None]:
    """The request's own shift on the scheduler inside the scope, or Euler over its own sigmas; the model's scheduler again afterwards."""
    before, shift = pipe.scheduler, resolved.shifts[0]
    name = "flow_shift" if "flow_shift" in before.config else "shift"
    if resolved.sigmas is not None:
        pipe.scheduler = _euler(resolved.sigmas[0], before.config.num_train_timesteps)
    elif before.config.get(name, 1.0) != shift:
        pipe.scheduler = type(before).from_config(before.config, **{name: shift})
    try:
        yield
    finally:
        pipe.scheduler = before


def _euler(sigmas: Sequence[float], num_train_timesteps: int) -> Any:
    """Diffusers' Euler over exactly these sigmas (the final 0 included): what few-step adapters are trained for."""
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=num_train_timesteps)
    stock = scheduler.set_timesteps

    def set_timesteps(num_inference_steps: int, device: Any = None) -> None:
        del num_inference_steps  # it is the number of sigmas, as the contract has settled
        stock(sigmas=list(sigmas[:-1]), device=device)

    scheduler.set_timesteps = set_timesteps
    return scheduler


@contextmanager
def _shared(pipe: Any, experts: Sequence[Any], schedule: Schedule | None, sharding: Sharding) -> Iterator[None]:
    """Self-attention over the rows of all ranks, which start from the first one's latents and what conditions them."""
    if schedule is None or sharding is ALONE:
        yield
        return
    stock = pipe.prepare_latents

    def prepare(*args: Any, **kwargs: Any) -> Any:
        made = stock(*args, **kwargs)
        return tuple(sharding.share(each) for each in made) if isinstance(made, tuple) else sharding.share(made)

    with ExitStack() as stack:
        pipe.prepare_latents = prepare
        stack.callback(delattr, pipe, "prepare_latents")
        for each in experts:
            stack.enter_context(sharding.attention(each, schedule.end, seats(each)))
        yield


@contextmanager
def _attending(experts: Sequence[Any], transforms: Transforms) -> Iterator[None]:
    """Blocks through the attention back end, the kernels and the products that the savings name."""
    backend, weight = transforms.savings.attention, experts[0].proj_out.weight
    with ExitStack() as stack:
        if transforms.savings.kernels:
            reason = fault(weight.device, weight.dtype)
            transforms.told["kernels"] = f"off: {reason}" if reason else FUSED.name
            for each in () if reason else experts:
                stack.enter_context(fused_wan(each, FUSED))
        if transforms.savings.matmul == "float8":
            stack.enter_context(transforms.eight_bit(experts))
        if backend != "model":
            transforms.told["attention"] = backend
            processors = [stock_of(attn) for each in experts for block in each.blocks for attn in (block.attn1, block.attn2)]
            stack.enter_context(attending(processors, backend))
        yield


def _text(pipe: Any, what: str, prompt: str, transforms: Transforms) -> Any:
    """The embedding of one prompt or negative prompt (1, 512, D), kept by its text. Raises RequestError for one that would be cut."""
    count = len(pipe.tokenizer(prompt).input_ids)
    if count > MAX_TEXT_TOKENS:
        raise bad(what, f"{count} tokens", f"at most {MAX_TEXT_TOKENS}: Wan would cut the rest off", "shorten it")

    def compute() -> Values:
        with visiting(pipe.text_encoder, pipe._execution_device):  # where it lives in host memory
            embeds, _ = pipe.encode_prompt(prompt, None, False, max_sequence_length=MAX_TEXT_TOKENS, device=pipe._execution_device)
        return {"embeds": embeds}

    def encoded() -> Values:
        limit, kept = transforms.savings.encodings, transforms.kept
        if not limit:
            return compute()
        values, was_kept = kept.encodings.take(("wan text", prompt, kept.watch(pipe.text_encoder).look()), limit, compute)
        transforms.told[f"encodings {what}"] = "kept" if was_kept else "computed"
        return values

    return on_device(transforms.first(encoded), pipe._execution_device)["embeds"]  # the other ranks of a clip have no encoder


def call_inputs(pipe: Any, resolved: WanResolved, seed: int, transforms: Transforms) -> dict[str, Any]:
    """The keyword arguments diffusers' pipeline takes for this request. Noise comes from a CPU generator of its own."""
    inputs: dict[str, Any] = {
        "prompt_embeds": _text(pipe, "prompt", resolved.prompt, transforms),
        "height": resolved.height,
        "width": resolved.width,
        "num_frames": resolved.frames,
        "num_inference_steps": resolved.steps,
        "guidance_scale": resolved.guidance[0],
        "guidance_scale_2": resolved.guidance[1] if resolved.boundary is not None else None,
        "generator": torch.Generator("cpu").manual_seed(seed),
        "output_type": "np",
    }
    if resolved.is_guided:
        inputs["negative_prompt_embeds"] = _text(pipe, "negative prompt", resolved.negative_prompt, transforms)
    if resolved.workflow == I2V:
        inputs |= {each.role: picture_of(each.media) for each in resolved.inputs}
    return inputs


def schedule_of(pipe: Any, resolved: WanResolved) -> Schedule:
    """The steps diffusers will take, asked of its scheduler beforehand, and the rows that it generates."""
    scheduler, config = pipe.scheduler, pipe.transformer.config
    scheduler.set_timesteps(resolved.steps, device=pipe._execution_device)
    limit = -math.inf if resolved.boundary is None else resolved.boundary * scheduler.config.num_train_timesteps
    spatial = [pipe.vae_scale_factor_spatial * side for side in config.patch_size[1:]]
    sides = resolved.height // spatial[0], resolved.width // spatial[1]
    latents = ((resolved.frames - 1) // pipe.vae_scale_factor_temporal + 1) // config.patch_size[0]
    is_given = resolved.workflow == I2V and bool(pipe.config.expand_timesteps)  # the first frame is put back after the loop
    boundary_step = int((scheduler.timesteps >= limit).sum())
    given = math.prod(sides) if is_given else 0
    return Schedule(scheduler.sigmas.tolist(), boundary_step, given, (latents - is_given, *sides), resolved.is_guided)


def run(
    parts: WanParts,
    resolved: Resolved,
    seed: int,
    clock: PhaseClock,
    cache: StepCache,
    transforms: Transforms | None = None,
    sparse: SparseAttention = OFF,
    sharding: Sharding = ALONE,
    rule: Rule = decide,
) -> RawClip:
    """Render one clip with a loaded pipeline of the request's workflow; without `transforms` nothing of it is changed. `rule` is what
    decides about a step under the cache.

    Raises CancelledRender between steps when a stop is wanted; nothing of the request outlives the call.
    """
    assert isinstance(resolved, WanResolved)
    transforms, pipe = transforms or Transforms(Savings(), Kept(), resolved), parts.pipe
    transforms.told |= {name: "not for Wan" for name in _NO_EFFECT if getattr(transforms.savings, name)}
    if transforms.savings.matmul == "bfloat16":
        transforms.told["matmul"] = "model: not for Wan"
    with torch.no_grad(), _scheduled(pipe, resolved):
        clock.enter("text")
        inputs = call_inputs(pipe, resolved, seed, transforms)
        clock.enter("prepare")
        experts, is_needed = parts.transformers, bool(cache.lam) or sparse.is_on or sharding is not ALONE
        schedule = schedule_of(pipe, resolved) if is_needed else None
        found = [sites(each) for each in experts] if sparse.is_on else []
        with (
            _attending(experts, transforms),
            taking_turns(experts, pipe._execution_device) as moves,
            _reporting(pipe, clock),
            _shared(pipe, experts, schedule, sharding),
            wan_cache(experts, cache, schedule, rule, sharding) as trace,
            wan_sparse(experts, found, sparse, schedule, sharding) as attention,
        ):
            frames = pipe(**inputs).frames[0]
        sigmas = pipe.scheduler.sigmas.tolist()
    clock.close()
    return RawClip(np.asarray(frames), None, 0, {"video": sigmas}, trace, attention, 2 if resolved.is_guided else 1, tuple(moves))
