"""Ranks that share clips, one of them leading: it claims and writes, the others render along; a rank lost ends the group."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from videogen.config import Recipe, as_plain
from videogen.errors import CancelledRender, VideogenError, say
from videogen.families.base import Resolved
from videogen.identity import canonical_json
from videogen.jobs.faults import CLIP_ERRORS
from videogen.jobs.plan import Clip
from videogen.jobs.run import Queue, Renderer
from videogen.parallel.comm import Peers, PeersLost
from videogen.progress import OnEvent, StopFlag, ignore
from videogen.result import Result

_END, _NOTHING_YET = 0, -1


@dataclass(slots=True)
class Lead:
    """The leader's word to its peers, and whether they wait for it; every rank has one, only the leader tells."""

    peers: Peers
    are_waiting: bool = True

    def tell(self, number: int) -> None:
        """A clip's number, the end, or that there is nothing yet."""
        self.are_waiting = False  # one who is gone is not told again
        self.peers.same(number)
        self.are_waiting = number == _NOTHING_YET

    @contextmanager
    def to_the_end(self) -> Iterator[list[Exception]]:
        """Where the leader cannot go on between two clips, it says so to its peers: ranks leave NCCL together, or wait for each other.

        Its error is then kept, in what is yielded, to be raised when they have left; any other goes on its way.
        """
        kept = list[Exception]()
        try:
            yield kept
        except (VideogenError, *CLIP_ERRORS) as error:
            if not self.are_waiting:
                raise
            try:
                self.tell(_END)
            except PeersLost:
                raise error from None
            kept.append(error)

    @contextmanager
    def alike(self) -> Iterator[None]:
        """An error is a clip's only where every rank comes here with one of its own, else PeersLost; then all wait for the next word."""
        try:
            yield
        except CLIP_ERRORS as error:
            if not self.peers.meet():
                raise PeersLost(say("ranks of one clip", f"a lost one ({error})", "all of them to the end", "run it again")) from error
            self.are_waiting = True
            raise


@dataclass(frozen=True, slots=True)
class Announced:
    """A queue whose every clip is told to the peers before it is rendered."""

    inner: Queue
    lead: Lead

    def take(self, clips: Sequence[Clip], stop: StopFlag) -> Iterator[tuple[int, Clip]]:
        """What the inner queue gives."""
        for number, clip in self.inner.take(clips, stop):
            self.lead.tell(number)
            yield number, clip
        self.lead.tell(_END)

    def pause(self, seconds: float) -> None:
        """Wait without letting the peers wait in vain."""
        self.lead.tell(_NOTHING_YET)
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Together:
    """A renderer whose failure is a clip's only where every peer fails alike."""

    inner: Renderer
    lead: Lead

    def render(self, request: Resolved, *, seed: int | None, on_event: OnEvent, stop: StopFlag | None) -> Result:
        """Render one clip with the peers. Raises PeersLost where one of them is gone, and what the renderer raises."""
        with self.lead.alike():
            result = self.inner.render(request, seed=seed, on_event=on_event, stop=stop)
        self.lead.are_waiting = True
        return result


def follow(clips: Sequence[Clip], peers: Peers, open_renderer: Callable[[Recipe], Renderer], stop: StopFlag) -> None:
    """Render along with the leader, clip by clip, and keep nothing, until it says the end or all have stopped."""
    opened: dict[str, Renderer] = {}
    while (number := peers.same(_END)) != _END:
        if number == _NOTHING_YET:
            continue
        clip = clips[number - 1]
        key = canonical_json(as_plain(clip.draft.recipe))
        try:
            if key not in opened:
                opened[key] = open_renderer(clip.draft.recipe)
            opened[key].render(clip.draft.resolved, seed=clip.seed, on_event=ignore, stop=stop)
        except CancelledRender:
            return
        except CLIP_ERRORS:
            continue  # `Lead.alike` has made sure that all failed; the leader writes it down
