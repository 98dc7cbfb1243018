"""The gates of pocket-h3: the oracle on reconstructions, on samples while the transformer trains, and the curve over fewer forwards."""

import json
import logging
from pathlib import Path
from typing import Any

import torch

from eval import oracle, prompts
from eval.stats import wilson
from videogen.errors import VideogenError, say
from videogen.pocket import captions, data, sizes, world
from videogen.pocket.cache import Asked, Cache, Canvas, Models
from videogen.pocket.shapes import parts, unflatten
from videogen.pocket.train_audio import log_spectral_distance, sound_pool
from videogen.pocket.train_transformer import FULL, SHORT, Trainer, export, options, train
from videogen.pocket.train_vae import reconstruct

FORWARDS = (49, 29, 19, 12, 8, 4)
log = logging.getLogger(__name__)


@torch.no_grad()
def vae_gate(folder: Path, number: int, device: torch.device) -> dict[str, Any]:
    """The oracle on stock reconstructions of unseen whole clips: every attribute, all together, badges, PSNR, sound."""
    models = Models(folder, device)
    plain_scenes, plain = data.draw(number, 500, held_out=True)
    _, badges = data.draw(number // 4, 501, held_out=True, badge=True)
    hits: dict[str, list[torch.Tensor]] = {}
    errors, inked = [], []
    for begin in range(0, number, 16):
        part = plain[begin : begin + 16].to(device)
        frames, seen = reconstruct(models.vae, part, device, FULL)
        for name, good in oracle.agrees(oracle.read_video(seen), plain_scenes[begin : begin + 16]).items():
            hits.setdefault(name, []).append(good)
        cover = world.render(part, world.frame_times(), sizes.HEIGHT, sizes.WIDTH)[1] > 0
        errors.append(oracle.psnr(seen, frames))
        inked.append(-10 * (seen - frames)[cover].pow(2).mean().log10())
    match = [
        oracle.badge_match(reconstruct(models.vae, part, device, FULL)[1], part)
        for part in (badges[i : i + 16].to(device) for i in range(0, len(badges), 16))
    ]
    every = {name: torch.cat(values) for name, values in hits.items()}
    layout = plain.to(device)
    sound = world.sound(layout, 207, sizes.AUDIO_RATE_HZ)
    heard = models.audio.decode(models.audio.encode(sound.flatten(0, 1)[:, None]).latent_dist.mode()).sample
    heard_ok = oracle.agrees(oracle.read_audio(unflatten(heard[:, 0], 0, (-1, 2)), sizes.AUDIO_RATE_HZ), plain_scenes)
    return {
        **{name: _share(good) for name, good in {**every, **heard_ok}.items()},
        "all": _share(torch.stack([*every.values(), *heard_ok.values()]).all(dim=0)),
        "badge_right": _share(torch.cat(match) >= 8 / 9 - 1e-6),
        "psnr_db": float(torch.cat(errors).mean()),
        "foreground_db": float(torch.stack(inked).mean()),
        "audio_lsd_db": log_spectral_distance(models.audio, sound_pool(device, 64, 31)[:, None]),
        "clips": number,
    }


def _share(good: torch.Tensor) -> float:
    return float(good.float().mean())


def asked(requests: list[prompts.EvalRequest]) -> list[Asked]:
    """Stored requests in the cache's terms."""
    kinds = {"t2va": "t", "ref2va": "r"}
    return [Asked(kinds.get(r.workflow, r.anchors[:1]), r.prompt, r.scene, r.world_seed) for r in requests]


class Bench:
    """Stored requests of one workflow, encoded; samples them and reads what comes out."""

    def __init__(self, models: Models, workflow: str, number: int, canvas: Canvas = sizes.SMALL) -> None:
        self.workflow, self.number, self.canvas = workflow, number, canvas
        self.cache = Cache.of(models, asked(prompts.load(workflow, number)), badge=workflow == "ref2va", canvas=canvas)

    @torch.no_grad()
    def run(self, trainer: Trainer, num_frames: int, forwards: int) -> tuple[dict[str, float], torch.Tensor, torch.Tensor]:
        """Counts of right answers, all clips as uint8 (N, T, H, W, 3) in request order, and per-request all-right flags."""
        cache, device = self.cache, trainer.device
        hits: dict[str, torch.Tensor] = {}
        clips = torch.zeros(self.number, num_frames, *self.canvas, 3, dtype=torch.uint8)
        for order, bucket in enumerate(cache.buckets):
            generator = torch.Generator(device).manual_seed(1000 + order)
            for index in parts(torch.arange(len(bucket.clip), device=device), 64 if self.canvas == sizes.SMALL else 24):
                frames, sound = trainer.sample(cache, bucket, index, num_frames, forwards, generator)
                where = bucket.clip[index].cpu()
                clips[where] = data.quantise(frames).cpu()
                scenes = [bucket.scenes[i] for i in index.tolist()]
                for name, good in self.judged(frames, sound, scenes, where, bucket.kind).items():
                    hits.setdefault(name, torch.zeros(self.number))[where] = good.float().cpu()
        flags = torch.stack([v for k, v in hits.items() if not k.endswith("_db")]).amin(dim=0)
        totals = {name: float(v.sum() if not name.endswith("_db") else v[v > 0].mean()) for name, v in hits.items()}
        return {**totals, "all": float(flags.sum())}, clips, flags

    def judged(
        self, frames: torch.Tensor, sound: torch.Tensor, scenes: list[captions.Scene], where: torch.Tensor, kind: str
    ) -> dict[str, torch.Tensor]:
        """Per clip: what the oracle finds right, and the fidelity of given frames."""
        out = {**oracle.agrees(oracle.read_video(frames), scenes), **oracle.agrees(oracle.read_audio(sound, sizes.AUDIO_RATE_HZ), scenes)}
        if kind == "r":
            badge = oracle.badge_match(frames, self.cache.badges[where].to(frames.device))
            return {**{k: out[k] for k in ("motion", "background", "pitch", "pan")}, "badge": badge >= 8 / 9 - 1e-6}
        if kind in "flb":
            part = self.cache.layout[where].to(frames.device)
            last = (frames.shape[1] - 1) / world.FPS
            truth, _ = world.render(part, torch.tensor([0.0, last]), *self.canvas)
            if kind in "fb":
                out["first_db"] = oracle.psnr(frames[:, 0], truth[:, 0])
            if kind in "lb":
                out["last_db"] = oracle.psnr(frames[:, -1], truth[:, 1])
        return out


def quick_judge(number: int, forwards: int) -> Any:
    """A judge for `train`: a few stored requests of every workflow, shares right."""
    benches: list[Bench] = []

    def judge(trainer: Trainer, short: bool) -> dict[str, Any]:
        if not benches:
            benches.extend(Bench(trainer.models, w, number if w == "t2va" else number // 2) for w in prompts.WORKFLOWS)
            benches.extend(Bench(trainer.models, "t2va", number, cache.canvas) for cache in trainer.caches if cache.canvas == sizes.LARGE)
        frames = SHORT if short else FULL
        out: dict[str, Any] = {"forwards": forwards}
        for bench in benches:
            if short and bench.workflow == "fl2va":
                continue
            totals, _, _ = bench.run(trainer, frames, forwards)
            name = bench.workflow if bench.canvas == sizes.SMALL else f"{bench.workflow} large"
            out[name] = {k: round(v if k.endswith("_db") else v / bench.number, 3) for k, v in totals.items()}
        return out

    return judge


def curve(trainer: Trainer, out: Path, numbers: dict[str, int], canvas: Canvas) -> dict[str, Any]:
    """Accuracies with intervals over fewer forwards and with every other block left out; PSNR to the 49-forward clip."""
    facts: dict[str, Any] = {}
    for workflow, number in numbers.items():
        bench = Bench(trainer.models, workflow, number, canvas)
        best: torch.Tensor | None = None
        whole = workflow == "t2va" and canvas == sizes.SMALL
        for forwards in FORWARDS if whole else (FORWARDS[0], FORWARDS[3]):
            best = _one(facts, f"{workflow}@{forwards}", bench, trainer, forwards, best, out)
        if whole:
            trainer.forward.skip = frozenset(range(1, sizes.TRANSFORMER["num_layers"], 2))
            _one(facts, "t2va@49 without every other block", bench, trainer, FORWARDS[0], best, out)
            trainer.forward.skip = frozenset()
        (out / f"curve-{workflow}-{canvas[1]}.json").write_text(
            json.dumps({k: v for k, v in facts.items() if k.startswith(workflow)}, indent=1)
        )
    return facts


def _one(
    facts: dict[str, Any], name: str, bench: Bench, trainer: Trainer, forwards: int, best: torch.Tensor | None, out: Path
) -> torch.Tensor:
    totals, clips, _ = bench.run(trainer, FULL, forwards)
    row: dict[str, Any] = {}
    for key, value in totals.items():
        if key.endswith("_db"):
            row[key] = round(value, 2)
        else:
            found = wilson(int(value), bench.number)
            row[key] = [round(bound, 4) for bound in (found.value, found.low, found.high) if bound is not None]
    if best is not None:
        row["psnr_to_49_db"] = round(float(oracle.psnr(clips[:64].float() / 255, best[:64].float() / 255).mean()), 2)
    facts[name] = {"n": bench.number, **row}
    log.info("%s", json.dumps({name: facts[name]}))
    torch.save(clips[:12, ::20], out / f"sheet-{name.replace('@', '-').replace(' ', '_')}.pt")
    return clips if best is None else best


def main() -> None:
    """`python -m eval.pocket_gates {vae,train,curve}`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    p = options()
    p.add_argument("what", choices=("vae", "train", "curve"))
    p.add_argument("--number", type=int, default=128, help="requests of each workflow")
    p.add_argument("--canvas", choices=tuple(sizes.CANVASES), default="small", help="for the curve: 160x96 or 256x144")
    p.add_argument("--workflows", nargs="*", choices=prompts.WORKFLOWS, help="for the curve; all by default")
    args = p.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.what == "vae":
        facts = vae_gate(args.folder, args.number, device)
        (args.out / "gate-vae.json").write_text(json.dumps(facts))
        log.info("%s", json.dumps({"gate": "vae", **facts}))
        if facts["all"] < 0.9:
            raise VideogenError(say("reconstruction gate", f"{facts['all']:.3f}", "at least 0.9", "train the VAEs longer first"))
        return
    if args.what == "train":
        trainer = train(args, quick_judge(args.number, 12))
        export(trainer, args.out)
    else:
        args.seconds, args.resume, args.clips = 0.0, True, 40
        trainer = train(args)
    if args.what == "curve":
        trainer.forward.compiled_sampling = device.type == "cuda"
        canvas = sizes.CANVASES[args.canvas]
        curve(trainer, args.out, dict.fromkeys(args.workflows or prompts.WORKFLOWS, args.number), canvas)


if __name__ == "__main__":
    main()
