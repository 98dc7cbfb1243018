"""What the step cache costs at a given size: a replayed decision list on random latents, so that no weight has to mean anything.

`python -m eval.cache_overhead --model random:h3 --workload h3-t2va-5s --forwards 4 --out DIR` loads the transformer only.
"""

import argparse
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep, MiniMaxH3SetTimestepsStep

from caches.policy import Action, Budget, Decision, History, Step
from caches.step_hook import Channel, State, replaced, watched
from eval.cases import Workload, find_workload
from eval.fingerprint import fingerprint
from eval.timing import WallClock, synchronizer, time_call
from videogen.config import DEVICES, DTYPES, Recipe, Request
from videogen.errors import bad
from videogen.families.base import Resolved
from videogen.families.h3 import AUDIO_LATENTS_PER_SECOND, FPS, latent_frames
from videogen.jobs.run import write_json
from videogen.load import load_component, pick_device, pick_dtype
from videogen.source import ModelSource, find_model, open_h3_family

logger = logging.getLogger(__name__)

SCHEMA = "videogen.cache-overhead/1"
STREAK = 6  # reused steps in a row; more than the policy allows, for a median of five after a first one
PART_RUNS = 7


@dataclass(slots=True)
class Replay:
    """A rule that follows a list: drift is scored as always, and does not decide."""

    actions: list[Action]

    def __call__(self, budget: Budget, history: History, step: Step, drift: Mapping[str, float]) -> Decision:
        """The listed action of this step."""
        return Decision(self.actions[step.index], "replayed", drift=drift)


def replayed_list(computed: int) -> list[Action]:
    """Two computed steps, a streak of reused ones, and the other computed steps."""
    return [Action.COMPUTE] * 2 + [Action.REUSE] * STREAK + [Action.COMPUTE] * (computed - 2)


class Forward:
    """The transformer on random packed rows of a text request, laid out by the family's own builders."""

    def __init__(self, source: ModelSource, workload: Workload, total: int, device: torch.device, dtype: torch.dtype) -> None:
        family = open_h3_family(source, "eval.cache_overhead")
        request = Request(workload.prompt(0), size=workload.size, frames=workload.frames, steps=workload.steps)
        resolved = family.resolve(request, Recipe())
        self.model = load_component(source, "t2va", "transformer", device=device, dtype=dtype)
        config = self.model.config
        words = len(load_component(source, "t2va", "tokenizer", device=device, dtype=dtype)(resolved.prompt)["input_ids"])
        plan = self._plan(resolved, words, (latent_frames(resolved.frames, family.geometry), family.geometry.canvas_multiple // 2))
        self.shifts = (family.geometry.video_shift, family.geometry.audio_shift)
        self.layout = {key: value.to(device) for key, value in plan.items()}
        rows = {key: len(self.layout[f"{key}_indices"]) for key in ("text", "video", "audio")}
        widths = {"text": config.text_dim, "video": config.in_channels * 4, "audio": config.audio_in_channels}
        generator = torch.Generator(device).manual_seed(0)
        self.rows, self.states = rows, {k: torch.randn(1, rows[k], widths[k], generator=generator, device=device) for k in rows}
        self.sigmas = {"video": self._sigmas(self.shifts[0], total), "audio": self._sigmas(self.shifts[1], total)}

    @staticmethod
    def _plan(resolved: Resolved, words: int, sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
        frames, pixels = sizes
        sounds = round(resolved.frames / FPS * AUDIO_LATENTS_PER_SECOND)
        latents = (frames, resolved.height // pixels, resolved.width // pixels)
        built = MiniMaxH3PrepareLayoutStep.build_packed_sequence(torch.ones(words), *latents, sounds, (1, 2, 2), 2, 2, 0)
        return dict(zip(("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices"), built))

    @staticmethod
    def _sigmas(shift: float, total: int) -> list[float]:
        scheduler = MiniMaxH3Scheduler(shift=shift)
        scheduler.set_timesteps(total + 1)
        return [float(sigma) for sigma in scheduler.sigmas]

    @torch.no_grad()
    def __call__(self, index: int) -> Any:
        """Both velocities at step `index` of the schedule."""
        cpu = [self.layout[f"{key}_indices"].cpu() for key in ("video", "audio")]
        times = [1 - self.sigmas[key][index] for key in ("video", "audio")]
        t, where = MiniMaxH3SetTimestepsStep.build_row_timesteps(*cpu, 0, 0, self.rows["text"], *times, 0.999, 1.0)
        device = self.states["text"].device
        return self.model(
            self.states["video"],
            self.states["audio"],
            self.states["text"],
            timestep=t.to(device),
            timestep_indices=where.to(device),
            return_dict=False,
            **self.layout,
        )

    @property
    def channels(self) -> dict[str, Channel]:
        """The generated rows: in a text request, every video and audio row."""
        return {key: Channel(self.layout[f"{key}_indices"], self.sigmas[key]) for key in ("video", "audio")}


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call."""
    clock, synchronize = WallClock(), synchronizer(device)
    synchronize()
    began = clock.now()
    call()
    synchronize()
    return 1e3 * (clock.now() - began)


def summary(values: list[float]) -> dict[str, Any]:
    """Median and every value, in milliseconds."""
    return {"median_ms": round(median(values), 4), "all_ms": [round(value, 3) for value in values]}


def peak_bytes(device: torch.device) -> int | None:
    """The most device memory allocated since the last call; unknown on a CPU."""
    if device.type != "cuda":
        return None
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return most


@torch.no_grad()
def measure_parts(state: State, hidden: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Scoring, keeping and predicting on their own; (B, S, D) rows of the real size stand in for hidden states."""
    after = hidden * 1.01
    parts = {
        "score": lambda: state.score(hidden, after),
        "predict": lambda: state.predict(hidden),
        "keep": lambda: state.keep(hidden, after),  # last: it puts several residuals at one sigma
    }
    found = {}
    state.index = len(state.trace.decisions) - 1  # a step that exists
    for name, call in parts.items():
        timing = time_call(call, runs=PART_RUNS, synchronize=synchronizer(device))
        found[name] = summary([1e3 * seconds for seconds in timing.runs_s])
    return found


def measure(forward: Forward, computed: int, device: torch.device) -> dict[str, Any]:
    """Uncached forwards, then the replayed list under the cache, then the cache's parts."""
    actions, blocks = replayed_list(computed), forward.model.transformer_blocks
    first_ms = timed(lambda: forward(0), device)  # warm-up: handles, workspaces
    peak_bytes(device)
    uncached = [timed(lambda k=k: forward(k), device) for k in range(computed)]  # type: ignore[misc]
    uncached_peak = peak_bytes(device)
    state = State(Budget(lam=1.0), forward.channels, rule=Replay(actions))
    took: dict[Action, list[float]] = {Action.COMPUTE: [], Action.REUSE: []}
    with replaced(forward.model, "transformer_blocks", watched(blocks, state)):
        for index, action in enumerate(actions):
            took[action].append(timed(lambda k=index: forward(k), device))  # type: ignore[misc]
    cached_peak = peak_bytes(device)
    probe = state.probe["video"][-1].residual
    hidden = torch.randn(1, sum(forward.rows.values()), probe.shape[-1], device=device, dtype=probe.dtype)
    parts = measure_parts(state, hidden, device)
    step = median(uncached)
    return {
        "rows": forward.rows | {"all": sum(forward.rows.values())},
        "first_forward_ms": round(first_ms, 1),
        "uncached_step": summary(uncached),
        "computed_step": summary(took[Action.COMPUTE]),
        "reused_step": summary(took[Action.REUSE]),
        "parts": parts,
        "scoring_share_of_a_step": parts["score"]["median_ms"] / step,
        "reused_share_of_a_step": median(took[Action.REUSE]) / step,
        "cache_bytes": state.num_bytes,
        "peak_bytes": {"uncached": uncached_peak, "cached": cached_peak},
    }


def main() -> None:
    """`python -m eval.cache_overhead`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:h3")
    parser.add_argument("--workload", default="h3-t2va-5s")
    parser.add_argument("--forwards", type=int, default=4, metavar="N", help="computed steps with and without the cache")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/cache-overhead"))
    args = parser.parse_args()
    if args.forwards < 3:
        raise bad("--forwards", args.forwards, "at least 3", "measure more")
    workload, device = find_workload(args.workload), pick_device(args.device)
    if workload.reference is not None:
        raise bad("--workload", workload.name, "a text workload", "use h3-t2va-5s or h3-t2va-15s")
    dtype, clock = pick_dtype(args.dtype, device), WallClock()
    began = clock.now()
    forward = Forward(find_model(args.model), workload, args.forwards + STREAK, device, dtype)
    loaded_s = clock.now() - began
    report = {"schema": SCHEMA, "model": args.model, "workload": workload.name, "dtype": str(dtype).removeprefix("torch.")}
    report |= {"load_s": round(loaded_s, 1), **measure(forward, args.forwards, device), "machine": fingerprint()}
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "cache-overhead.json", report)
    shown = {key: report[key]["median_ms"] for key in ("uncached_step", "computed_step", "reused_step")}
    logger.info("loaded in %.0f s; ms: %s; scoring %.4f of a step", loaded_s, shown, report["scoring_share_of_a_step"])
    logger.info("cache %.1f MB", report["cache_bytes"] / 1e6)


if __name__ == "__main__":
    main()
