"""Trains the video VAE on single frames first, then on 22-frame windows, each step one captured CUDA graph."""

import argparse
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from videogen.pocket import data, sizes, world
from videogen.pocket.build import new_video_vae, save_model
from videogen.pocket.fast_vae import encode_window, from_vae, to_vae
from videogen.pocket.training import Average, Log, adamw, captured, load_state, optimise, rate_at, save_state, set_rate

WINDOW = 22
KL = 1e-4
RATE = 2e-3
CANVASES = ((96, 160, 16, 0.7), (96, 96, 8, 0.15), (128, 224, 8, 0.15))  # height, width, batch, share of the picture steps


def decode_latents(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """One stage of the stock decode: latents (B, C, T, h, w) with T = 1 or 7 to frames (B, F, H, W, 3) in VAE space."""
    out: torch.Tensor = vae.decoder(vae.post_quant_conv(z)).permute(0, 2, 3, 4, 1)
    if z.shape[2] == 1:
        return out[:, 3:4]
    return torch.cat([out[:, 3:20], out[:, 23:28]], dim=1)


def vae_loss(vae: Any, batch: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
    """Weighted squared error, plus `edge` times absolute error, plus a small KL; batch is uint8 (B, T, H, W, 4)."""
    pixels, cover = batch[..., :3].float() / 255, batch[..., 3].float() / 255
    target = to_vae(pixels)
    dtype = torch.bfloat16 if batch.is_cuda else None
    mean, logvar = encode_window(vae, target.movedim(-1, 2), autocast=dtype).float().chunk(2, dim=2)
    logvar = logvar.clamp(-20, 4)
    z = (mean + (0.5 * logvar).exp() * torch.randn_like(mean)).transpose(1, 2)
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda, cache_enabled=False):
        seen = decode_latents(vae, z).float()
    near = F.max_pool2d(cover.flatten(0, 1)[:, None], 5, stride=1, padding=2).view(cover.shape)
    weight = (1 + 3 * near)[..., None]
    weight = weight / weight.mean()
    error = seen - target
    kl = 0.5 * (mean.pow(2) + logvar.exp() - 1 - logvar).mean()
    return (weight * error.pow(2)).mean() + edge * (weight * error.abs()).mean() + KL * kl


@torch.no_grad()
def foreground_psnr(vae: Any, batch: torch.Tensor) -> float:
    """PSNR in dB over covered pixels of reconstructed uint8 (B, T, H, W, 4) pictures."""
    pixels, cover = batch[..., :3].float() / 255, batch[..., 3] > 0
    mean = encode_window(vae, to_vae(pixels).movedim(-1, 2)).chunk(2, dim=2)[0].transpose(1, 2)
    seen = from_vae(decode_latents(vae, mean))
    return float(-10 * (seen - pixels)[cover].pow(2).mean().log10())


def picture_pool(device: torch.device, number: int, height: int, width: int, seed: int) -> torch.Tensor:
    """Pictures of plain and badge clips and, on square canvases, of reference pictures; (N, 1, H, W, 4)."""
    plain = data.draw(number * 2 // 3, seed, aspect=width / height)[1]
    badge = data.draw(number - len(plain), seed + 1, badge=True, aspect=width / height)[1]
    if height == width:
        badge = world.picture_of(badge, range(len(badge)))
    return data.stills([plain, badge], height, width, device, seed)[:, None]


def window_pool(device: torch.device, number: int, seed: int) -> torch.Tensor:
    """Windows of plain and badge clips; (N, 22, H, W, 4)."""
    plain = data.draw(number * 2 // 3, seed)[1]
    badge = data.draw(number - len(plain), seed + 1, badge=True)[1]
    return torch.cat([data.windows(part, WINDOW, sizes.HEIGHT, sizes.WIDTH, device, seed) for part in (plain, badge)])


class Trainer:
    """The model, its optimiser and the captured steps over resident pools."""

    def __init__(self, device: torch.device, log: Log, *, smoke: bool) -> None:
        self.device, self.log, self.smoke = device, log, smoke
        self.vae = new_video_vae().to(device).train()
        self.average = Average(self.vae.parameters(), 0.999)
        self.optimiser = adamw(self.vae.parameters(), RATE, device)
        self.edge = torch.zeros((), device=device)
        self.steps = 0
        number = 24 if smoke else 20000
        self.pools = {
            (h, w): picture_pool(device, number if w == sizes.WIDTH else number // 3, h, w, 10 + i)
            for i, (h, w, _, _) in enumerate(CANVASES)
        }
        self.check = picture_pool(device, 12 if smoke else 96, sizes.HEIGHT, sizes.WIDTH, 90)
        log(event="pools", pictures={f"{h}x{w}": len(p) for (h, w), p in self.pools.items()})

    def step_over(self, pool: torch.Tensor, batch: int) -> Callable[[], torch.Tensor]:
        """A captured step that draws its own batch from a pool."""

        def loss() -> torch.Tensor:
            index = torch.randint(len(pool), (2 if self.smoke else batch,), device=self.device)
            return vae_loss(self.vae, pool[index], self.edge)

        return captured(optimise(loss, self.optimiser, self.average), self.device)

    def run(self, steps: list[tuple[Callable[[], torch.Tensor], float]], until: float, start: float, total: float, name: str) -> None:
        """Mix the steps by their shares until `until` seconds on the stage's clock; logs every few seconds."""
        rng, said, begun = random.Random(0), self.log.seconds(), self.steps
        which, shares = [s for s, _ in steps], [share for _, share in steps]
        while self.log.seconds() < until:
            set_rate(self.optimiser, RATE * rate_at((self.log.seconds() - start) / (total - start)))
            for step in rng.choices(which, shares, k=2 if self.smoke else 10):
                loss = step()
                self.steps += 1
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            if self.log.seconds() - said > (2 if self.smoke else 10):
                rate = (self.steps - begun) / (self.log.seconds() - said)
                said, begun = self.log.seconds(), self.steps
                self.log(phase=name, steps=self.steps, per_s=rate, loss=loss, foreground_db=foreground_psnr(self.vae, self.check))


@torch.no_grad()
def reconstruct(vae: Any, layout: world.Layout, device: torch.device, num_frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode and stock decode of clips: originals and reconstructions (B, T, H, W, 3)."""
    frames, _ = world.render(layout.to(device), world.frame_times(num_frames), sizes.HEIGHT, sizes.WIDTH)
    latents = encode_window(vae, to_vae(frames).movedim(-1, 2)).chunk(2, dim=2)[0]
    return frames, from_vae(vae.decode(latents.transpose(1, 2)).sample.permute(0, 2, 3, 4, 1))


@torch.no_grad()
def measure_latents(vae: Any, pool: torch.Tensor, smoke: bool) -> tuple[list[float], list[float]]:
    """Mean and deviation of every latent channel over windows."""
    parts = [
        encode_window(vae, to_vae(pool[i : i + 8, ..., :3].float() / 255).movedim(-1, 2)).chunk(2, dim=2)[0]
        for i in range(0, min(len(pool), 8 if smoke else 256), 8)
    ]
    latents = torch.cat(parts).movedim(2, 0).flatten(1)
    return latents.mean(dim=1).tolist(), latents.std(dim=1).tolist()


def train(args: argparse.Namespace) -> None:
    """Both phases, the latent statistics, the gate's clips and the folder."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 3
    torch.manual_seed(args.seed)
    log = Log(args.out / "vae.jsonl", "vae")
    trainer = Trainer(device, log, smoke=args.smoke)
    state = load_state(args.out / "vae.pt", device) if args.resume else None
    if state is not None:
        trainer.vae.load_state_dict(state["model"])
        trainer.average.mean = state["average"]
    pool = window_pool(device, 9 if args.smoke else 6000, 20)
    pictures = [(trainer.step_over(trainer.pools[h, w], b), share) for h, w, b, share in CANVASES]
    windows = trainer.step_over(pool, args.window_batch)
    log(event="captured", parameters=sum(p.numel() for p in trainer.vae.parameters()))
    start, total = log.seconds(), log.seconds() + args.seconds
    trainer.run(pictures, start + args.seconds * args.pictures, start, total, "pictures")
    save_state(args.out / "vae.pt", model=trainer.vae.state_dict(), average=trainer.average.mean)
    trainer.run([(windows, 0.8), (pictures[1][0], 0.1), (pictures[2][0], 0.1)], start + args.seconds * 0.8, start, total, "windows")
    trainer.edge.fill_(0.1)
    trainer.run([(windows, 0.8), (pictures[1][0], 0.1), (pictures[2][0], 0.1)], total, start, total, "edges")
    save_state(args.out / "vae.pt", model=trainer.vae.state_dict(), average=trainer.average.mean)
    trainer.average.swap()
    vae = trainer.vae.eval()
    mean, std = measure_latents(vae, pool, args.smoke)
    vae.register_to_config(latents_mean=mean, latents_std=std)
    log(event="done", steps=trainer.steps, foreground_db=foreground_psnr(vae, trainer.check), latents_std=std)
    save_model(vae, args.out / "vae")
    (args.out / "vae.done").write_text(json.dumps({"steps": trainer.steps}))


def parser(text: str | None) -> argparse.ArgumentParser:
    """The options every stage takes."""
    p = argparse.ArgumentParser(description=text)
    p.add_argument("--out", type=Path, default=Path("runs/pocket"))
    p.add_argument("--seconds", type=float, default=300)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--smoke", action="store_true", help="toy sizes, for a test on a CPU")
    return p


def main() -> None:
    """`python -m videogen.pocket.train_vae`."""
    p = parser(__doc__)
    p.add_argument("--pictures", type=float, default=0.5, help="share of the time spent on single frames")
    p.add_argument("--window-batch", type=int, default=8)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(p.parse_args())


if __name__ == "__main__":
    main()
