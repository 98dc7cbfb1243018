"""Few-step adapters of pocket-h3 against the model they came from: oracle accuracy and PSNR to the same-noise clip, with intervals.

`python -m eval.distil_gate --folder DIR --adapters turbo4.safetensors turbo8.safetensors --out runs/gate --number 256`
"""

import argparse
import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval import oracle, prompts
from eval.pocket_gates import Bench
from eval.stats import bootstrap_mean, wilson
from lora.adapter import Adapter
from lora.apply import Use, attached
from lora.contract import resolve_contract
from lora.convert import load_adapter
from lora.target import target_of
from videogen.errors import bad
from videogen.families.h3 import read_geometry
from videogen.pocket import data, sizes
from videogen.pocket.bank import CHANNELS, conditions_of
from videogen.pocket.cache import Canvas, Models
from videogen.pocket.clip_rows import decode, rows_of
from videogen.pocket.distil import load_transformer
from videogen.pocket.packed import PackedForward, sample
from videogen.pocket.shapes import parts
from videogen.pocket.train_transformer import FULL

log = logging.getLogger(__name__)
TEACHER, BASES = 49, (12, 24)
MARGINS = {4: (0.02, 12), 8: (0.01, 24)}  # forwards -> accuracy it may lose, and the undistilled model it must match in PSNR


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to sample: forwards, shifts (audio, video), and the adapter in force."""

    name: str
    forwards: int
    shifts: tuple[float, float]
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What one arm gave: right or wrong (n,) by attribute, PSNR (n,) to the teacher's clip in dB, given frames' fidelity."""

    hits: dict[str, torch.Tensor]
    psnr: torch.Tensor
    given_db: dict[str, float]

    @property
    def every(self) -> torch.Tensor:
        """Whether all was right, by request."""
        return torch.stack(list(self.hits.values())).amin(dim=0)

    @property
    def share(self) -> torch.Tensor:
        """The share of attributes that were right, by request."""
        return torch.stack(list(self.hits.values())).mean(dim=0)


def arms_of(model: Any, files: list[Path], shifts: tuple[float, float]) -> list[Arm]:
    """The teacher first, undistilled arms, then each file by its own contract. Raises ValueError for a file without one."""
    found = [Arm(f"base@{n}", n, shifts) for n in (TEACHER, *BASES)]
    target = target_of(model)
    for file in files:
        adapter = load_adapter(file, target)
        contract = resolve_contract(str(file), adapter.metadata, partition=adapter.partition)
        n, video, audio = contract.forwards, contract.shift_video, contract.shift_audio
        if n is None or video is None or audio is None or contract.sigmas is not None:
            raise bad("adapter", f"{file} without forwards and both shifts", "a file of videogen lora distil", "distil it again")
        if n not in (arm.forwards for arm in found):
            found.append(Arm(f"base@{n}", n, shifts))
        found.append(Arm(f"{file.stem}@{n}", n, (audio, video), adapter))
    return found


class Gate:
    """Models, the transformer and one workflow's requests."""

    def __init__(
        self, models: Models, model: Any, workflow: str, number: int, *, num_frames: int, batch: int, canvas: Canvas = sizes.SMALL
    ) -> None:
        self.model, self.device, self.frames, self.batch = model, models.device, num_frames, batch
        self.bench = Bench(models, workflow, number, canvas)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.forward = PackedForward(model, dtype=dtype)
        self.clips: torch.Tensor | None = None  # the teacher's, uint8 on the CPU

    @torch.no_grad()
    def run(self, arm: Arm) -> Found:
        """Every request with the noise that every arm gets; the first arm's clips are what the others are compared with."""
        scope: AbstractContextManager[Any] = nullcontext()
        if arm.adapter is not None:
            scope = attached(self.model, [Use(arm.adapter)], fuse=True)
        number = self.bench.number
        hits: dict[str, torch.Tensor] = {}
        psnr, kept = torch.zeros(number), []
        with scope:
            for where, frames, sound, scenes, kind in self._sampled(arm):
                frames = data.quantise(frames)
                if self.clips is None:
                    kept.append((where, frames.cpu()))
                else:
                    psnr[where] = oracle.psnr(frames.float() / 255, self.clips[where].to(self.device).float() / 255).cpu()
                for name, good in self.bench.judged(frames.float() / 255, sound, scenes, where, kind).items():
                    hits.setdefault(name, torch.full((number,), torch.nan))[where] = good.float().cpu()
        if self.clips is None:
            self.clips = torch.zeros(number, *kept[0][1].shape[1:], dtype=torch.uint8)
            for where, frames in kept:
                self.clips[where] = frames
        given = {name: round(float(value.nanmean()), 2) for name, value in hits.items() if name.endswith("_db")}
        return Found({name: right for name, right in hits.items() if not name.endswith("_db")}, psnr, given)

    def _sampled(self, arm: Arm) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Any], str]]:
        cache = self.bench.cache
        for order, bucket in enumerate(cache.buckets):
            generator = torch.Generator(self.device).manual_seed(1000 + order)
            rows = rows_of(bucket, self.frames)
            for index in parts(torch.arange(len(bucket.clip), device=self.device), self.batch):
                condition = conditions_of(cache, bucket, index, self.frames, generator)
                text = bucket.text[index].float()
                audio, video = sample(self.forward, rows, text, condition, CHANNELS, arm.forwards, arm.shifts, generator)
                frames, sound = decode(cache.models, audio, video, self.frames, cache.canvas)
                yield bucket.clip[index].cpu(), frames, sound, [bucket.scenes[i] for i in index.tolist()], bucket.kind


def report(found: dict[str, Found], arms: list[Arm]) -> dict[str, Any]:
    """Accuracies with Wilson's intervals, paired differences to the teacher and PSNR with bootstrap intervals, by arm."""
    teacher = found[arms[0].name]
    rows: dict[str, Any] = {}
    for arm in arms:
        each = found[arm.name]
        n = len(each.every)
        row: dict[str, Any] = {"n": n, "forwards": arm.forwards, "shifts (audio, video)": arm.shifts, **each.given_db}
        for name, right in {**each.hits, "all together": each.every}.items():
            row[name] = _rounded(wilson(int(right.sum()), n))
        row["mean accuracy"] = _rounded(bootstrap_mean(each.share.tolist()))
        if arm is not arms[0]:
            row["mean accuracy - teacher"] = _rounded(bootstrap_mean((each.share - teacher.share).tolist()))
            row["all together - teacher"] = _rounded(bootstrap_mean((each.every - teacher.every).tolist()))
            row["psnr_db"] = _rounded(bootstrap_mean(each.psnr.tolist()))
        rows[arm.name] = row
    for arm in (arm for arm in arms if arm.adapter is not None and arm.forwards in MARGINS):
        margin, base = MARGINS[arm.forwards]
        row, other = rows[arm.name], found[f"base@{base}"]
        gain = _rounded(bootstrap_mean((found[arm.name].psnr - other.psnr).tolist()))
        lost = [row[f"{name} - teacher"][0] for name in ("mean accuracy", "all together")]
        row[f"psnr_db - base@{base}"] = gain
        row["gate"] = {"accuracy": [value >= -margin for value in lost], "psnr": gain[0] >= 0, "margin": margin, "base": base}
    return rows


def _rounded(found: Any) -> list[float]:
    return [round(bound, 4) for bound in (found.value, found.low, found.high) if bound is not None]


def main() -> None:
    """The command; writes `gate-WORKFLOW-WIDTH.json` and logs a line for each arm."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--folder", type=Path, required=True)
    p.add_argument("--adapters", type=Path, nargs="*", default=[])
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--number", type=int, default=256, help="requests of each workflow")
    p.add_argument("--workflows", nargs="*", choices=prompts.WORKFLOWS, default=list(prompts.WORKFLOWS))
    p.add_argument("--frames", type=int, default=FULL)
    p.add_argument("--canvas", choices=tuple(sizes.CANVASES), default="small", help="160x96 or 256x144")
    p.add_argument("--batch", type=int, default=32)
    args = p.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    geometry = read_geometry(args.folder, {})
    models, model = Models(args.folder, device), load_transformer(args.folder, device)
    arms = arms_of(model, args.adapters, (geometry.audio_shift, geometry.video_shift))
    canvas = sizes.CANVASES[args.canvas]
    for workflow in args.workflows:
        gate = Gate(models, model, workflow, args.number, num_frames=args.frames, batch=args.batch, canvas=canvas)
        found: dict[str, Found] = {}
        for arm in arms:
            found[arm.name] = gate.run(arm)
            log.info("%s %s all together %.3f, mean %.4f", workflow, arm.name, found[arm.name].every.mean(), found[arm.name].share.mean())
        rows = report(found, arms)
        (args.out / f"gate-{workflow}-{canvas[1]}.json").write_text(json.dumps(rows, indent=1))
        log.info("%s", json.dumps({workflow: rows}))


if __name__ == "__main__":
    main()
