"""Layouts are seeded and inside the canvas; the renderer does not depend on resolution or company; tones are where the caption says."""

import random

import torch

from videogen.pocket import captions, data, world


def test_a_clip_depends_on_its_own_seed_only() -> None:
    scenes, together = data.draw(8, 3)
    alone = world.plan(scenes[5:6], data.clip_seeds(3, 8)[5:6])
    for name in ("start", "radius", "velocity", "phase", "gain"):
        assert torch.equal(getattr(together, name)[5:6], getattr(alone, name))


def test_objects_stay_inside_and_apart() -> None:
    _, layout = data.draw(400, 4)
    for when in (0.0, world.CLIP_S):
        centre = layout.start + layout.velocity[:, None] * when
        used = layout.present.bool()
        reach = layout.radius[:, None].expand_as(centre[..., 0])
        for axis, size in ((0, 5 / 3), (1, 1.0)):
            assert (centre[..., axis][used] - reach[used]).min() > -0.02  # the largest, fastest ones may leave by a pixel
            assert (centre[..., axis][used] + reach[used]).max() < size + 0.02
    gap = (layout.start[:, 0] - layout.start[:, 1]).norm(dim=-1)[layout.present[:, 1].bool()]
    assert (gap > 2 * layout.radius[layout.present[:, 1].bool()]).float().mean() > 0.99


def test_twice_the_resolution_shows_the_same_picture() -> None:
    _, layout = data.draw(6, 5)
    small, _ = world.render(layout, torch.tensor([1.0]), 48, 80)
    large, _ = world.render(layout, torch.tensor([1.0]), 96, 160)
    shrunk = torch.nn.functional.avg_pool2d(large[:, 0].permute(0, 3, 1, 2), 2)
    assert (shrunk - small[:, 0].permute(0, 3, 1, 2)).abs().mean() < 0.004


def test_sorting_a_batch_does_not_change_its_pictures() -> None:
    _, layout = data.draw(5, 6)
    whole, _ = world.render(layout, torch.tensor([0.5]), 32, 48)
    one, _ = world.render(layout[2:3], torch.tensor([0.5]), 32, 48)
    assert torch.equal(whole[2:3], one)


def test_badges_differ_and_pictures_show_the_same_badge() -> None:
    _, layout = data.draw(20, 7, badge=True)
    assert len({tuple(bits.flatten().tolist()) for bits in layout.bits}) > 15
    assert layout.bits.sum(dim=(1, 2)).min() >= 3 and layout.bits.sum(dim=(1, 2)).max() <= 6
    picture = world.picture_of(layout, range(20))
    assert torch.equal(picture.bits, layout.bits) and torch.equal(picture.colour, layout.colour)
    assert not torch.equal(picture.ground, layout.ground)


def test_sound_has_the_stated_side() -> None:
    scene = captions.draw_scene(random.Random(1), held_out=False)
    scenes = [captions.replace(scene, pitch=0, pan=pan) for pan in range(3)]
    samples = world.sound(world.plan(scenes, [1, 2, 3]), 40, 8000)
    left, right = samples.pow(2).mean(dim=-1).unbind(dim=1)
    assert left[0] > 10 * right[0] and right[2] > 10 * left[2]
    assert torch.isclose(left[1], right[1])
