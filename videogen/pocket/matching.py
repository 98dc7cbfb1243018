"""The optional last stage: distribution matching against a fake score, a second adapter on the same base, with stop rules."""

import random
from functools import partial

import torch

from lora.distil import Levels, best_look, fake_loss, generated, matching_loss, shifted, stop_reason
from lora.trainable import LowRank
from videogen.pocket.bank import Part
from videogen.pocket.distiller import Distiller
from videogen.pocket.looks import judge, sharpness, wanted_ends
from videogen.pocket.steps import Steps

STUDENT_RATE, FAKE_RATE = 5e-5, 2e-4
FAKE_FIRST, FAKE_RATIO = 200, 5  # fake updates before the first of the student, then for each of them
LOOK_EVERY = 25  # student updates
NARROWED = 0.02  # kept off both ends of the base levels
PARTS = 6  # the largest ones only: each is captured twice for every evaluation


class Matching:
    """The student of a `Distiller` and a fake beside it."""

    def __init__(self, run: Distiller) -> None:
        self.run, student = run, run.student
        weights = {name: run.model.get_submodule(name).weight for names in student.names for name in names}
        ranks = {name: down.shape[1] for names, down in zip(student.names, student.downs) for name in names}
        self.fake = LowRank(weights, ranks, seed=run.options.seed + 1)
        self.second = Steps(self.fake, run.ranks, rate=FAKE_RATE, muon_rate=0.0)
        self.first = Steps(student, run.ranks, rate=STUDENT_RATE, muon_rate=0.0)
        self.first.average.decay = 0.98

    def __call__(self, seconds: float) -> str:
        """Train until the time or a stop rule ends it, keep the best look, perhaps the first; returns why it ended."""
        run, student = self.run, self.run.student
        look, base = judge(run.watched), sharpness(wanted_ends(run.watched), run.watched)
        seen, kept = [run.look(look)], [_copy(student)]
        parts = sorted(run.parts, key=lambda part: -part.count)[:PARTS]
        rng, shares = random.Random(run.options.seed), [part.count for part in parts]
        begin, count, reason = run.agreed(), 0, ""
        while not reason:
            part, last = rng.choices(parts, shares)[0], rng.randrange(run.options.forwards)
            self.second(("fake", part.key, last), partial(self.fake_loss, part, last))
            count += 1
            if count > FAKE_FIRST and count % FAKE_RATIO == 0:
                self.first(("student", part.key, last), partial(self.student_loss, part, last))
            if count % 10 == 0 and run.agreed() - begin > seconds:
                reason = "its time was over"
            if reason or (count > FAKE_FIRST and count % (FAKE_RATIO * LOOK_EVERY) == 0):
                self.first.average.swap()
                seen.append(run.look(look))
                kept.append(_copy(student))
                self.first.average.swap()
                reason = reason or stop_reason([each.look for each in seen], base)
                run.log(stage_of="match", steps=count, teacher_sharpness=base, **seen[-1].facts())
        best = best_look([each.look for each in seen], base)
        student.load_state_dict(kept[best])
        run.log(event="match done", steps=count, reason=reason, kept_look=best, of=len(seen))
        return reason

    def _drawn(self, part: Part) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], Levels]:
        """Trajectories, their noise, and noise levels on the path that sampling takes."""
        index = self.run.drawn(part, self.run.size(part, 0.5))
        u = NARROWED + (1 - 2 * NARROWED) * torch.rand(len(index), device=index.device)
        return index, tuple(s[0, index] for s in part.states), tuple(shifted(u, shift) for shift in self.run.shifts)

    def fake_loss(self, part: Part, last: int) -> torch.Tensor:
        """The fake's flow loss on what the student makes of a batch."""
        index, noise, levels = self._drawn(part)
        with torch.no_grad():
            clean = generated(part.velocity(self.run.whole.using(self.run.student), index), noise, self.run.sigmas, last)
        return fake_loss(clean, part.velocity(self.run.whole.using(self.fake), index), levels)

    def student_loss(self, part: Part, last: int) -> torch.Tensor:
        """The student's matching loss on a batch."""
        index, noise, levels = self._drawn(part)
        clean = generated(part.velocity(self.run.whole.using(self.run.student), index), noise, self.run.sigmas, last)
        with torch.no_grad():
            false = part.velocity(self.run.whole.using(self.fake), index)
        return matching_loss(clean, part.velocity(self.run.teacher, index), false, levels)


def _copy(student: LowRank) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in student.state_dict().items()}
