"""Trains the audio VAE on the world's tones: absolute error plus several spectrogram sizes, one captured CUDA graph a step."""

import argparse
import json
import logging
import math
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3Audio

from videogen.pocket import data, sizes, world
from videogen.pocket.build import save_model
from videogen.pocket.train_vae import parser
from videogen.pocket.training import Average, Log, adamw, captured, load_state, optimise, rate_at, save_state, set_rate

LATENTS = 207  # of a 124-frame clip
RATE = 1e-3
WINDOW = 40  # latents of a short training window
SPECTRA = (128, 256, 512, 1024)


def sound_pool(device: torch.device, number: int, seed: int) -> torch.Tensor:
    """Mono channels of clips (N, samples): the world's tones, and one in six of any pitch so that the code stays general."""
    layout = data.draw(number // 2, seed)[1]
    generator = torch.Generator().manual_seed(seed)
    other = torch.rand(len(layout), generator=generator) < 1 / 6
    free = 150 * (2 ** (torch.rand(len(layout), generator=generator) * 3))
    layout = layout.replaced(hz=torch.where(other, free, layout.hz))
    return world.sound(layout.to(device), LATENTS, sizes.AUDIO_RATE_HZ).flatten(0, 1)


def audio_loss(vae: Any, x: torch.Tensor, *, polish: bool) -> torch.Tensor:
    """Squared error of (B, 1, N) samples; `polish` adds absolute, magnitude and (weakly) log-magnitude error in several resolutions.

    Squared error comes first: absolute error turns any tone whose phase is not yet right into silence, and stays there.
    """
    seen: torch.Tensor = vae.decode(vae.encode(x).latent_dist.mode()).sample
    loss = 30 * (seen - x).pow(2).mean()
    if not polish:
        return loss
    loss = loss + (seen - x).abs().mean()
    for n in SPECTRA:
        window = torch.hann_window(n, device=x.device)
        a, b = (torch.stft(s[:, 0], n, n // 4, window=window, return_complex=True).abs() / math.sqrt(n) for s in (seen, x))
        loss = loss + 0.5 * (a - b).abs().mean() + 0.05 * ((a + 0.01).log() - (b + 0.01).log()).abs().mean()
    return loss


@torch.no_grad()
def log_spectral_distance(vae: Any, x: torch.Tensor) -> float:
    """Root-mean-square difference of log power spectra in dB, over bins within 60 dB of the loudest; the usual LSD."""
    seen = vae.decode(vae.encode(x).latent_dist.mode()).sample
    window = torch.hann_window(512, device=x.device)
    a, b = (torch.stft(s[:, 0], 512, 128, window=window, return_complex=True).abs().pow(2) for s in (seen, x))
    floor = b.amax(dim=(1, 2), keepdim=True).clamp(min=1e-2) * 1e-6
    gap = 10 * ((a + floor) / (b + floor)).log10()
    return float(gap.pow(2).mean(dim=1).sqrt().mean())


def train(args: argparse.Namespace) -> None:
    """The whole stage: pool, steps, latent statistics, folder."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed + 1)
    log = Log(args.out / "audio.jsonl", "audio")
    vae: Any = AutoencoderKLMiniMaxH3Audio(**sizes.AUDIO_VAE).to(device).train()
    state = load_state(args.out / "audio.pt", device) if args.resume else None
    if state is not None:
        vae.load_state_dict(state["model"])
    average = Average(vae.parameters(), 0.998)
    optimiser = adamw(vae.parameters(), RATE, device)
    pool = sound_pool(device, 16 if args.smoke else 6000, 30)
    check = sound_pool(device, 8 if args.smoke else 64, 31)[:, None]

    def loss(batch: int, latents: int, polish: bool) -> torch.Tensor:
        index = torch.randint(len(pool), (2 if args.smoke else batch, 1), device=device)
        begin = torch.randint(LATENTS - latents + 1, index.shape, device=device) * sizes.AUDIO_HOP
        x = pool[index, begin + torch.arange(latents * sizes.AUDIO_HOP, device=device)]
        return audio_loss(vae, x[:, None], polish=polish)

    plans = ((24, WINDOW, False, 0.5), (24, WINDOW, True, 0.8), (8, LATENTS, True, 1.0))  # batch, latents, polish, until this share
    steps_of = [(captured(optimise(partial(loss, b, n, p), optimiser, average), device), end) for b, n, p, end in plans]
    log(event="captured")
    start, said, steps = log.seconds(), log.seconds(), 0
    while (spent := log.seconds() - start) < args.seconds:
        set_rate(optimiser, RATE * rate_at(spent / args.seconds))
        value = next(step for step, end in steps_of if spent < end * args.seconds)()
        steps += 1
        if device.type == "cuda" and steps % 20 == 0:
            torch.cuda.synchronize()
        if log.seconds() - said > (3 if args.smoke else 10):
            said = log.seconds()
            log(steps=steps, loss=value, lsd_db=log_spectral_distance(vae, check))
            save_state(args.out / "audio.pt", model=vae.state_dict())
    average.swap()
    vae.eval()
    with torch.no_grad():
        latents = vae.encode(pool[:256, None]).latent_dist.mode().transpose(0, 1).flatten(1)
    vae.register_to_config(latents_mean=latents.mean(dim=1).tolist(), latents_std=latents.std(dim=1).clamp(min=1e-3).tolist())
    log(event="done", steps=steps, lsd_db=log_spectral_distance(vae, check), latents_std=latents.std(dim=1))
    save_model(vae, args.out / "audio_vae")
    (args.out / "audio.done").write_text(json.dumps({"steps": steps}))


def main() -> None:
    """`python -m videogen.pocket.train_audio`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
