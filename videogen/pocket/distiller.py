"""One distillation run on pocket-h3: the teacher's trajectories, segment regression, roll-outs, looks, checkpoints."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lora.distil import levels_at, rollout_loss, segment_loss, segment_weights, student_points
from lora.trainable import LowRank
from videogen.errors import bad
from videogen.pocket.bank import Part, Shape, Teaching, build_bank
from videogen.pocket.distil_options import DistilOptions
from videogen.pocket.looks import Seen, ends, judge
from videogen.pocket.packed import PackedForward
from videogen.pocket.ranks import Ranks
from videogen.pocket.steps import Steps
from videogen.pocket.student import Merged, trained_modules
from videogen.pocket.training import Log, load_state, rate_at, save_state
from videogen.pocket.warp import choose_warp

DECAY = 0.995  # of the averaged factors
CLOCK_STEPS, LOG_S, SAVE_S = 10, 10.0, 45.0
HELD = 8  # trajectories of each kind kept for looks


class Distiller:
    """Teacher, student, trajectories and the state of a run."""

    def __init__(self, options: DistilOptions, ranks: Ranks, log: Log, model: Any, shifts: tuple[float, float]) -> None:
        self.options, self.ranks, self.log, self.device = options, ranks, log, ranks.device
        self.model = model.requires_grad_(False)
        on_gpu = self.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self.teacher = PackedForward(model, dtype=dtype)
        self.whole = Merged(PackedForward(model, dtype=dtype, compiled=options.compile and on_gpu))
        self.shifts = shifts  # audio, video
        self.warp = options.warp
        weights = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self.student = LowRank(weights, trained_modules(model, options.rank, options.adaln_rank), seed=options.seed)
        self.parts: list[Part] = []
        self.finished: list[str] = []
        self.spent = 0.0  # share of the stage under way that an earlier run did
        self.steps = 0
        self._held: dict[str, Any] | None = None

    def gather(self, short: list[Shape], long: list[Shape], is_over: Callable[[float], bool]) -> None:
        """Choose the warp if none is asked for, then fill the bank: short clips for their share of the time, then whole ones."""
        how = Teaching(self.teacher, self.options.teacher, self.shifts, [1.0, 0.0], self.options.row_budget)
        if not self.warp:
            self.warp = self.ranks.agree(choose_warp(long or short, how, self.options.forwards, self.options.seed, self.log))
        points = student_points(self.options.forwards, self.warp)
        self.sigmas = levels_at(points, self.shifts, self.student.downs[0])  # (2, N + 1)
        self.segments = segment_weights(self.sigmas.flip(0)).cumsum(0)  # by the video's levels
        how = replace(how, keep=points, row_budget=2 * how.row_budget)
        seed = self.options.seed + 17 + 7919 * self.steps + 104729 * self.ranks.rank
        counted = bool(self.options.steps)
        for shapes, share in ((short, self.options.short), (long, 1.0)):
            if shapes and share:
                least, over = (len(shapes), lambda: True) if counted else (1, partial(is_over, share))
                self.parts += build_bank(shapes, how, seed, held=HELD, least=least, is_over=over)
            seed += 1
        self.log(event="bank", parts=len(self.parts), trajectories=sum(p.count for p in self.parts), held=sum(p.held for p in self.parts))

    @property
    def watched(self) -> list[Part]:
        """Parts with held-out trajectories."""
        return [part for part in self.parts if part.held]

    def size(self, part: Part, share: float = 1.0) -> int:
        """Samples a step."""
        return max(1, min(part.count, int(self.options.row_budget * share) // part.rows.length))

    def drawn(self, part: Part, size: int) -> torch.Tensor:
        """Random trained trajectories, drawn on the device."""
        return torch.randint(part.held, part.held + part.count, (size,), device=self.device)

    def regress(self, part: Part) -> torch.Tensor:
        """The error of the student's velocities at the teacher's states, each sample on a segment of its own."""
        index = self.drawn(part, self.size(part))
        k = torch.searchsorted(self.segments, torch.rand(len(index), device=self.device)).clamp(max=self.options.forwards - 1)
        start, end = (tuple(s[k + i, index] for s in part.states) for i in range(2))
        before, after = (tuple(s[k + i] for s in self.sigmas) for i in range(2))
        return segment_loss(part.velocity(self.whole.using(self.student), index), start, end, before, after)

    def unroll(self, part: Part) -> torch.Tensor:
        """The error of the student's own ends, through all its steps."""
        index = self.drawn(part, self.size(part, 0.5))
        wanted = [tuple(s[k, index] for s in part.states) for k in range(self.options.forwards + 1)]
        return rollout_loss(part.velocity(self.whole.using(self.student), index), wanted, self.sigmas, anchor=self.options.anchor)

    def run(self, stage: str, loss_of: Callable[[Part], torch.Tensor], rate: float, seconds: float) -> None:
        """One stage, by the clock or by a number of steps; the student holds the averaged factors afterwards."""
        advance = Steps(self.student, self.ranks, rate=rate, muon_rate=0.0)
        advance.average.decay = DECAY
        if self._held is not None:
            advance.restore(self._held)
            self._held = None
        rng, shares = random.Random(self.options.seed + self.steps), [part.count for part in self.parts]
        begin = said = saved = self.log.seconds()
        first, count = self.spent, 0
        losses, every = torch.zeros((), device=self.device), 1 if self.options.steps else CLOCK_STEPS
        while True:
            if count % every == 0:
                now = self.agreed()
                self.spent = first + (count / self.options.steps if self.options.steps else (now - begin) / max(seconds, 1e-6))
                if self.spent >= 1:
                    break
                advance.set_rate(max(1e-3, rate_at(self.spent, hold=0.3)))
                if now - said > LOG_S:
                    said = now
                    self.log(stage_of=stage, steps=self.steps, done=self.spent, loss=losses)
                if now - saved > SAVE_S:
                    saved = now
                    self.save(stage, advance)
            part = rng.choices(self.parts, shares)[0]
            advance((stage, part.key), partial(self._counted, loss_of, part, losses))
            count, self.steps = count + 1, self.steps + 1
        advance.average.swap()
        self.finished.append(stage)
        self.spent = 0.0
        self.log(event=f"{stage} done", steps=count, seconds=self.log.seconds() - begin, loss=losses)
        self.save("", None)

    def _counted(self, loss_of: Callable[[Part], torch.Tensor], part: Part, losses: torch.Tensor) -> torch.Tensor:
        loss = loss_of(part)
        losses.lerp_(loss.detach(), 0.05)
        return loss

    def agreed(self) -> float:
        """Seconds since the run began, once the device has caught up; the same on every rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.ranks.agree(self.log.seconds())

    @torch.no_grad()
    def look(self, look: Callable[[Any], Seen]) -> Seen:
        """The student on held-out requests."""
        return look(ends(self.whole.using(self.student), self.watched, self.sigmas))

    @contextmanager
    def keeping_better(self) -> Iterator[None]:
        """Go back to the student of before if, afterwards, its held-out ends are further from the teacher's."""
        look, before = judge(self.watched), {name: value.clone() for name, value in self.student.state_dict().items()}
        first = self.look(look).look.fidelity_db
        yield
        second = self.look(look).look.fidelity_db
        if not second >= first:
            self.student.load_state_dict(before)
            self.log(event="went back", before_db=first, after_db=second)

    @torch.no_grad()
    def compare(self, event: str, *, with_base: bool) -> dict[str, Any]:
        """Log the student beside the undistilled base at N and at 3 N forwards on the folder's own grid."""
        look = judge(self.watched)
        rows: dict[str, Any] = {"student": self.look(look).facts()}
        for n in (self.options.forwards, 3 * self.options.forwards) if with_base else ():
            levels = levels_at(student_points(n, 1.0), self.shifts, self.sigmas)
            rows[f"base@{n}"] = look(ends(self.teacher, self.watched, levels)).facts()
        for name, facts in rows.items():
            self.log(event=event, of=name, **facts)
        return rows

    def save(self, stage: str, advance: Steps | None) -> None:
        """Write a checkpoint that `--resume` continues from."""
        if self.ranks.rank:
            return
        state = advance.state() if advance is not None else None
        kept = {"stage": stage, "spent": self.spent, "steps": self.steps, "finished": self.finished}
        recipe = self.options.recipe() | {"warp": self.warp}
        save_state(self._checkpoint, student=self.student.state_dict(), advance=state, recipe=recipe, **kept)

    @property
    def _checkpoint(self) -> Path:
        return self.options.out / f"distil-{self.options.forwards}.pt"

    def resume(self) -> None:
        """Continue from a checkpoint if there is one. Raises RequestError when it belongs to another recipe."""
        state = load_state(self._checkpoint, self.device)
        if state is None:
            return
        wanted = self.options.recipe() | ({} if self.options.warp else {"warp": state["recipe"]["warp"]})
        if state["recipe"] != wanted:
            raise bad("checkpoint", state["recipe"], f"{wanted}", "use the same options, or another --out")
        self.warp = state["recipe"]["warp"]
        self.student.load_state_dict(state["student"])
        self.finished, self.spent, self.steps, self._held = state["finished"], state["spent"], state["steps"], state["advance"]
        self.log(event="resumed", stage_of=state["stage"], done=self.spent, steps=self.steps)
