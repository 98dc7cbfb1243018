"""Many requests of one layout through the stock transformer at once, with the pipeline's own text, noise, schedule and decoders.

H3's loop drives one request; its transformer takes a batch that shares layout and timesteps, which requests of one schedule do. For
measuring thousands of clips on a GPU only: `tests/eval/test_batched.py` holds it equal to the pipeline.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import PipelineState

from caches.step_hook import Channel
from eval.quality_cases import Case
from videogen.config import StepCache
from videogen.families.h3_pipeline import LOOP, run, transformer_of
from videogen.pipeline import Pipeline
from videogen.pocket.packed import unpatchify
from videogen.progress import PhaseClock, StopFlag, ignore

_DECODED = 16  # clips at a time


class _Reached(Exception):
    """The loop is next: what would have entered it."""

    def __init__(self, state: PipelineState, schedulers: tuple[Any, Any]) -> None:
        super().__init__()
        self.state, self.schedulers = state, schedulers


def _halting(loop: Any) -> Any:
    """The loop block in every respect but one: called, it hands over its input."""

    def call(_: Any, pipe: Any, state: PipelineState) -> None:
        raise _Reached(state, copy.deepcopy((pipe.scheduler, pipe.audio_scheduler)))

    halting = copy.copy(loop)
    halting.__class__ = type("Halting", (type(loop),), {"__call__": call})
    return halting


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request as the pipeline leaves it before the denoising loop, with its schedules."""

    case: Case
    state: PipelineState
    schedulers: tuple[Any, Any]

    @property
    def layout(self) -> bytes:
        """Equal for requests that may share a batch."""
        parts = (self.state.get(name).cpu().numpy().tobytes() for name in ("position_ids", "token_tags", "video_indices", "timesteps"))
        return b"".join(parts)


def prepare(pipeline: Pipeline, case: Case) -> Prepared:
    """The pipeline's own way up to its loop: its text, layout, schedule, and the noise it draws for the case's seed."""
    resolved = pipeline.family.resolve(replace(case.request, seed=case.seed), pipeline.recipe)
    pipe = pipeline.load(resolved.workflow)
    blocks = pipe._blocks.sub_blocks
    loop = blocks[LOOP]
    blocks[LOOP] = _halting(loop)
    try:
        run(pipe, resolved, case.seed, PhaseClock(ignore, StopFlag()), StepCache())
    except _Reached as reached:
        return Prepared(case, reached.state, reached.schedulers)
    finally:
        blocks[LOOP] = loop
    raise AssertionError("the pipeline never came to its loop")


class Group:
    """Prepared requests of one layout, stacked: text (B, L, D), video (B, V, Cv) and audio (B, A, Ca) rows."""

    def __init__(self, pipe: Any, members: Sequence[Prepared]) -> None:
        self.pipe, self.cases = pipe, [member.case for member in members]
        self.state, self.schedulers = members[0].state, members[0].schedulers
        self.text = torch.cat([member.state.get("prompt_embeds") for member in members])
        self.video = torch.stack([member.state.get("latents") for member in members])
        self.audio = torch.stack([member.state.get("audio_latents") for member in members])
        self.fields = {k: v for k, v in self.state.get_by_kwargs("denoiser_input_fields").items() if k != "prompt_embeds"}

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def transformer(self) -> Any:
        """What the loop drives."""
        return transformer_of(self.pipe)

    @property
    def given(self) -> tuple[int, int]:
        """How many leading video and audio rows are conditions, which are never written."""
        return self.state.get("num_condition_video_rows") or 0, self.state.get("num_condition_audio_rows") or 0

    def channels(self, options: StepCache) -> dict[str, Channel]:
        """The generated rows of each modality with their sigmas, as the pipeline hands them to the step cache."""
        orders, given = {"video": options.video_order, "audio": options.audio_order}, self.given
        sigmas = [scheduler.sigmas.tolist() for scheduler in self.schedulers]
        rows = [self.state.get(f"{name}_indices")[given[k] :].to(self.video.device) for k, name in enumerate(orders)]
        prior = options.prior
        return {
            name: Channel(rows[k], sigmas[k], order, options.drift_order, None if prior is None else prior.of(name, sigmas[k][:-1]))
            for k, (name, order) in enumerate(orders.items())
        }


def grouped(pipe: Any, prepared: Sequence[Prepared], most: int) -> Iterator[Group]:
    """Groups of one layout with at most `most` members; all must share one schedule."""
    by_layout: dict[bytes, list[Prepared]] = defaultdict(list)
    for item in prepared:
        by_layout[item.layout].append(item)
    for members in by_layout.values():
        for begin in range(0, len(members), most):
            yield Group(pipe, members[begin : begin + most])


@torch.no_grad()
def denoise(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Diffusers' loop on a batch: generated video (B, V, Cv) and audio (B, A, Ca) rows.

    A cache context is entered at every step, as diffusers' caches need; without one of those it changes nothing.
    """
    schedulers = copy.deepcopy(group.schedulers)
    rows, given, state = [group.video.clone(), group.audio.clone()], group.given, group.state
    times, plan = (state.get("timesteps"), state.get("audio_timesteps")), state.get("row_timestep_plan")
    for step, (t, where) in enumerate(plan):
        now = float(times[0][step])
        context = {"step_index": step, "num_inference_steps": len(plan), "timestep": now, "sigma": 1 - now}
        with group.transformer.cache_context("request", **context):
            out = group.transformer(
                hidden_states=rows[0],
                audio_hidden_states=rows[1],
                encoder_hidden_states=group.text,
                timestep=t,
                timestep_indices=where,
                attention_kwargs=None,
                return_dict=False,
                **group.fields,
            )
        for k, scheduler in enumerate(schedulers):
            held = rows[k][:, given[k] :]
            rows[k][:, given[k] :] = scheduler.step(out[k][:, given[k] :].float(), times[k][step], held, return_dict=False)[0]
    return rows[0][:, given[0] :], rows[1][:, given[1] :]


@torch.no_grad()
def decode(group: Group, video: torch.Tensor, audio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `Pipeline.render` makes of the rows: frames (B, F, H, W, 3) uint8 and sound (B, 2, N) float32, on the device."""
    pipe, state = group.pipe, group.state
    size = tuple(state.get(name) for name in ("num_latent_frames", "latent_height", "latent_width"))
    frames, sounds = [], []
    for begin in range(0, len(video), _DECODED):
        rows = unpatchify(video[begin : begin + _DECODED], size)
        seen = pipe.vae.decode(_restored(rows, pipe.vae), return_dict=False)[0].float()
        seen = (seen * _column(pipe.pixel_std, seen) + _column(pipe.pixel_mean, seen)).clamp(0, 1)
        frames.append((seen * 255).round().to(torch.uint8).movedim(1, -1))
        part = audio[begin : begin + _DECODED]
        heard = part.reshape(2 * len(part), -1, part.shape[-1]).transpose(1, 2)
        sound = pipe.audio_vae.decode(_restored(heard, pipe.audio_vae), return_dict=False)[0].float()
        sounds.append(sound.reshape(len(part), 2, -1).clamp(-1, 1))
    return torch.cat(frames), torch.cat(sounds)


def _restored(latents: torch.Tensor, vae: Any) -> torch.Tensor:
    return latents * _column(vae.config.latents_std, latents) + _column(vae.config.latents_mean, latents)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device).view(1, -1, *[1] * (like.ndim - 2))
