"""The step caches that are compared: ours and diffusers' own classes, each put around one request's loop fresh and taken out again.

Diffusers 0.42.1 registers no H3 block and enters no cache context in H3's loop; here the block is registered by hand, and
`eval.batched_loop.denoise` enters the context, so that each peer works as well as it can.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import diffusers
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, SeaCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerBlock

from caches.policy import Budget
from caches.prior import Prior
from caches.step_hook import step_cache
from eval import peer_cache_dit
from eval.batched_loop import Group, denoise
from eval.losses import settings_of
from videogen.config import StepCache
from videogen.pocket.packed import unpatchify
from videogen.priors import with_prior

DEFAULTS = StepCache()


Scope = Callable[[Group, float], AbstractContextManager[object]]


@contextmanager
def diffusers_cache(group: Group, config: Any) -> Iterator[None]:
    """One of diffusers' caches on the transformer of one request."""
    TransformerBlockRegistry.register(
        MiniMaxH3TransformerBlock,
        TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=None),
    )
    transformer = group.transformer
    try:
        transformer.enable_cache(config)
        yield
    finally:
        if transformer.is_cache_enabled:
            transformer.disable_cache()


def ours(options: StepCache = DEFAULTS) -> Scope:
    """Our cache at lambda `strength`, by default as it ships."""
    budget = Budget(max_streak=options.max_streak, warm_up=options.warm_up)

    def scope(group: Group, strength: float) -> AbstractContextManager[object]:
        return step_cache(group.transformer, "transformer_blocks", group.channels(options), replace(budget, lam=strength))

    return scope


def first_block(group: Group, strength: float) -> AbstractContextManager[object]:
    """Diffusers' FirstBlockCache at threshold `strength`."""
    return diffusers_cache(group, FirstBlockCacheConfig(threshold=strength))


def taylor(order: int) -> Scope:
    """Diffusers' TaylorSeer every `strength` steps, blocks skipped and both heads forecast (its lite mode forgets the audio head)."""

    def scope(group: Group, strength: float) -> AbstractContextManager[object]:
        config = TaylorSeerCacheConfig(
            cache_interval=int(strength),
            disable_cache_before_step=order + 1,
            max_order=order,
            taylor_factors_dtype=torch.float32,
            skip_predict_identifiers=[r"^transformer_blocks\.[0-9]+$"],
            cache_identifiers=[r"^proj_out$", r"^audio_proj_out$"],
        )
        return diffusers_cache(group, config)

    return scope


def sea(group: Group, strength: float) -> AbstractContextManager[object]:
    """Diffusers' SeaCache at threshold `strength`, told which rows are the generated video latents."""
    size = tuple(group.state.get(name) for name in ("num_latent_frames", "latent_height", "latent_width"))

    def generated(_module: Any, _args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        return list(unpatchify(kwargs["hidden_states"][:, group.given[0] :], size))

    return diffusers_cache(group, SeaCacheConfig(threshold=strength, raw_vision_callback=generated))


@dataclass(slots=True)
class MagCache:
    """Diffusers' MagCache; its curve is measured on one clip outside the comparison, as its authors do."""

    calibration: Callable[[], Group]
    ratios: list[float] = field(default_factory=list)

    def __call__(self, group: Group, strength: float) -> AbstractContextManager[object]:
        """The cache at accumulated error `strength`."""
        self.ratios = self.ratios or magnitude_ratios(self.calibration())
        config = MagCacheConfig(threshold=strength, mag_ratios=self.ratios, num_inference_steps=len(self.ratios))
        return diffusers_cache(group, config)


def magnitude_ratios(group: Group) -> list[float]:
    """Mean norm of the stack's residual over that of the step before, per step (MagCache, arXiv 2506.09045)."""
    blocks = group.transformer.transformer_blocks
    norms: list[torch.Tensor] = []
    entered: list[torch.Tensor] = []
    handles = [
        blocks[0].register_forward_pre_hook(lambda _m, args: entered.append(args[0])),
        blocks[-1].register_forward_hook(lambda _m, _a, out: norms.append((out - entered.pop()).float().norm(dim=-1))),
    ]
    try:
        denoise(group)
    finally:
        for handle in handles:
            handle.remove()
    return [1.0, *(float((now / before.clamp(min=1e-8)).mean()) for before, now in pairwise(norms))]


@contextmanager
def counting(transformer: Any) -> Iterator[list[int]]:
    """Counts how often the last block's attention really ran: the one fact all caches share."""
    count = [0]

    def hit(*_: Any) -> None:
        count[0] += 1

    handle = transformer.transformer_blocks[-1].attn.to_q.register_forward_pre_hook(hit)
    try:
        yield count
    finally:
        handle.remove()


def described(name: str, prior: Prior | None) -> dict[str, Any]:
    """What a method's clips depend on beside its strength and the request: the settings of ours, the version of others."""
    told: dict[str, Any] = {"method": name, "alone in": "eval.batched_loop", "version": diffusers.__version__}
    if name.startswith("videogen"):
        told["ours"] = [settings_of(options) for options in (DEFAULTS, *([with_prior(prior)] if prior else []))]
    if name.startswith("cache-dit"):
        told["cache-dit"] = import_module("cache_dit").__version__
    return told


def methods(calibration: Callable[[], Group], prior: Prior | None = None) -> dict[str, tuple[Scope, tuple[float, ...]]]:
    """Every method with the strengths that span its curve, mild first; the nearest peers first."""
    drifts, errors = (0.05, 0.08, 0.12, 0.17, 0.24), (0.006, 0.012, 0.02, 0.03, 0.06)
    table: dict[str, tuple[Scope, tuple[float, ...]]] = {}
    if prior is not None:
        table["videogen"] = (ours(with_prior(prior)), errors)
        table["videogen, streaks of 3"] = (ours(replace(with_prior(prior), max_streak=3)), errors)
    table["videogen, parabolas" if table else "videogen"] = (ours(), (0.008, 0.02, 0.03, 0.07))
    if peer_cache_dit.is_installed():
        table["cache-dit DBCache + TaylorSeer, order 2"] = (peer_cache_dit.cache_dit(order=2), drifts)
        table["cache-dit DBCache + TaylorSeer"] = (peer_cache_dit.cache_dit(order=1), drifts)
    table |= {
        "SeaCache": (sea, (0.1, 0.2, 0.4)),
        "TaylorSeer, order 2": (taylor(2), (2, 3, 4)),
        "TaylorSeer": (taylor(1), (2, 3, 4)),
        "FirstBlockCache": (first_block, (0.08, 0.12, 0.17, 0.24)),
        "MagCache": (MagCache(calibration), (0.06, 0.12, 0.5)),
    }
    if peer_cache_dit.is_installed():
        table["cache-dit DBCache"] = (peer_cache_dit.cache_dit(order=0), (0.08, 0.12, 0.17))
    return table
