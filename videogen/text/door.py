"""Who may hand a request to a batching engine: not too many, not while its model is being changed, not after its end."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from videogen.errors import bad, say
from videogen.text.asks import POLL_S, Busy, check_open


class Door:
    """`gate` is held by whoever hands over, recovers or changes; `fault` says why nobody is answered any more."""

    def __init__(self, most: int) -> None:
        self.gate = threading.Condition(threading.RLock())
        self.most, self.fault = most, ""
        self.is_changing = False
        self._changer: int | None = None
        self._arriving = 0

    @contextmanager
    def place(self, in_hand: Callable[[], int]) -> Iterator[None]:
        """Room for one more among those in hand and those on their way. Raises Busy, or RequestError for one that waits for itself."""
        if self._changer == threading.get_ident():
            raise bad("text request", "one sent inside changing()", "one behind it", "leave the change first")
        with self.gate:
            if (count := in_hand() + self._arriving) >= self.most:
                raise Busy(say("text queue", f"{count} requests in hand", "room for one more", "ask again later"))
            self._arriving += 1
        try:
            yield
        finally:
            with self.gate:
                self._arriving -= 1

    def check_open(self) -> None:
        """Raises EnvironmentFault when nobody is answered any more."""
        check_open(self.fault)

    @contextmanager
    def passed(self) -> Iterator[None]:
        """With the gate held, and nobody changing the model. Raises EnvironmentFault as `check_open`."""
        with self.gate:
            while self.is_changing and not self.fault:
                self.gate.wait(POLL_S)
            self.check_open()
            yield

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Nobody passes inside; whoever was handing over has done so before."""
        with self.gate:
            self.is_changing, self._changer = True, threading.get_ident()
        try:
            yield
        finally:
            with self.gate:
                self.is_changing, self._changer = False, None
                self.gate.notify_all()

    def shut(self, reason: str) -> None:
        """Answer nobody any more; the first reason stays."""
        with self.gate:
            self.fault = self.fault or reason
            self.gate.notify_all()
