"""Trains the transformer for all workflows on cached latents: short clips first, then whole ones; averaged weights."""

import argparse
import json
import logging
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel

from videogen.errors import bad
from videogen.pocket import packed, sizes
from videogen.pocket.build import save_model
from videogen.pocket.cache import Bucket, Cache, Canvas, Models
from videogen.pocket.clip_rows import audio_latents, decode, rows_of
from videogen.pocket.ranks import Ranks
from videogen.pocket.steps import Steps
from videogen.pocket.train_vae import parser
from videogen.pocket.training import Log, load_state, rate_at, save_state

RATE, MUON_RATE = 1.2e-3, 3e-3
SHORT, FULL = 39, 124  # frames
ROW_BUDGET = 36_000  # packed rows a step and rank
HIGH = 0.8  # base level; video noise .98 at shift 12
CLOCK_STEPS = 20  # the ranks agree on the time this often
SHIFTS = (sizes.AUDIO_SHIFT, sizes.VIDEO_SHIFT)
Judge = Callable[["Trainer", bool], dict[str, Any]]  # reads samples of the averaged weights; the second argument asks for short clips


def new_transformer() -> Any:
    """The stock class, every block near the identity: modulation starts at zero with small gates, heads at zero."""
    model = MiniMaxH3Transformer3DModel(**sizes.TRANSFORMER)
    width = sizes.TRANSFORMER["hidden_size"]
    with torch.no_grad():
        for block in model.transformer_blocks:
            block.adaln_proj.linear.weight.zero_()
            bias = block.adaln_proj.linear.bias.zero_().view(3, 6, width)
            bias[:, 2].fill_(0.3)
            bias[:, 5].fill_(0.3)
        for part in (model.norm_out.linear, model.proj_out, model.audio_proj_out):
            part.weight.zero_()
            part.bias.zero_()
    return model


def emphasised(u: torch.Tensor, share: float) -> torch.Tensor:
    """Base levels, uniform in [0, 1], of which `share` are moved into the noisiest fifth, where place and number are decided."""
    edge = HIGH * (1 - share)
    return torch.where(u < edge, u / (1 - share), HIGH + (u - edge) / (1 - edge) * (1 - HIGH))


class Trainer:
    """Model, cache, optimiser and the layouts of every bucket."""

    def __init__(self, models: Models, caches: list[Cache], log: Log, ranks: Ranks, *, rates: tuple[float, float], budget: int) -> None:
        self.device, self.models, self.caches, self.log, self.ranks, self.budget = models.device, models, caches, log, ranks, budget
        self.model = new_transformer().to(self.device)
        on_gpu = self.device.type == "cuda"
        self.forward = packed.PackedForward(self.model, dtype=torch.bfloat16 if on_gpu else torch.float32, compiled=on_gpu)
        self.advance = Steps(self.model, ranks, rate=rates[0], muon_rate=rates[1])
        self.average = self.advance.average
        self.steps = self.seen = 0
        self.high = self.large = self.least = 0.0
        self._rows: dict[tuple[str, int, int, Canvas], packed.Rows] = {}
        self.losses = torch.zeros(2, device=self.device)

    def rows(self, bucket: Bucket, num_frames: int) -> packed.Rows:
        """The layout of a bucket's requests at a clip length."""
        key = (bucket.kind, len(bucket.tags), num_frames, bucket.canvas)
        if key not in self._rows:
            self._rows[key] = rows_of(bucket, num_frames)
        return self._rows[key]

    def loss(self, cache: Cache, bucket: Bucket, index: torch.Tensor, num_frames: int) -> torch.Tensor:
        """Velocity error of video plus that of sound on some requests of a cache's bucket."""
        rows, size = self.rows(bucket, num_frames), len(index)
        video = cache.rows[bucket.clip[index], : rows.video].float()
        audio = cache.audio[bucket.sound[index], :, : audio_latents(num_frames)].flatten(1, 2)
        clean = cache.condition(bucket, index, num_frames)
        condition = packed.ANCHOR_T * clean + (1 - packed.ANCHOR_T) * torch.randn_like(clean)
        u = (torch.rand((), device=self.device) + torch.arange(size, device=self.device) / size) % 1.0  # evenly spread levels
        u = emphasised(u, self.high)
        t_audio, t_video = (1 - packed.shifted(u, shift) for shift in SHIFTS)
        noise_v, noise_a = torch.randn_like(video), torch.randn_like(audio)
        mixed_v = t_video[:, None, None] * video + (1 - t_video[:, None, None]) * noise_v
        mixed_a = t_audio[:, None, None] * audio + (1 - t_audio[:, None, None]) * noise_a
        v_audio, v_video = self.forward(rows, bucket.text[index].float(), condition, mixed_a, mixed_v, t_audio, t_video)
        loss_v = (v_video - (video - noise_v)).pow(2).mean()
        loss_a = (v_audio - (audio - noise_a)).pow(2).mean()
        self.losses.lerp_(torch.stack([loss_v, loss_a]).detach(), 0.02)
        return loss_v + loss_a

    def run(
        self, num_frames: int, until: float, rate_of: Callable[[float], float], checks: list[float], judge: Judge | None, out: Path
    ) -> None:
        """Steps on clips of `num_frames` until `until` on the stage's clock; `checks` are the moments to save and let the judge look."""
        rng = random.Random(self.steps)
        choices, shares = self._choices("tfr" if num_frames != FULL else "tflbr")
        said, seen = self.log.seconds(), self.seen
        while True:
            if self.steps % CLOCK_STEPS == 0:
                now = self.ranks.agree(self.log.seconds())
                if now >= until:
                    return
                self.advance.set_rate(rate_of(now))
                if checks and now > checks[0]:
                    checks.pop(0)
                    self.save(out)
                    self.look(judge, num_frames == SHORT)
                if self.log.seconds() - said > 10:
                    rate = (self.seen - seen) / (self.log.seconds() - said)
                    said, seen = self.log.seconds(), self.seen
                    losses = {"loss_video": self.losses[0], "loss_audio": self.losses[1]}
                    self.log(frames=num_frames, steps=self.steps, samples=self.seen, per_s=rate, **losses)
            cache, bucket = rng.choices(choices, shares)[0]
            size = max(1, self.budget // self.rows(bucket, num_frames).length // 4 * 4) if self.budget > 8000 else 2
            key = (bucket.kind, len(bucket.tags), num_frames, bucket.canvas)
            self.advance(key, partial(self.drawn, cache, bucket, size, num_frames))
            self.steps, self.seen = self.steps + 1, self.seen + size * self.ranks.count

    def _choices(self, kinds: str) -> tuple[list[tuple[Cache, Bucket]], list[float]]:
        """Buckets of the given kinds with their shares of the steps; the last of several canvases has the share `large`."""
        choices, shares = [], []
        for order, cache in enumerate(self.caches):
            whole = 1.0 if len(self.caches) == 1 else (1 - self.large, self.large)[order]
            least = self.least * sum(len(b.clip) for b in cache.buckets)
            chosen = [b for b in cache.buckets if b.kind in kinds and len(b.clip) >= least]
            choices += [(cache, b) for b in chosen]
            total = sum(len(b.clip) for b in chosen)
            shares += [whole * len(b.clip) / total for b in chosen]
        return choices, shares

    def drawn(self, cache: Cache, bucket: Bucket, size: int, num_frames: int) -> torch.Tensor:
        """The loss on `size` requests of a bucket, drawn on the device."""
        return self.loss(cache, bucket, torch.randint(len(bucket.clip), (size,), device=self.device), num_frames)

    def look(self, judge: Judge | None, short: bool) -> None:
        """Let the judge read samples of the averaged weights."""
        if judge is None or self.ranks.rank:
            return
        self.average.swap()
        with torch.no_grad():
            self.log(event="check", short=short, **judge(self, short))
        self.average.swap()

    @torch.no_grad()
    def sample(
        self, cache: Cache, bucket: Bucket, index: torch.Tensor, num_frames: int, forwards: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoded clips (B, T, H, W, 3) in [0, 1] and sounds (B, 2, N) of some requests of a set."""
        rows = self.rows(bucket, num_frames)
        clean = cache.condition(bucket, index, num_frames)
        noise = torch.randn(clean.shape, generator=generator, device=self.device)
        condition = packed.ANCHOR_T * clean + (1 - packed.ANCHOR_T) * noise
        channels = (sizes.AUDIO_CHANNELS, sizes.LATENT_CHANNELS * 4)
        audio, video = packed.sample(self.forward, rows, bucket.text[index].float(), condition, channels, forwards, SHIFTS, generator)
        return decode(cache.models, audio, video, num_frames, cache.canvas)

    def save(self, out: Path) -> None:
        """Write a checkpoint that `--resume` continues from."""
        if self.ranks.rank:
            return
        save_state(out / "transformer.pt", model=self.model.state_dict(), steps=self.steps, seen=self.seen, **self.advance.state())
        self.average.swap()
        torch.save({k: v.to(torch.bfloat16) for k, v in self.model.state_dict().items()}, out / "transformer_bf16.pt")
        self.average.swap()

    def resume(self, out: Path) -> None:
        """Continue from a checkpoint if there is one."""
        state = load_state(out / "transformer.pt", self.device)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.advance.restore(state)
        self.steps, self.seen = state["steps"], state["seen"]
        self.log(event="resumed", steps=self.steps, samples=self.seen)

    def start_from(self, folder: Path) -> None:
        """Take a folder's transformer as live and averaged weights; the optimiser starts afresh."""
        held = MiniMaxH3Transformer3DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
        if differing := [k for k in sizes.TRANSFORMER if plain(held.config[k]) != plain(self.model.config[k])]:
            raise bad(
                "transformer to start from", folder, f"the same {', '.join(differing)} as videogen.pocket.sizes", "train from nothing"
            )
        self.model.load_state_dict(held.state_dict())
        for held, live in zip(self.average.mean, self.average.live):
            held.copy_(live.detach())
        self.log(event="started from", folder=str(folder))


def plain(value: Any) -> Any:
    """Saved configs hold lists where our tables hold tuples."""
    return tuple(value) if isinstance(value, list) else value


def train(args: argparse.Namespace, judge: Judge | None = None) -> Trainer:
    """The whole stage; `judge` (see `eval`) logs what samples show."""
    ranks = Ranks.join()
    torch.manual_seed(args.seed + 3 + 1000 * ranks.rank)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    log = Log(args.out / ("transformer.jsonl" if not ranks.rank else f"transformer.rank{ranks.rank}.jsonl"), "transformer")
    models = Models(args.folder, ranks.device)
    caches = []
    for order, (canvas, clips) in enumerate(((sizes.SMALL, args.clips), (sizes.LARGE, args.large_clips if args.large else 0))):
        if not clips:
            continue
        cache = Cache(
            models,
            5 if args.smoke else clips,
            seed=args.seed + 100 + 1000 * ranks.rank + 10 * order,
            held_out=False,
            paraphrases=args.paraphrases,
            sounds_each=1 if args.smoke else 64,
            num_frames=args.clip_frames,
            canvas=canvas,
            audio_ready=partial(_wait_for, args.after) if args.after else None,
        )
        caches.append(cache)
        log(event="cached", canvas=canvas, clips=len(cache.scenes), requests=sum(len(b.clip) for b in cache.buckets))
    trainer = Trainer(models, caches, log, ranks, rates=(args.rate, args.muon_rate), budget=4000 if args.smoke else args.row_budget)
    trainer.high, trainer.large, trainer.least = args.high, args.large, args.least
    if args.start_from is not None:
        trainer.start_from(args.start_from)
    if args.resume:
        trainer.resume(args.out)
    start = ranks.agree(log.seconds())
    total = start + ranks.agree(min(args.seconds, args.deadline - time.time() if args.deadline else args.seconds))
    turn = start + (total - start) * args.short

    def rate_of(now: float) -> float:
        return rate_at((now - start) / max(total - start, 1e-6), hold=args.hold)

    moments = [start + (total - start) * share for share in args.checks]
    trainer.run(SHORT, turn, rate_of, [m for m in moments if m < turn], judge, args.out)
    trainer.run(FULL, total, rate_of, [m for m in moments if m >= turn], judge, args.out)
    trainer.save(args.out)
    log(event="done", steps=trainer.steps, samples=trainer.seen, parameters=sum(p.numel() for p in trainer.model.parameters()))
    trainer.average.swap()
    (args.out / "transformer.done").write_text(json.dumps({"steps": trainer.steps, "samples": trainer.seen}))
    return trainer


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.5)


def export(trainer: Trainer, out: Path) -> None:
    """Write the averaged weights as the folder's transformer and part from the other ranks; the model is bf16 afterwards."""
    if not trainer.ranks.rank:
        save_model(trainer.model, out / "transformer")
    trainer.ranks.leave()


def options() -> argparse.ArgumentParser:
    """The stage's options."""
    p = parser(__doc__)
    p.add_argument("--folder", type=Path, default=Path("runs/pocket"), help="folder with vae, audio_vae, text_encoder, processor")
    p.add_argument("--clips", type=int, default=16000)
    p.add_argument("--paraphrases", type=int, default=4)
    p.add_argument("--short", type=float, default=0.45, help="share of the time spent on 39-frame clips")
    p.add_argument("--clip-frames", type=int, default=FULL, choices=(SHORT, FULL), help="encode only this much of every clip")
    p.add_argument("--after", type=Path, help="wait for this file before loading the audio VAE")
    p.add_argument("--start-from", type=Path, help="folder whose transformer to go on training, without its optimiser state")
    p.add_argument("--rate", type=float, default=RATE, help="AdamW's")
    p.add_argument("--muon-rate", type=float, default=MUON_RATE, help="Muon's for the blocks' matrices; 0: AdamW for all")
    p.add_argument("--row-budget", type=int, default=ROW_BUDGET, help="packed rows a step and rank")
    p.add_argument("--high", type=float, default=0.0, help="share of the samples moved into the noisiest fifth of the levels (0 up to 1)")
    p.add_argument("--large", type=float, default=0.0, help="share of the steps on 256x144 clips (0 up to 1)")
    p.add_argument("--least", type=float, default=0.0, help="leave out text lengths with a smaller share of requests")
    p.add_argument("--large-clips", type=int, default=4000, help="256x144 clips to train on")
    p.add_argument("--hold", type=float, default=0.4, help="share of the time after which the learning rate falls")
    p.add_argument("--deadline", type=float, default=0.0, help="end by this moment (seconds since 1970)")
    p.add_argument("--checks", type=float, nargs="*", default=[], help="shares of the time at which to save and let the judge look")
    return p


def main() -> None:
    """`python -m videogen.pocket.train_transformer`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = options().parse_args()
    export(train(args), args.out)


if __name__ == "__main__":
    main()
