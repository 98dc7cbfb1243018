"""Our step cache beside diffusers' own, on the same requests: loss against the share of steps computed.

Diffusers 0.42.1 registers no H3 block and enters no cache context in H3's loop; here the block is registered, the context
entered and the state dropped by hand, so that each peer works as well as it can. `python -m eval.peers --help`.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerBlock
from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3LoopDenoiser

from eval.cache_loss import loss_parts
from eval.metrics.pair import Clip, Pair
from eval.quality_cases import Case, Shape, fixed_cases
from eval.quality_trials import as_clip
from eval.stats import bootstrap_mean
from videogen.config import Recipe, StepCache
from videogen.families.h3_pipeline import LOOP, transformer_of
from videogen.jobs.plan import parse_size
from videogen.jobs.run import write_json
from videogen.pipeline import Pipeline, open_pipeline

logger = logging.getLogger(__name__)

SCHEMA = "videogen.peers/1"
Scope = Callable[[Pipeline, str, float], AbstractContextManager[Pipeline]]


class _ContextDenoiser(MiniMaxH3LoopDenoiser):  # type: ignore[misc]
    """The loop's forward inside a cache context, which the stock loop never enters."""

    def __call__(self, components: Any, block_state: Any, i: int, t: torch.Tensor) -> Any:
        transformer = getattr(components, self.transformer_name)
        steps = len(block_state.timesteps)
        with transformer.cache_context("request", step_index=i, num_inference_steps=steps, timestep=float(t), sigma=1 - float(t)):
            return super().__call__(components, block_state, i=i, t=t)


def _register() -> None:
    TransformerBlockRegistry.register(
        MiniMaxH3TransformerBlock,
        TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=None),
    )


@contextmanager
def diffusers_cache(pipeline: Pipeline, workflow: str, config: Any) -> Iterator[Pipeline]:
    """One of diffusers' caches around the requests rendered inside; put in fresh, taken out in any case."""
    _register()
    blocks = pipeline.load(workflow)._blocks.sub_blocks[LOOP].sub_blocks
    transformer, stock = transformer_of(pipeline.load(workflow)), blocks["denoiser"]
    blocks["denoiser"] = _ContextDenoiser(transformer_name=stock.transformer_name)
    try:
        transformer.enable_cache(config)
        yield pipeline
    finally:
        blocks["denoiser"] = stock
        if transformer.is_cache_enabled:
            transformer.disable_cache()


@contextmanager
def ours(pipeline: Pipeline, workflow: str, strength: float, *, order: int = 1) -> Iterator[Pipeline]:
    """Our cache at lambda `strength`."""
    del workflow
    cache = StepCache(lam=strength, video_order=order, audio_order=order)
    yield pipeline.sharing(replace(pipeline.recipe, name=f"lambda {strength:g}", cache=cache))


def first_block(pipeline: Pipeline, workflow: str, strength: float) -> AbstractContextManager[Pipeline]:
    """Diffusers' FirstBlockCache at threshold `strength`."""
    return diffusers_cache(pipeline, workflow, FirstBlockCacheConfig(threshold=strength))


def taylor(pipeline: Pipeline, workflow: str, strength: float) -> AbstractContextManager[Pipeline]:
    """Diffusers' TaylorSeer every `strength` steps, blocks skipped and both heads forecast (its lite mode forgets the audio head)."""
    config = TaylorSeerCacheConfig(
        cache_interval=int(strength),
        disable_cache_before_step=2,
        taylor_factors_dtype=torch.float32,
        skip_predict_identifiers=[r"^transformer_blocks\.[0-9]+$"],
        cache_identifiers=[r"^proj_out$", r"^audio_proj_out$"],
    )
    return diffusers_cache(pipeline, workflow, config)


@dataclass(slots=True)
class MagCache:
    """Diffusers' MagCache; its curve is measured on one clip outside the comparison, as its authors do."""

    case: Case
    ratios: list[float] = field(default_factory=list)

    def __call__(self, pipeline: Pipeline, workflow: str, strength: float) -> AbstractContextManager[Pipeline]:
        """The cache at accumulated error `strength`."""
        self.ratios = self.ratios or magnitude_ratios(pipeline, workflow, self.case)
        config = MagCacheConfig(threshold=strength, mag_ratios=self.ratios, num_inference_steps=len(self.ratios))
        return diffusers_cache(pipeline, workflow, config)


def magnitude_ratios(pipeline: Pipeline, workflow: str, case: Case) -> list[float]:
    """Mean norm of the stack's residual over that of the step before, per step (MagCache, arXiv 2506.09045)."""
    blocks = transformer_of(pipeline.load(workflow)).transformer_blocks
    norms: list[torch.Tensor] = []
    entered: list[torch.Tensor] = []
    handles = [
        blocks[0].register_forward_pre_hook(lambda _m, args: entered.append(args[0])),
        blocks[-1].register_forward_hook(lambda _m, _a, out: norms.append((out - entered.pop()).float().norm(dim=-1))),
    ]
    try:
        pipeline.render(replace(case.request, seed=case.seed))
    finally:
        for handle in handles:
            handle.remove()
    return [1.0, *(float((now / before.clamp(min=1e-8)).mean()) for before, now in pairwise(norms))]


@contextmanager
def counting(pipeline: Pipeline, workflow: str) -> Iterator[list[int]]:
    """Counts how often the last block's attention really ran: the one fact all caches share."""
    count = [0]

    def hit(*_: Any) -> None:
        count[0] += 1

    handle = transformer_of(pipeline.load(workflow)).transformer_blocks[-1].attn.to_q.register_forward_pre_hook(hit)
    try:
        yield count
    finally:
        handle.remove()


def methods(calibration: Case) -> dict[str, tuple[Scope, tuple[float, ...]]]:
    """Every method with the strengths that span its curve, mild first."""
    return {
        "videogen, order 1": (ours, (0.02, 0.04, 0.08, 0.12, 0.2, 0.3)),
        "videogen, order 0": (lambda p, w, s: ours(p, w, s, order=0), (0.02, 0.04, 0.08, 0.12, 0.2, 0.3)),
        "FirstBlockCache": (first_block, (0.02, 0.04, 0.08, 0.12, 0.2, 0.3)),
        "MagCache": (MagCache(calibration), (0.02, 0.06, 0.12, 0.24, 0.5)),
        "TaylorSeer": (taylor, (2, 3, 4, 5)),
    }


def measure_point(scope: Scope, pipeline: Pipeline, cases: list[Case], strength: float, references: dict[str, Clip]) -> dict[str, Any]:
    """One point of a curve: mean share computed and mean loss parts over the cases. Each request gets a fresh cache."""
    shares, rows = [], []
    for case in cases:
        workflow = case.request.workflow
        with scope(pipeline, workflow, strength) as renderer, counting(pipeline, workflow) as count:
            result = renderer.render(replace(case.request, seed=case.seed))
        shares.append(count[0] / result.record["forwards"])
        rows.append(loss_parts(Pair(as_clip(result, "cached"), references[case.name])))
    parts = {name: bootstrap_mean([row[name] for row in rows]) for name in rows[0]}
    return {
        "strength": strength,
        "computed": sum(shares) / len(shares),
        "parts": {name: {"mean": found.value, "low": found.low, "high": found.high} for name, found in parts.items()},
        "clips": len(rows),
    }


def compare(pipeline: Pipeline, cases: list[Case], calibration: Case, out: Path) -> dict[str, Any]:
    """Every method's curve; `peers.json` is written after each point, so that a stopped run keeps what it has."""
    references = {case.name: as_clip(pipeline.render(replace(case.request, seed=case.seed)), "uncached") for case in cases}
    report: dict[str, Any] = {"schema": SCHEMA, "model": pipeline.source.record(), "clips": len(cases), "curves": {}}
    for name, (scope, strengths) in methods(calibration).items():
        curve = report["curves"][name] = []
        for strength in strengths:
            point = measure_point(scope, pipeline, cases, strength, references)
            curve.append(point)
            logger.info("%s %g: %.3f computed, 1 - SSIM %.4f", name, strength, point["computed"], point["parts"]["video"]["mean"])
            write_json(out / "peers.json", report)
    return report


def main() -> None:
    """`python -m eval.peers`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--workflow", default="t2va")
    parser.add_argument("--steps", type=int, default=49)
    parser.add_argument("--size")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    args = parser.parse_args()
    pipeline = open_pipeline(args.model, Recipe(), device=args.device)
    shape = Shape(size=parse_size("--size", args.size) if args.size else None, frames=args.frames, steps=args.steps)
    cases = fixed_cases(args.prompts + 1, args.workflow, shape, pipeline.family, pipeline.recipe)
    args.out.mkdir(parents=True, exist_ok=True)
    logger.info("%s", json.dumps(compare(pipeline, cases[:-1], cases[-1], args.out)["curves"])[:2000])


if __name__ == "__main__":
    main()
