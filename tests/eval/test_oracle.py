"""The oracle on clips whose truth is known: exact when clean, right under mild blur and noise, at chance on the wrong badge."""

import math

import pytest
import torch
import torch.nn.functional as F

from eval import oracle, prompts
from videogen.pocket import data, world

TIMES = torch.linspace(0, world.CLIP_S - 1 / world.FPS, 8)
FPS = (len(TIMES) - 1) / float(TIMES[-1])


def worsened(frames: torch.Tensor, blur: int, noise: float) -> torch.Tensor:
    x = F.pad(frames.permute(0, 1, 4, 2, 3).flatten(0, 1), (blur // 2,) * 4, mode="replicate")
    x = F.avg_pool2d(x, blur, 1) + noise * torch.randn(frames.permute(0, 1, 4, 2, 3).flatten(0, 1).shape)
    return x.clamp(0, 1).unflatten(0, frames.shape[:2]).permute(0, 1, 3, 4, 2)


# blur in pixels and noise as a share of full scale; 1.00 in each case when this was written. At 48 rows a 5-pixel blur hides small shapes.
@pytest.mark.parametrize(
    ("height", "width", "number", "worse"), [(96, 160, 10, ((5, 0.08),)), (48, 80, 16, ((3, 0.03),)), (128, 224, 2, ((5, 0.08),))]
)
def test_exact_on_clean_clips_and_under_blur_and_noise(height: int, width: int, number: int, worse: tuple[tuple[int, float], ...]) -> None:
    torch.manual_seed(0)
    scenes, layout = data.draw(number, 11, held_out=True, aspect=width / height)
    frames, _ = world.render(layout, TIMES, height, width)
    for seen in (frames, *(worsened(frames, blur, noise) for blur, noise in worse)):
        right = oracle.agrees(oracle.read_video(seen, FPS), scenes)
        assert {name: float(value.float().mean()) for name, value in right.items()} == dict.fromkeys(oracle.VISIBLE, 1.0)


def test_sound_exact_when_clean_and_noisy() -> None:
    torch.manual_seed(0)
    scenes, layout = data.draw(60, 12)
    samples = world.sound(layout, 80, 8000)
    for heard in (samples, samples + 0.01 * torch.randn_like(samples)):
        right = oracle.agrees(oracle.read_audio(heard, 8000), scenes)
        assert all(bool(value.all()) for value in right.values())


def test_confidence_falls_when_the_picture_does() -> None:
    torch.manual_seed(0)
    _, layout = data.draw(4, 13)
    frames, _ = world.render(layout, TIMES, 96, 160)
    clean, poor = oracle.read_video(frames, FPS), oracle.read_video(worsened(frames, 9, 0.15), FPS)
    assert clean.confidence["shape"].mean() > poor.confidence["shape"].mean()


def test_a_badge_matches_itself_and_not_another() -> None:
    _, layout = data.draw(16, 14, badge=True)
    frames, _ = world.render(layout, TIMES[:3], 96, 160)
    assert float(oracle.badge_match(frames, layout).min()) == 1.0
    assert float(oracle.badge_match(frames, layout[torch.arange(16).roll(1)]).mean()) < 0.35


def test_noise_reads_as_wrong() -> None:
    torch.manual_seed(0)
    scenes, _ = data.draw(8, 15)
    right = oracle.agrees(oracle.read_video(torch.rand(8, 4, 48, 80, 3)), scenes)
    assert torch.stack(list(right.values())).all(dim=0).sum() == 0


def test_psnr() -> None:
    a = torch.zeros(2, 4, 4, 3)
    assert math.isclose(float(oracle.psnr(a, a + 0.1)[0]), 20, abs_tol=1e-3)


@pytest.mark.parametrize("workflow", prompts.WORKFLOWS)
def test_stored_requests_are_what_the_generator_makes_and_unseen(workflow: str) -> None:
    stored = prompts.load(workflow, 1024)
    assert stored[:64] == prompts.make(workflow, 64) and len(stored) == 1024
    if workflow != "ref2va":  # a badge's combination is told by its picture, never drawn from the held-out tenth
        from videogen.pocket.captions import is_held_out

        assert all(is_held_out(request.scene) for request in stored)
