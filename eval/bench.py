"""One measurement of clips per hour: opens the arms, warms them up, renders, checks every clip, keeps the figures."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eval.arms import open_arms
from eval.cases import Workload, make_request
from eval.clip_check import broken_because
from eval.energy import EnergyMeter
from eval.fingerprint import fingerprint
from eval.throughput import Arm, ClipRow, Cold, Finish, Made, measure, speed_up, summarize, warm_up
from eval.timing import Clock, CpuClock, WallClock, synchronizer
from videogen.config import Recipe, recipe_record
from videogen.errors import EnvironmentFault, say
from videogen.jobs.run import write_result
from videogen.machine import peak_memory_mb
from videogen.media import Encoding
from videogen.pipeline import Pipeline

SCHEMA = "videogen.bench/2"
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a measurement is made."""

    min_clips: int = 20
    min_seconds: float = 600.0
    in_flight: int = 1
    repeat: int = 1
    warmup: int = 2
    device: str = "auto"
    model: str | None = None


def make_arm(pipeline: Pipeline, workload: Workload, folder: Path) -> Arm:
    """An arm that renders with this pipeline and writes and checks the clip; the file is removed once it was checked."""
    meter, device = EnergyMeter(pipeline.device), pipeline.device

    def arm(pair: int) -> Finish:
        before_wh, before_cpu_s = meter.read_wh(), CpuClock().now()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        result = pipeline.render(make_request(workload, pair, pipeline.recipe))
        synchronizer(device)()
        peak_mb, after_wh = peak_memory_mb(device) if device.type == "cuda" else None, meter.read_wh()
        energy_wh = None if before_wh is None or after_wh is None else after_wh - before_wh

        def finish() -> Made:
            began = WallClock().now()
            path = folder / f"{pipeline.recipe.name}-{pair}.mp4"
            info = write_result(path, result, Encoding(), "")
            path.unlink()
            stages = result.record["stages_s"] | {"encode": WallClock().now() - began}
            broken = broken_because(result, frames=workload.frames, size=workload.size, has_sound=workload.has_sound)
            if not broken and workload.has_sound and info.audio_codec is None:
                broken = "no audio stream"
            reused = int(result.record["cache"]["reused"])
            return Made(stages, int(result.record["forwards"]), reused, broken, peak_mb, energy_wh, CpuClock().now() - before_cpu_s)

        return finish

    return arm


@contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="videogen-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open(workload: Workload, recipes: dict[str, Recipe], protocol: Protocol, clock: Clock, cold: Cold) -> dict[str, Pipeline]:
    """The opened arms, loaded. The seconds of weights that arms share count for each of them: alone it would have paid them."""
    pipelines = open_arms(protocol.model or workload.model, recipes, protocol.device)
    device = next(iter(pipelines.values())).device
    if workload.needs_gpu and device.type != "cuda":
        raise EnvironmentFault(say(f"workload {workload.name}", "no CUDA device", "a GPU", "use a pocket workload on this machine"))
    paid: dict[torch.dtype, float] = {}  # arms of one dtype share weights
    for name, pipeline in pipelines.items():
        began = clock.now()
        pipeline.load(workload.workflow)
        cold.load_s[name] = paid.get(pipeline.dtype, 0.0) + clock.now() - began
        paid.setdefault(pipeline.dtype, cold.load_s[name])
    return pipelines


def run_bench(workload: Workload, recipes: dict[str, Recipe], protocol: Protocol, *, tell: Told) -> dict[str, Any]:
    """Measure one or two recipes (by arm name) on a workload; returns the content of `bench.json`.

    Raises RequestError or EnvironmentFault before anything is measured when an arm cannot run.
    """
    clock, cold = WallClock(), Cold()
    pipelines = _open(workload, recipes, protocol, clock, cold)
    tell("loaded: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in cold.load_s.items()))
    runs: list[list[ClipRow]] = []

    def ready(name: str) -> object:
        return pipelines[name].load(workload.workflow)

    with _scratch() as folder:
        arms = {name: make_arm(pipeline, workload, folder) for name, pipeline in pipelines.items()}
        cold.warmup_s = warm_up(arms, max(protocol.warmup, protocol.in_flight), clock, ready)
        tell("warm-up: " + ", ".join(f"{name} {[round(s, 2) for s in taken]} s" for name, taken in cold.warmup_s.items()))
        limits: dict[str, Any] = {"min_clips": protocol.min_clips, "min_seconds": protocol.min_seconds, "in_flight": protocol.in_flight}
        for number in range(protocol.repeat):
            rows = measure(arms, **limits, clock=clock, ready=ready)
            runs.append(rows)
            tell(f"repetition {number + 1} of {protocol.repeat}: {len(rows)} clips")
    return _report(workload, pipelines, protocol, cold, runs)


def _report(
    workload: Workload, pipelines: dict[str, Pipeline], protocol: Protocol, cold: Cold, runs: list[list[ClipRow]]
) -> dict[str, Any]:
    first, names = next(iter(pipelines.values())), list(pipelines)
    gpus = int(first.device.type == "cuda")
    rows = [row for run in runs for row in run]
    return {
        "schema": SCHEMA,
        "workload": asdict(workload),
        "model": first.source.record(),
        "dtype": str(first.dtype).removeprefix("torch."),
        "device": first.device.type,
        "recipes": {name: recipe_record(pipeline.recipe) for name, pipeline in pipelines.items()},
        "protocol": asdict(protocol),
        "fingerprint": fingerprint(),
        "arms": [summarize(rows, name, cold, gpus=gpus) for name in names],
        "repetitions": [[summarize(run, name, cold, gpus=gpus)["clips_per_hour_machine"] for name in names] for run in runs],
        "speed_up": speed_up(rows, names[0], names[1]) if len(names) == 2 else None,
        "peak_host_mb": peak_memory_mb(torch.device("cpu")),
        "clips": [asdict(row) | {"repetition": number, "seconds": row.seconds} for number, run in enumerate(runs) for row in run],
    }
