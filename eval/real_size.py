"""The reference at real size, where whole clips are too dear: stages and a few forwards of each workload, and what they project to.

`python -m eval.real_size --out DIR` opens the model as `videogen.load` does, one phase at a time: text of every workload, then
the text encoder goes and the transformer comes. Every figure says how often it was measured; clips per hour are projected.
"""

import argparse
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.block_times import EXACT_BACKENDS, NATIVE, attending, fastest, only_first_block, time_backends
from eval.cases import WORKLOADS, Workload, find_workload, make_request
from eval.fingerprint import fingerprint
from eval.kernel_profile import as_text, profile_call
from eval.report_folder import check_free, make_folder
from eval.staged import Components, Loop, Meter, StagedClip
from eval.timing import Timing, synchronizer, time_once
from videogen.config import DEVICES, DTYPES, Recipe, read_environment
from videogen.errors import EnvironmentFault, bad
from videogen.jobs.run import write_json, write_result, write_text
from videogen.load import pick_device, pick_dtype
from videogen.media import Encoding, to_uint8
from videogen.result import Result
from videogen.source import ModelSource, find_model, open_h3_family

logger = logging.getLogger(__name__)

SCHEMA = "videogen.real_size/1"
RESULT = "real_size.json"
FAILS = (RuntimeError, ValueError, MemoryError)  # of one workload (out of memory, mostly); the others still run


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. A workload gets `forwards` of them, fewer (at least one) when they would take over `max_forward_s`."""

    workloads: tuple[Workload, ...]
    forwards: int
    max_forward_s: float
    backends: tuple[str, ...]
    profiled: tuple[str, ...]
    skip_clip: bool
    out: Path


def run_plan(plan: Plan, source: ModelSource, device_name: str, dtype_name: str) -> dict[str, Any]:
    """Measure every workload and write `real_size.json` after each step, so that a stopped run keeps what it has; returns its content."""
    device = pick_device(device_name)
    components = Components(source, device, pick_dtype(dtype_name, device))
    meter = Meter(device, synchronizer(device))
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "model": source.record(),
        "device": device.type,
        "dtype": str(components.dtype).removeprefix("torch."),
        "fingerprint": fingerprint(),
        "phases": "text encoder freed before the transformer is loaded; VAEs stay",
        "weights": components.weights,
        "workloads": {},
    }
    family, runs = open_h3_family(source, "eval.real_size"), []
    for workload in plan.workloads:
        resolved = family.resolve(make_request(workload, 0), Recipe())
        entry = {"rows_estimated": family.estimate(resolved).rows, "forwards_of_a_clip": resolved.steps, "stages": {}}
        report["workloads"][workload.name] = entry
        runs.append(Measurement(StagedClip(workload.name, resolved), components, meter, plan, report, entry))
    for run in runs:
        run.keep_going(run.prepare)
    for run in runs:
        if "error" not in run.entry:
            run.keep_going(run.denoise)
            run.keep_going(run.finish)
        run.clip.state = type(run.clip.state)()  # its tensors
    return report


@dataclass(slots=True)
class Measurement:
    """One workload on its way into the report."""

    clip: StagedClip
    components: Components
    meter: Meter
    plan: Plan
    report: dict[str, Any]
    entry: dict[str, Any]
    loop: Loop | None = None

    def keep_going(self, part: Callable[[], None]) -> None:
        """Run one part and store it, or what went wrong with it, so that the others are still measured."""
        try:
            if "error" not in self.entry:
                part()
        except FAILS as error:
            self.entry["error"] = f"{type(error).__name__}: {str(error)[:400]}"
            logger.exception("%s failed", self.clip.name)
        self.save()

    def save(self) -> None:
        """Bring the report up to date, on disk too."""
        self.entry["stages"] = {name: stage.row() for name, stage in self.clip.stages.items()}
        if "forward" in self.entry:
            self.entry["projection"] = project(self.clip, self.entry)
        write_json(self.plan.out / RESULT, self.report)

    def prepare(self) -> None:
        """What comes before the loop."""
        self.clip.prepare(self.components, self.meter, seed=0)
        told = {name: round(stage.timing.median_s, 3) for name, stage in self.clip.stages.items()}
        logger.info("%s: %s", self.clip.name, told)

    def denoise(self) -> None:
        """Attention back ends, forwards on the fastest, and their kernels."""
        opening: list[Loop] = []
        load_s = time_once(lambda: opening.append(self.clip.open_loop(self.components)), synchronize=self.meter.synchronize)
        self.loop = loop = opening[0]
        entry, name = self.entry, self.clip.name
        entry |= {"load_transformer_s": load_s, "rows": loop.num_rows}
        entry["attention"] = backends = time_backends(loop.transformer, loop.forward, self.plan.backends, self.meter.synchronize)
        best = fastest(backends)
        entry["attention_used"] = best["backend"]
        with attending(loop.transformer, best["backend"]):
            self.meter.reset_peak()
            timing = time_forwards(loop, self.meter, self.plan, best["block_ms"] / 1e3)
            entry["forward"] = timing.row() | {"peak_gib": self.meter.peak_gib()}
            logger.info("%s: %.3f s per forward (%d of them, %s)", name, timing.median_s, len(timing.runs_s), best["backend"])
            self.save()
            if name in self.plan.profiled:
                self.profile("profile", f"{name}-kernels.txt", loop.forward)

    def finish(self) -> None:
        """From the latents to the file."""
        if self.loop is None or self.plan.skip_clip:
            return
        loop, clip = self.loop, self.clip
        loop.close()
        clip.decode(loop.pipe, self.meter)
        self.entry["vae_decode_s"] = clip.vae_s[-1]
        self.save()
        if clip.name in self.plan.profiled:
            self.profile("vae_profile", f"{clip.name}-vae-kernels.txt", lambda: clip.decode_part(loop.pipe))
        _write_clip(clip, self.meter)

    def profile(self, key: str, file: str, call: Callable[[], None]) -> None:
        """The kernels of a call, into the report and a text file."""
        self.entry[key] = profile_call(call, self.meter.device)
        write_text(self.plan.out / file, as_text(self.entry[key]))
        self.save()


def time_forwards(loop: Loop, meter: Meter, plan: Plan, block_s: float) -> Timing:
    """Steps of the loop. Warm-up is the timed blocks and one forward of a single block: all blocks have one shape."""
    with only_first_block(loop.transformer):
        loop.forward()
    runs = max(1, min(plan.forwards, loop.num_steps - 1, int(plan.max_forward_s / (block_s * len(loop.transformer.transformer_blocks)))))
    return Timing(tuple(time_once(loop.step, synchronize=meter.synchronize) for _ in range(runs)), 1)


def _write_clip(clip: StagedClip, meter: Meter) -> None:
    """The last two stages of a clip: floats to bytes, then encode, mux and read back."""
    frames, audio = np.nan_to_num(np.asarray(clip.state.get("videos"))[0]), clip.state.get("audio")[0].float().cpu().numpy()
    made: list[Any] = []
    clip.stages["to_uint8"] = meter.run(lambda: made.append(to_uint8(frames)))
    result = Result(made[0], np.clip(np.nan_to_num(audio), -1, 1), int(clip.state.get("sampling_rate")), clip.resolved.fps, {})
    folder = Path(tempfile.mkdtemp(prefix="videogen-real-size-"))
    try:
        clip.stages["encode"] = meter.run(lambda: write_result(folder / "clip.mp4", result, Encoding(), ""))
    except EnvironmentFault as error:
        logger.warning("no file written: %s", error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def project(clip: StagedClip, entry: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a whole clip and clips per hour, one after the other on one device, with the weights loaded."""
    forwards, forward = entry["forwards_of_a_clip"], entry["forward"]
    stages_s = sum(stage.timing.median_s for stage in clip.stages.values())
    clip_s = stages_s + forwards * forward["median_s"]
    label = f"projected from {forward['runs']} forward{'s' * (forward['runs'] > 1)}"
    parts = (("decoding", "decode.video"), ("conversion to bytes", "to_uint8"), ("encoding", "encode"))
    if missing := [what for what, stage in parts if stage not in clip.stages]:
        label += f", without {' and '.join(missing)}"
    return {"label": label, "clip_s": clip_s, "denoise_s": forwards * forward["median_s"], "clips_per_hour": 3600 / clip_s}


_COLUMNS = (
    *("workload", "rows", "attention", "s/forward (n, spread)", "text s", "condition s", "video decode s (VAE)", "audio decode s"),
    *("to bytes s", "encode s", "peak GiB denoise", "peak GiB decode", "clip s", "clips/h", "basis"),
)


def table(report: dict[str, Any]) -> str:
    """One row per workload, ready to paste; what ran and how above it."""
    gpus = ", ".join(gpu["name"] for gpu in report["fingerprint"]["gpus"]) or report["fingerprint"]["cpu"]
    lines = [
        f"{report['model']['source']} ({report['model']['label']}), {report['dtype']}, on {gpus};"
        f" torch {report['fingerprint']['software']['torch']}, commit {report['fingerprint']['commit'][:12]}",
        "weights: " + ", ".join(f"{name} {w['gib']:.2f} GiB ({w['parameters_b']:.3f} B)" for name, w in report["weights"].items()),
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
    ]
    for name, entry in report["workloads"].items():
        lines.append("| " + " | ".join([name, *(_cells(entry) if "forward" in entry else ["failed"])]) + " |")
    for name, entry in report["workloads"].items():
        lines += ["", *([f"{name} failed: {entry['error']}"] if "error" in entry else [])]
        for row in entry.get("attention", []):
            told = row.get("reason") or f"{row['block_ms']:.2f} ms per block, {row['relative_l2_to_native'] or 0:.1e} from native"
            lines.append(f"{name} attention {row['backend']}: {told}")
    return "\n".join(lines) + "\n"


def _cells(entry: dict[str, Any]) -> list[str]:
    stages, forward, projection = entry["stages"], entry["forward"], entry["projection"]

    def seconds(*names: str) -> str:
        found = [stages[name]["median_s"] for name in names if name in stages]
        return f"{sum(found):.3f}" if found else "n/a"

    rest = [n for n in stages if n not in ("text_encoder", "decode.video", "decode.audio", "to_uint8", "encode")]
    decode_peak = [stages[n]["peak_gib"] for n in ("decode.video", "decode.audio") if n in stages and stages[n]["peak_gib"] is not None]
    return [
        *(str(entry["rows"]), entry["attention_used"], f"{forward['median_s']:.3f} ({forward['runs']}, {forward['spread']:.1%})"),
        *(seconds("text_encoder"), seconds(*rest), f"{seconds('decode.video')} ({_digits(entry.get('vae_decode_s'), 3)})"),
        seconds("decode.audio"),
        *(seconds("to_uint8"), seconds("encode"), _digits(forward["peak_gib"], 1), _digits(max(decode_peak, default=None), 1)),
        *(f"{projection['clip_s']:.1f}", f"{projection['clips_per_hour']:.2f}", projection["label"]),
    ]


def _digits(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m eval.real_size --out DIR [--workload NAME ...]`; the table is the last thing logged."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    real = [name for name, workload in WORKLOADS.items() if workload.needs_gpu and workload.has_sound]  # H3's
    parser.add_argument("--workload", action="append", metavar="NAME", help=f"repeatable; default: {' '.join(real)}")
    parser.add_argument("--model", help="default: the workloads' own")
    parser.add_argument("--forwards", type=int, default=5)
    parser.add_argument("--max-forward-s", type=float, default=80.0, help="seconds of forwards per workload; at least one is timed")
    parser.add_argument(
        "--attention", default=",".join(EXACT_BACKENDS), metavar="NAME[,NAME]", help="default: %(default)s; the fastest is used"
    )
    parser.add_argument("--profile", default="", metavar="WORKLOAD[,WORKLOAD]", help="kernels of one forward of these")
    parser.add_argument("--skip-clip", action="store_true", help="no decoding and no encoding")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args(argv)
    workloads = tuple(find_workload(name) for name in args.workload or real)
    models = {args.model or workload.model for workload in workloads}
    if len(models) > 1:
        raise bad("--workload", args.workload, "workloads of one model", f"pass --model, or one run each ({', '.join(sorted(models))})")
    if args.forwards < 1 or not args.max_forward_s > 0:
        raise bad("--forwards and --max-forward-s", (args.forwards, args.max_forward_s), "at least 1, and above 0", "change them")
    if unknown := set(_names(args.profile)) - {workload.name for workload in workloads}:
        raise bad("--profile", sorted(unknown), "workloads that are measured", "add them with --workload")
    check_free(args.out, RESULT, overwrite=args.overwrite, option="--out")
    make_folder(args.out)
    backends = _names(args.attention) or (NATIVE,)
    plan = Plan(workloads, args.forwards, args.max_forward_s, backends, _names(args.profile), args.skip_clip, args.out)
    report = run_plan(plan, find_model(models.pop(), offline=read_environment().offline), args.device, args.dtype)
    text = table(report)
    write_text(args.out / "real_size.md", text)
    logger.info("\n%s", text)


if __name__ == "__main__":
    main()
