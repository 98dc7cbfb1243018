"""A denoising loop without its needless questions: parameter names are asked once, and no step waits for the device."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3LoopDenoiser
from diffusers.modular_pipelines.modular_pipeline import BlockState


class LeanDenoiser(MiniMaxH3LoopDenoiser):  # type: ignore[misc]
    """The denoiser of diffusers' loop, which reads the transformer's signature for every field of every step."""

    _layout: dict[str, Any] | None = None

    @torch.no_grad()
    def __call__(self, components: Any, block_state: BlockState, i: int, t: torch.Tensor) -> tuple[Any, BlockState]:
        """One forward of the transformer; writes `noise_pred` and `audio_noise_pred`."""
        transformer = getattr(components, self.transformer_name)
        if self._layout is None:
            taken = inspect.signature(transformer.forward).parameters
            self._layout = {name: value for name, value in block_state.denoiser_input_fields.items() if name in taken}
        timestep, indices = block_state.row_timestep_plan[i]
        block_state.noise_pred, block_state.audio_noise_pred = transformer(
            hidden_states=block_state.latents[None],
            audio_hidden_states=block_state.audio_latents[None],
            timestep=timestep,
            timestep_indices=indices,
            attention_kwargs=block_state.attention_kwargs,
            return_dict=False,
            **({"encoder_hidden_states": block_state.prompt_embeds} | self._layout),
        )
        return components, block_state


@contextmanager
def lean_loop(pipe: Any, loop: Any) -> Iterator[None]:
    """Diffusers' `loop` block with the lean denoiser, and schedulers that are told where they begin instead of looking it up.

    A scheduler looks its first timestep up on the device and waits for the answer; the loop always begins at 0.
    """
    stock, schedulers = loop.sub_blocks["denoiser"], (pipe.scheduler, pipe.audio_scheduler)
    loop.sub_blocks["denoiser"] = LeanDenoiser(stock.transformer_name)
    for scheduler in schedulers:
        scheduler.set_begin_index(0)
    try:
        yield
    finally:
        loop.sub_blocks["denoiser"] = stock
        for scheduler in schedulers:
            scheduler.set_begin_index(None)
