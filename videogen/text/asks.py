"""One request to a text model and its answer: admission before it waits, times while it runs; knows no model."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from caches.policy import Decision
from videogen.errors import EnvironmentFault, VideogenError, bad, say

POLL_S = 0.05
# what one request, or a caller's listener, may fail with and others outlive
FAULTS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError, OSError)


class Busy(VideogenError, RuntimeError):
    """The queue is full: ask again later (HTTP 429)."""


class AnswerFault(VideogenError, RuntimeError):
    """The request was taken and could not be answered."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Tokens to continue by at most `limit`, or to one of `ends`.

    shared: how many leading tokens other requests will share, where that is known; 0 leaves it to be found out. parts: lengths of
    leading passages that other prompts may hold elsewhere, for an engine that reuses such. temperature 0 is greedy; `seed` decides
    the others where the engine samples one request at a time.
    """

    tokens: tuple[int, ...]
    limit: int
    ends: frozenset[int] = frozenset()
    shared: int = 0
    parts: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def check_open(fault: str) -> None:
    """Raises EnvironmentFault for an engine that answers nobody any more, `fault` being why."""
    if fault:
        raise EnvironmentFault(say("text engine", fault, "one that runs", "start it again"))


def admit(ask: Ask, capacity: int) -> None:
    """Raises RequestError for a request that no empty engine of this capacity (tokens) could answer."""
    if not ask.tokens:
        raise bad("text request", "no tokens", "at least one", "send a prompt")
    if ask.limit < 1:
        raise bad("text request", f"{ask.limit} tokens to write", "at least 1", "raise max_tokens")
    if not 0 <= ask.shared < len(ask.tokens):
        raise bad("shared prefix", ask.shared, f"0 to {len(ask.tokens) - 1}", "leave it out")
    if ask.parts and (min(ask.parts) < 1 or sum(ask.parts) >= len(ask.tokens)):
        raise bad("passages", ask.parts, f"lengths above 0, together below {len(ask.tokens)}", "correct them")
    if len(ask.tokens) + ask.limit > capacity:
        got = f"{len(ask.tokens)} + {ask.limit} tokens"
        raise bad("text request", got, f"at most {capacity} in all", "shorten the prompt or lower max_tokens")


@dataclass(slots=True)
class Ticket:
    """An accepted request. Times are `time.perf_counter()` seconds; `times` holds one for every token."""

    ask: Ask
    on_token: Callable[[int], None] | None = None
    tend: Callable[[], None] | None = None
    arrived: float = field(default_factory=time.perf_counter)
    began: float | None = None
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    decision: Decision | None = None
    cached: int = 0
    error: str = ""
    is_cancelled: bool = False
    attempts: int = 0
    is_probe: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Stop it at the next token or chunk; what was written stays."""
        self.is_cancelled = True
        if self.tend is not None:
            self.tend()

    def emit(self, token: int) -> None:
        """Enter one token of the answer."""
        self.times.append(time.perf_counter())
        self.tokens.append(token)
        if self.on_token is not None:
            self.on_token(token)

    def finish(self, error: str = "") -> None:
        """The answer is complete, or failed."""
        self.error = error
        self.done.set()

    def result(self, timeout_s: float | None = None) -> "Ticket":
        """Wait for the answer. Raises AnswerFault when it failed or does not come in time."""
        until = None if timeout_s is None else time.perf_counter() + timeout_s
        while not self.done.wait(POLL_S):
            if self.tend is not None:
                self.tend()
            if until is not None and time.perf_counter() > until:
                raise AnswerFault(say("text request", f"no answer in {timeout_s} s", "one in time", "wait longer, or ask for less"))
        if self.error:
            raise AnswerFault(say("text request", self.error, "an answer", "ask again"))
        return self

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token, queue included."""
        return self.times[0] - self.arrived if self.times else None

    @property
    def queued_s(self) -> float:
        """Seconds from arrival to the first computing."""
        return 0.0 if self.began is None else self.began - self.arrived

    @property
    def decode_s(self) -> float:
        """Seconds a token after the first."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else 0.0


class TextEngine(Protocol):
    """What answers requests: `videogen.text.batching`, `videogen.text.snapshots`."""

    @property
    def capacity(self) -> int:
        """The most tokens, prompt and answer together, that one request may have."""
        ...

    @property
    def fault(self) -> str:
        """Why it answers nobody any more; empty while it does."""
        ...

    def submit(self, ask: Ask, on_token: Callable[[int], None] | None = None) -> Ticket:
        """Accept a request, or raise RequestError (it can never fit) or Busy."""
        ...

    def close(self) -> None:
        """Stop, and give the model back as it was."""
        ...
