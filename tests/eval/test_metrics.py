"""Every metric against a value computed another way, every kind of damage caught by a named one, every unfit pair refused."""

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torchvision
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizerFast

from eval.metrics import learned, motion, picture, registry, sound
from eval.metrics.pair import Clip, NotMeasurable, Pair
from videogen.errors import RequestError

RATE = 8000


def tone(num_samples: int = RATE, gain: float = 0.3) -> npt.NDArray[np.float32]:
    noise = np.random.default_rng(1).normal(0, 0.1, (2, num_samples))
    return (gain * (np.sin(np.arange(num_samples) / RATE * 2 * np.pi * 440) + noise)).astype(np.float32)


def moving(num_frames: int = 24) -> npt.NDArray[np.uint8]:
    """A red square that moves right over a gradient, with a little grain."""
    rng = np.random.default_rng(0)
    ground = np.linspace(60, 120, 64)[None, :, None] * np.ones((48, 1, 3)) + rng.normal(0, 3, (48, 64, 3))
    frames = np.repeat(ground[None], num_frames, axis=0)
    for index in range(num_frames):
        frames[index, 12:36, 4 + index : 28 + index] = (220, 40, 40)
    return frames.clip(0, 255).astype(np.uint8)


def clip(frames: npt.NDArray[np.uint8] | None = None, audio: npt.NDArray[np.float32] | None = None) -> Clip:
    return Clip(moving() if frames is None else frames, tone() if audio is None else audio, RATE, 24.0)


def flat(*levels: float, size: tuple[int, int] = (16, 16)) -> Clip:
    """Gray frames of these levels."""
    return clip(np.stack([np.full((*size, 3), level, np.uint8) for level in levels]))


def heard(new: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> Pair:
    return Pair(clip(audio=new), clip(audio=reference))


def test_psnr_of_a_uniform_error() -> None:
    pair = Pair(flat(*[110] * 9), flat(*[100] * 9))
    assert picture.psnr(pair) == pytest.approx(20 * math.log10(25.5), abs=1e-4)
    assert picture.psnr_curve(pair) == pytest.approx([20 * math.log10(25.5)] * 9)


def test_psnr_pools_the_error_so_that_identical_frames_do_not_make_it_infinite() -> None:
    pair = Pair(flat(100, 120), flat(100, 100))
    assert picture.psnr(pair) == pytest.approx(10 * math.log10(255**2 / 200), abs=1e-4)
    assert picture.psnr_curve(pair)[0] == math.inf


def test_ssim_and_ms_ssim_of_flat_pictures_are_their_luminance_term() -> None:
    luminance = (2 * 100 * 150 + 2.55**2) / (100**2 + 150**2 + 2.55**2)
    assert picture.ssim(Pair(flat(150, 150), flat(100, 100))) == pytest.approx(luminance, abs=5e-4)
    large = (176, 176)
    assert picture.ms_ssim(Pair(flat(150, size=large), flat(100, size=large))) == pytest.approx(luminance**0.1333, abs=5e-4)


def noisy(frames: npt.NDArray[np.uint8], sigma: float) -> npt.NDArray[np.uint8]:
    grain = np.random.default_rng(2).normal(0, sigma, (*frames.shape[:3], 1))
    return (frames + grain).clip(0, 255).astype(np.uint8)


def test_ffmpegs_metrics_follow_the_error() -> None:
    texture = np.random.default_rng(3).integers(60, 190, (6, 64, 96, 3)).astype(np.uint8)
    pairs = [Pair(clip(noisy(texture, sigma)), clip(texture)) for sigma in (2, 8, 30)]
    vmaf = [picture.vmaf(pair) for pair in pairs]
    assert vmaf[0] > 90 and vmaf[0] > vmaf[1] > vmaf[2] and vmaf[2] < 80
    for pair in pairs[:2]:  # equal activity everywhere: XPSNR is the PSNR of studio-range luma
        luma = [np.asarray(c.luma) * 219 / 255 for c in (pair.new, pair.reference)]
        expected = 10 * math.log10(255**2 / np.mean((luma[0] - luma[1]) ** 2))
        assert picture.xpsnr(pair) == pytest.approx(expected, abs=1.5)
        _, text = picture._filtered(pair, "psnr")  # what both filters are handed is studio-range luma
        assert float(re.findall(r"PSNR y:(\S+)", text)[0]) == pytest.approx(expected, abs=0.3)
    assert picture.xpsnr(Pair(clip(texture), clip(texture))) == math.inf


def test_motion_ratio_is_the_quotient_of_mean_temporal_information() -> None:
    reference, new = np.full((5, 8, 8, 3), 100, np.uint8), np.full((5, 8, 8, 3), 100, np.uint8)
    reference[1::2, :, :4], new[1::2, :, :4] = 140, 120  # half the pixels jump by 40: a deviation of 20
    assert motion.temporal_information(clip(reference)) == pytest.approx(20, abs=1e-4)
    assert motion.motion_ratio(Pair(clip(new), clip(reference))) == pytest.approx(10.1 / 20.1, abs=1e-5)


def test_frozen_share_and_flicker() -> None:
    frames = moving(9)
    held = frames.copy()
    held[5:] = held[4]
    pair = Pair(clip(held), clip(frames))
    assert motion.frozen_share(pair.new) == 0.5 and motion.frozen_excess(pair) == 0.5
    flickering = (frames.astype(int) + np.where(np.arange(9) % 2, 5, -5)[:, None, None, None]).astype(np.uint8)
    assert motion.flicker(Pair(clip(flickering), clip(frames))) == pytest.approx(20 * math.log10(255 / 10), abs=1e-3)


@pytest.mark.parametrize("lag", [-4, -1, 0, 2, 5])
def test_time_shift_finds_the_lag(lag: int) -> None:
    long = moving(34)
    assert motion.time_shift(Pair(clip(long[5:29]), clip(long[5 + lag : 29 + lag]))) == lag


def test_a_still_pair_has_no_time_shift_and_a_motion_ratio_of_one() -> None:
    pair = Pair(flat(*[90] * 9), flat(*[100] * 9))
    assert motion.time_shift(pair) == 0 and motion.motion_ratio(pair) == 1


def test_noise_is_no_time_shift() -> None:
    still = np.full((24, 48, 64, 3), 100, np.uint8)
    grains = np.random.default_rng(4).normal(0, 10, (2, *still.shape))
    new, reference = ((still + grain).clip(0, 255).astype(np.uint8) for grain in grains)
    assert motion.time_shift(Pair(clip(new), clip(reference))) == 0


def test_light_and_colour() -> None:
    frames = moving(3)
    redder = frames.astype(int) + np.array([10, 0, 0])
    pair = Pair(clip(redder.clip(0, 255).astype(np.uint8)), clip(frames))
    assert motion.luma_shift(pair) == pytest.approx(2.126, abs=1e-3)
    assert motion.chroma_shift(pair) == pytest.approx(math.hypot(2.126 / 1.8556, 7.874 / 1.5748), abs=1e-6)


def test_contrast_and_sharpness_of_a_ramp() -> None:
    ramp = np.broadcast_to((np.arange(32) * 4)[None, None, :, None], (2, 8, 32, 3)).astype(np.uint8)
    pair = Pair(clip(ramp // 2), clip(ramp))
    assert motion.sharpness_ratio(pair) == pytest.approx(2.1 / 4.1, abs=1e-5)
    deviation = np.std(np.arange(32) * 4.0)
    assert motion.contrast_ratio(pair) == pytest.approx((deviation / 2 + 0.1) / (deviation + 0.1), abs=1e-4)


def test_sound_by_gain() -> None:
    reference = tone()
    pair = heard(reference * np.float32(0.5), reference)
    assert sound.audio_snr(pair) == pytest.approx(20 * math.log10(2), abs=1e-4)
    assert sound.level_shift(pair) == pytest.approx(-20 * math.log10(2), abs=1e-4) == sound.peak_shift(pair)
    assert sound.log_spectral_distance(pair) == pytest.approx(20 * math.log10(2), abs=1e-3)


def test_silence() -> None:
    reference = tone()
    half = reference.copy()
    half[:, RATE // 2 :] = 0
    assert sound.silence_excess(heard(half, reference)) == 0.5
    one_sided = reference * np.array([[0], [1]], np.float32)
    assert sound.silent_share(clip(audio=one_sided)) == 0  # a tone from one side is no silence
    with pytest.raises(NotMeasurable, match="reference is silent"):
        sound.audio_snr(heard(reference, np.zeros_like(reference)))
    assert sound.level_shift(heard(np.zeros_like(reference), np.full_like(reference, 1e-5))) == 0  # both count as silence


def black(c: Clip) -> Clip:
    return replace(c, frames=np.zeros_like(c.frames))


def frozen(c: Clip) -> Clip:
    return replace(c, frames=np.repeat(c.frames[:1], len(c.frames), axis=0))


DAMAGES: tuple[tuple[str, Callable[[Clip], Clip]], ...] = (
    ("motion_ratio", frozen),
    ("frozen_excess", frozen),
    ("luma_shift", black),
    ("contrast_ratio", black),
    ("chroma_shift", lambda c: replace(c, frames=np.ascontiguousarray(c.frames[..., ::-1]))),
    ("time_shift", lambda c: replace(c, frames=np.concatenate([c.frames[:1].repeat(3, axis=0), c.frames[:-3]]))),
    (
        "sharpness_ratio",
        lambda c: replace(c, frames=(c.frames[:, ::4, ::4].repeat(4, axis=1).repeat(4, axis=2) // 2 + 40).astype(np.uint8)),
    ),
    ("level_shift", lambda c: replace(c, audio=np.zeros_like(c.audio))),
    ("silence_excess", lambda c: replace(c, audio=np.zeros_like(c.audio))),
    ("peak_shift", lambda c: replace(c, audio=np.clip(c.audio, -0.03, 0.03))),
)
WITH_ALARM = tuple(metric for metric in registry.METRICS if metric.sane)


@pytest.mark.parametrize(("name", "damage"), DAMAGES, ids=lambda x: x if isinstance(x, str) else "")
def test_damage_is_caught_by_a_named_metric(name: str, damage: Callable[[Clip], Clip]) -> None:
    found = registry.alarms(registry.measure(Pair(damage(clip()), clip()), WITH_ALARM), WITH_ALARM)
    assert name in [alarm.partition(":")[0] for alarm in found], found


def test_a_little_grain_raises_no_alarm() -> None:
    pair = Pair(clip(noisy(moving(), 0.5), tone() + np.float32(1e-3)), clip())
    assert registry.alarms(registry.measure(pair, WITH_ALARM), WITH_ALARM) == []
    assert 45 < picture.psnr(pair) < 65


def test_identical_clips_are_perfect_in_every_metric_and_cost_no_measurement() -> None:
    measured = registry.measure(Pair(clip(), clip()), registry.usable())
    distances = {m.name: m.distance(measured[m.name].value or 0.0) for m in registry.usable() if measured[m.name].value is not None}
    assert set(distances.values()) == {0.0}
    assert measured["psnr"].value == math.inf and measured["motion_ratio"].value == 1 and measured["luma_shift"].value == 0


def test_a_small_canvas_gives_a_reason_instead_of_a_number() -> None:
    found = registry.measure(Pair(clip(noisy(moving(), 1.0)), clip()), registry.METRICS[:5])
    assert found["ms_ssim"].value is None and found["ms_ssim"].reason == "sides of 64x48, at least 161 pixels needed"
    assert registry.too_small(registry.METRICS[2], 161, 200) == "" != registry.too_small(registry.METRICS[2], 160, 200)
    single = registry.measure(Pair(flat(90), flat(100)), registry.METRICS)
    assert single["vmaf"].value is None and single["motion_ratio"].reason == "a single frame has no motion"


def test_learned_metrics_without_weights_are_skipped_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(learned, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr("shutil.which", lambda _: None)
    rows = {row["name"]: row for row in registry.availability() if not row["is_available"]}
    assert "alexnet-owt-7be5be79.pth" in rows["lpips"]["reason"] and "not on the PATH" in rows["vbench"]["reason"]
    assert rows["clip_score"]["reason"] == rows["clip_similarity"]["reason"] and "openai/clip" in rows["clip_score"]["reason"]
    assert not rows.keys() & {metric.name for metric in registry.usable()}
    pair = Pair(clip(noisy(moving(), 1.0)), clip(), "a prompt")
    assert all(registry.measure(pair, [registry.find_metric(name)])[name].reason == row["reason"] for name, row in rows.items())
    with pytest.raises(NotMeasurable, match="weights not found"):
        learned.lpips(pair)


def test_lpips_is_zero_for_equal_clips_and_grows_with_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "checkpoints" / "alexnet-owt-7be5be79.pth"
    weights.parent.mkdir()
    weights.touch()
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    torch.manual_seed(0)
    trunk = torchvision.models.AlexNet.__new__(torchvision.models.AlexNet)
    torch.nn.Module.__init__(trunk)
    sizes = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
    layers: list[torch.nn.Module] = []
    for index, (into, out, kernel, stride, padding) in enumerate(sizes):
        layers += [torch.nn.Conv2d(into, out, kernel, stride, padding), torch.nn.ReLU()]
        layers += [torch.nn.MaxPool2d(3, 2)] if index in (0, 1, 4) else []
    trunk.features = torch.nn.Sequential(*layers)
    monkeypatch.setattr("torchvision.models.alexnet", lambda **_: trunk)
    still = clip(moving(3))
    near, far = (learned.lpips(Pair(clip(noisy(still.frames, sigma)), still)) for sigma in (3, 30))
    assert learned.lpips(Pair(still, still)) == 0 < near < far


@pytest.fixture
def tiny_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CLIP of random weights in the place of the released one."""
    words = {"<|startoftext|>": 0, "<|endoftext|>": 1} | {letter + end: 2 + i for i, letter in enumerate("redblu") for end in ("", "</w>")}
    (tmp_path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    half = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = half | {"vocab_size": len(words), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text, vision_config=half | {"image_size": 32, "patch_size": 16}, projection_dim=8)
    CLIPModel(config).save_pretrained(tmp_path)
    tokenizer = CLIPTokenizerFast(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    pictures = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(pictures, tokenizer).save_pretrained(tmp_path)
    monkeypatch.setattr(learned, "CLIP_MODEL", str(tmp_path))
    monkeypatch.setattr(learned, "try_to_load_from_cache", lambda model, name: f"{model}/{name}")


@pytest.mark.usefixtures("tiny_clip")
def test_clip_compares_frames_with_frames_and_with_the_prompt() -> None:
    frames = moving(4)
    pair = Pair(clip(255 - frames), clip(frames), "red")
    found = registry.measure(pair, [registry.find_metric(name) for name in ("clip_similarity", "clip_score")])
    similarity, score = found["clip_similarity"].value, found["clip_score"].value
    assert similarity is not None and score is not None and -1 <= similarity < 1 - 1e-4 and abs(score) > 1e-3
    assert learned.clip_similarity(Pair(clip(frames), clip(frames))) == pytest.approx(1)
    assert learned.clip_score(Pair(pair.reference, pair.new, "red")) == pytest.approx(-score)
    with pytest.raises(NotMeasurable, match="prompt"):
        learned.clip_score(Pair(pair.new, pair.reference))


FAKE_VBENCH = """#!{python}
import json, pathlib, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert sys.argv[1] == "evaluate" and given["--mode"] == "custom_input" and given["--load_ckpt_from_local"] == "True"
clips = sorted(pathlib.Path(given["--videos_path"]).glob("*.mp4"))
if "reference" not in [clip.stem for clip in clips] or {fails}:
    sys.exit("no checkpoint")
rows = [{{"video_path": str(clip), "video_results": 0.9 if clip.stem == "new" else 0.95}} for clip in clips]
out = pathlib.Path(given["--output_path"])
out.mkdir()
(out / "results_eval_results.json").write_text(json.dumps({{given["--dimension"]: [0.925, rows]}}))
"""


@pytest.mark.parametrize("fails", [False, True])
def test_vbench_runs_as_a_command_of_its_own(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "bin" / "vbench"
    command.parent.mkdir()
    command.write_text(FAKE_VBENCH.format(python=sys.executable, fails=fails))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert "amt-s.pth" in learned.vbench_lacks()
    for name in ("amt-s.pth", "AMT-S.yaml"):
        (tmp_path / ".cache" / "vbench" / "amt_model").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".cache" / "vbench" / "amt_model" / name).touch()
    pair = Pair(clip(noisy(moving(), 9.0)), clip())
    found = registry.measure(pair, [registry.find_metric("vbench")])["vbench"]
    if fails:
        assert found.value is None and "no checkpoint" in found.reason
    else:
        assert found.value == pytest.approx(-5)


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(RequestError, match="metric: got"):
        registry.find_metric("pnsr")


def test_frames_and_sound_that_are_no_clip_are_refused() -> None:
    broken = moving().astype(np.float32)
    broken[0, 0, 0] = np.nan
    silence = tone()
    silence[0, 3] = np.nan
    for frames, audio, what in (
        (broken, tone(), "float32 with NaN"),
        (moving()[..., :1], tone(), "a shape"),
        (moving()[:0], tone(), "a shape"),
        (moving(), silence, "NaN or infinity"),
        (moving(), tone()[0], "a shape"),
        (moving(), tone().astype(np.int16), "int16"),
    ):
        with pytest.raises(RequestError, match=what):
            Clip(frames, audio, RATE, 24.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (clip(moving(23)), "frames"),
        (clip(moving()[:, :40]), "frames"),
        (clip(audio=tone(RATE - 1)), "audio"),
        (clip(audio=tone()[:1]), "audio"),
        (replace(clip(), fps=25.0), "fps"),
        (replace(clip(), sampling_rate=16000), "sampling_rate"),
    ],
)
def test_clips_of_other_shape_or_rate_are_no_pair(other: Clip, what: str) -> None:
    for new, reference in ((clip(), other), (other, clip())):
        with pytest.raises(RequestError, match=f"clip against clip: {what}"):
            Pair(new, reference)
