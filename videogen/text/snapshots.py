"""The engine for every decoder: one request at a time over the model's own cache, prefixes kept as copies of it."""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from caches.policy import Budget
from caches.prefix_hook import TEXT_BUDGET, Look, PrefixCache
from videogen.errors import say
from videogen.text.asks import FAULTS, Ask, Busy, Ticket, admit, check_open
from videogen.text.chunks import ChunkReuse
from videogen.text.forwarding import Forward, cache_bytes, difference, duplicate, pick
from videogen.text.identity import Watch, identify
from videogen.text.model import TextModel

logger = logging.getLogger(__name__)

CHUNK, MAX_QUEUE, RECENT = 2048, 256, 8
MAX_BYTES = 4_000_000_000
HALF_LAM = 5e-2  # 16-bit numbers differ by that much between the shapes of two prefills; a stale prefix by more


def budget_for(dtype: torch.dtype, budget: Budget = TEXT_BUDGET) -> Budget:
    """The budget with the error that this number format makes anyway."""
    return budget if dtype == torch.float32 or budget.lam == 0 else replace(budget, lam=HALF_LAM)


class SnapshotEngine:
    """Answers in order. A prefix that two prompts share is kept from the second on, or from the first where the request says so.

    chunks is the budget of passages reused elsewhere than at the beginning (approximate); None is off.
    """

    name = "prefix snapshots"

    def __init__(
        self,
        text: TextModel,
        weights: str,
        *,
        budget: Budget = TEXT_BUDGET,
        chunk: int = CHUNK,
        max_queue: int = MAX_QUEUE,
        max_bytes: int = MAX_BYTES,
        chunks: Budget | None = None,
    ) -> None:
        self.text, self.weights = text, weights
        self.forward = Forward(text.model, chunk)
        self.capacity = int(getattr(text.model.config.get_text_config(), "max_position_embeddings", 0) or 2**31)
        self.prefixes = PrefixCache(identify(text, weights).digest, budget_for(text.model.dtype, budget), max_bytes)
        self.chunks = None if chunks is None else ChunkReuse(text.model, chunks)
        self.counts: Counter[str] = Counter()
        self._waiting: queue.Queue[Ticket] = queue.Queue(max_queue)
        self._recent: deque[tuple[int, ...]] = deque(maxlen=RECENT)
        self._model, self._starting = threading.RLock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._watch = Watch(text.model)
        self._seen = self._watch.look()

    def submit(self, ask: Ask, on_token: Callable[[int], None] | None = None) -> Ticket:
        """Accept a request. Raises RequestError for one that can never fit, Busy when too many wait."""
        admit(ask, self.capacity)
        check_open(self.fault)
        ticket = Ticket(ask, on_token, self._ensure)
        try:
            self._waiting.put_nowait(ticket)
        except queue.Full:
            self.counts["busy"] += 1
            told = say("text queue", f"{self._waiting.maxsize} requests waiting", "room for one more", "ask again later")
            raise Busy(told) from None
        self._ensure()
        return ticket

    @property
    def fault(self) -> str:
        """Why it answers nobody any more; a thread that died is replaced."""
        return "closed" if self._is_closed else ""

    def _ensure(self) -> None:
        """Have a thread that answers: also after the last one died, in whatever way."""
        with self._starting:
            if self._is_closed or (self._thread is not None and self._thread.is_alive()):
                return
            if self._thread is not None:
                self.counts["restarts"] += 1
                logger.warning("text engine: its thread had died; another was started")
            self._thread = threading.Thread(target=self._run, name="text-snapshots", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                ticket = self._waiting.get(timeout=0.02)
            except queue.Empty:
                continue
            try:
                with self._model, torch.no_grad():
                    self._answer(ticket)
            except FAULTS as error:
                logger.debug("text request failed", exc_info=True)
                self.counts["failed"] += 1
                self.prefixes.evict("failure")  # of memory, perhaps: and what was half written is gone
                ticket.finish(f"{type(error).__name__}: {str(error)[:200]}")
            finally:
                if not ticket.done.is_set():  # the thread itself is dying
                    ticket.finish("the engine stopped")

    def _answer(self, ticket: Ticket) -> None:
        ask, generator = ticket.ask, torch.Generator().manual_seed(ticket.ask.seed)
        ticket.began = time.perf_counter()
        self.forward.forget_pictures()
        self._notice()
        look = self.prefixes.look(ask.tokens)
        if look.is_check:
            self._check(look, ask)
        ticket.decision, ticket.cached = look.decision, look.cached
        is_chunked = self.chunks is not None and bool(ask.parts) and not look.cached
        logits, cache = self._blend(ticket) if is_chunked else self._prefill(ticket, look)
        while logits is not None and not ticket.is_cancelled:
            token = pick(logits, ask, generator)
            ticket.emit(token)
            if token in ask.ends or len(ticket.tokens) >= ask.limit:
                break
            logits, cache = self.forward([token], cache)
        self.counts["cancelled" if ticket.is_cancelled else "answered"] += 1
        ticket.finish()

    def _prefill(self, ticket: Ticket, look: Look) -> tuple[torch.Tensor | None, Any]:
        """Logits after the prompt and the cache behind them; on the way a prefix worth it is kept."""
        tokens, begin = ticket.ask.tokens, look.cached
        cache = duplicate(look.entry.payload) if begin and look.entry is not None else None
        known = look.entry.length if look.entry is not None else 0
        stop = max(ticket.ask.shared, self._common(tokens)) if self.prefixes.budget.lam else 0
        self._recent.append(tokens)

        def goes_on() -> bool:
            return not ticket.is_cancelled

        if stop > max(begin, known):
            logits, cache = self.forward.prefill(tokens[begin:stop], cache, goes_on)
            if logits is None:
                return None, cache
            if (size := cache_bytes(cache)) <= self.prefixes.max_bytes:  # else the copy alone may be more than there is
                self.prefixes.keep(tokens[:stop], duplicate(cache), size)
            begin = stop
        return self.forward.prefill(tokens[begin:], cache, goes_on)

    def _blend(self, ticket: Ticket) -> tuple[torch.Tensor | None, Any]:
        """The prompt from passages met before, as far as their drift allows; those not met yet are learnt for the next."""
        assert self.chunks is not None
        made = self.chunks.prefill(ticket.ask.tokens, ticket.ask.parts)
        ticket.decision, ticket.cached = made.decision, made.reused
        self.prefixes.enter(made.decision)
        begin = 0
        for part in ticket.ask.parts:
            self.chunks.learn(ticket.ask.tokens[begin : begin + part])
            begin += part
        return made.logits, made.cache

    def _forget(self, reason: str) -> None:
        """Nothing cached so far is of the model as it is now."""
        self._seen = self._watch.look()
        if self.chunks is not None:
            self.chunks.clear()
        self.prefixes.change(identify(self.text, self.weights).digest, reason)

    def _common(self, tokens: tuple[int, ...]) -> int:
        """How many leading tokens a recent prompt has in common with this one."""
        return max((_shared(tokens, other) for other in self._recent), default=0)

    def _check(self, look: Look, ask: Ask) -> None:
        """Hold the cached prefix against a full prefill: the logits of the first token."""
        assert look.entry is not None
        exact, _ = self.forward.prefill(ask.tokens, None)
        got, _ = self.forward.prefill(ask.tokens[look.entry.length :], duplicate(look.entry.payload))
        assert exact is not None and got is not None
        if not self.prefixes.checked(look, difference(got, exact)):
            logger.warning("text engine: a cached prefix failed its check; every prefix was dropped")

    def _notice(self) -> None:
        """A change that nobody announced is a change all the same."""
        if self._watch.look() != self._seen:
            self.counts["unannounced changes"] += 1
            self._forget("unannounced change")

    @contextmanager
    def changing(self, reason: str) -> Iterator[None]:
        """Change weights, adapters or their strength inside: requests wait, and nothing cached before outlives it."""
        with self._model:
            try:
                yield
            finally:
                self._forget(reason)

    def record(self) -> dict[str, Any]:
        """Counters, and the prefix cache's record."""
        return {
            "engine": self.name,
            "requests": dict(sorted(self.counts.items())),
            "waiting": self._waiting.qsize(),
        } | self.prefixes.record()

    def close(self) -> None:
        """Stop after the request in progress; those that wait fail."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()
        while not self._waiting.empty():
            self._waiting.get_nowait().finish("the engine was closed")
        self.prefixes.evict("closed")


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common beginning, two short of the whole of `a`: the policy wants a token computed."""
    most = max(0, min(len(a) - 2, len(b)))
    if a[:most] == b[:most]:
        return most
    return next(index for index in range(most) if a[index] != b[index])
