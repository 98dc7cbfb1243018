"""The engine for models whose layers page: transformers' continuous batching, with what it lacks around it.

It keys cached blocks by their tokens alone, so that a block outlives its weights; one request too large ends the loop with all in it;
and it counts nothing. Here: admission, one policy with the video steps, eviction at every change, another loop for one that died.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from caches.policy import Budget
from caches.prefix_hook import TEXT_BUDGET, Look, PrefixCache
from videogen.errors import EnvironmentFault, VideogenError, bad, say
from videogen.text.asks import FAULTS, POLL_S, Ask, Busy, Ticket, admit
from videogen.text.door import Door
from videogen.text.forwarding import Forward
from videogen.text.identity import Watch, identify
from videogen.text.loop import Paging, attention_of, cache_of, can_evict, can_pause, paused, set_attention, start_loop
from videogen.text.model import TextModel
from videogen.text.snapshots import MAX_QUEUE, budget_for

logger = logging.getLogger(__name__)

MARGIN = 0.05
MAX_ATTEMPTS = 2
DRAIN_S = 600.0
CLOSED = "the engine was closed"


class BatchingEngine:
    """Answers many requests in one forward. `sampling` starts a loop that can draw; without it every answer is greedy."""

    name = "continuous batching"

    def __init__(
        self,
        text: TextModel,
        weights: str,
        *,
        budget: Budget = TEXT_BUDGET,
        paging: Paging | None = None,
        max_queue: int = MAX_QUEUE,
        sampling: bool = False,
    ) -> None:
        self.text, self.weights, self.paging, self.sampling = text, weights, paging or Paging(), sampling
        self.counts: Counter[str] = Counter()
        self.capacity = 0
        self._tickets: dict[str, Ticket] = {}
        self._matched: dict[str, int] = {}
        self._door, self._changes, self._ledger, self._number = Door(max_queue), threading.Lock(), threading.Lock(), 0
        self._budget, self._attention = budget_for(text.model.dtype, budget), attention_of(text.model)
        self._watch = Watch(text.model)
        self._seen = self._watch.look()
        self._manager = self._start()
        self.prefixes = PrefixCache(identify(text, weights).digest, self._budget, unit=self.paging.page)
        self._collector = threading.Thread(target=self._collect, name="text-batching", daemon=True)
        self._collector.start()

    def _start(self) -> Any:
        """A running loop with an empty cache."""
        model = self.text.model
        manager = start_loop(model, self.paging, self._matched, is_sharing=self._budget.lam > 0, is_sampling=self.sampling)
        room = int(cache_of(manager).num_blocks * self.paging.page * (1 - MARGIN))
        self.capacity = min(room, int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 2**31))
        return manager

    def submit(self, ask: Ask, on_token: Callable[[int], None] | None = None) -> Ticket:
        """Accept a request. Raises RequestError (it can never fit), Busy (too many are in hand), EnvironmentFault (nobody is answered)."""
        admit(ask, self.capacity)
        if ask.temperature and not self.sampling:
            raise bad("temperature", ask.temperature, "0 for a greedy engine", "start the engine with sampling")
        ticket = Ticket(ask, on_token)
        try:
            with self._door.place(lambda: len(self._tickets)):
                self._notice()
                with self._door.passed(), self._ledger:
                    look = self.prefixes.look(ask.tokens)
                if look.is_check:
                    self._check(look, ask)
                ticket.decision = look.decision
                self._send(ticket)
        except Busy:
            self.counts["busy"] += 1
            raise
        return ticket

    @property
    def fault(self) -> str:
        """Why it answers nobody any more; empty while it does."""
        return self._door.fault

    def _send(self, ticket: Ticket) -> None:
        """Hand a request to the loop, not while the model is being changed."""
        with self._door.passed():
            self._hand_over(ticket)

    def _hand_over(self, ticket: Ticket) -> None:
        ask = ticket.ask
        self._number += 1
        name = f"videogen-{self._number}"
        ticket.attempts += 1
        ticket.tend = lambda: self._cancel(name) if ticket.is_cancelled else None
        self._tickets[name] = ticket
        how: dict[str, Any] = {}
        if self.sampling:
            how = {"top_k": 1, "temperature": 1.0, "top_p": 1.0}
            if ask.temperature:
                every = int(self.text.model.config.get_text_config().vocab_size)  # more kills the loop of transformers 5.17
                how = {"top_k": every, "temperature": ask.temperature, "top_p": ask.top_p}
        ends = sorted(ask.ends) or -1
        taken = self._manager.add_request(
            [*ask.tokens], name, max_new_tokens=ask.limit, streaming=True, record_timestamps=True, eos_token_id=ends, **how
        )
        if taken is None and self._manager.is_running():  # of a dead loop the collector sends it again
            del self._tickets[name]
            ticket.finish("the loop takes no requests")

    def _collect(self) -> None:
        reason = "its thread ended"
        try:
            while not self._door.fault:
                output = self._manager.get_result(timeout=POLL_S)
                if output is not None:
                    self._enter(output)
                elif self._manager.is_running():
                    time.sleep(POLL_S / 10)
                elif not self._door.fault:
                    self._recover()
        except (*FAULTS, VideogenError) as error:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            logger.exception("text engine: it ends")
        finally:
            self._door.shut(reason)
            with self._door.gate:
                for name in [*self._tickets]:
                    self._close_ticket(name, self._door.fault)

    def _enter(self, output: Any) -> None:
        ticket = self._tickets.get(output.request_id)
        if ticket is None:
            return
        if output.error is not None:
            if self._manager.is_running():
                self._close_ticket(output.request_id, str(output.error)[:200])
            return  # with a dead loop every request fails; recovery sends those again that may be
        try:
            for token in output.generated_tokens[len(ticket.tokens) :]:
                ticket.emit(token)
        except FAULTS as error:  # the caller's own listener
            self._manager.cancel_request(output.request_id)
            self._close_ticket(output.request_id, f"its listener failed, {type(error).__name__}: {str(error)[:200]}")
            return
        if output.timestamps:
            ticket.times = [*output.timestamps[: len(ticket.tokens)]]
        if output.lifespan[0] > 0:
            ticket.began = output.lifespan[0]
        if output.is_finished():
            ticket.cached = self._matched.pop(output.request_id, 0)
            with self._ledger:
                self.prefixes.keep(self._whole_pages(ticket.ask.tokens), None)
            self._close_ticket(output.request_id)

    def _cancel(self, name: str) -> None:
        """The loop drops a cancelled request without a word."""
        self._manager.cancel_request(name)
        if name in self._tickets:
            self._close_ticket(name)

    def _whole_pages(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """What of a prompt the paged cache can share: whole pages, never the last token."""
        return tokens[: (len(tokens) - 1) // self.paging.page * self.paging.page]

    def _close_ticket(self, name: str, error: str = "") -> None:
        ticket = self._tickets.pop(name, None)
        if ticket is None:
            return
        if not ticket.is_probe:
            self.counts["cancelled" if ticket.is_cancelled else "failed" if error else "answered"] += 1
        ticket.finish("" if ticket.is_cancelled else error)

    def _recover(self) -> None:
        """The loop died: start another, and send every request again that has not been through this before."""
        with self._door.gate:
            if self._manager.is_running():
                return
            self.counts["restarts"] += 1
            logger.warning("text engine: the loop died (%s); another is started", self._manager.background_thread_status.fatal_error)
            self._matched.clear()
            self._manager.destroy()
            with self._ledger:
                self.prefixes.evict("loop died")
            self._manager = self._start()
            lost, self._tickets = [*self._tickets.values()], {}
            for ticket in lost:
                if ticket.attempts >= MAX_ATTEMPTS or ticket.is_cancelled or ticket.tokens:
                    self.counts["cancelled" if ticket.is_cancelled else "failed"] += 1
                    ticket.finish("" if ticket.is_cancelled else "the batching loop died")
                else:
                    self._hand_over(ticket)

    def _notice(self) -> None:
        if self._door.is_changing or self._watch.look() == self._seen:
            return
        with self._changes:
            if self._watch.look() != self._seen:  # not by somebody who was faster
                self.counts["unannounced changes"] += 1
                with self._changing("unannounced change"):
                    pass

    @contextmanager
    def changing(self, reason: str) -> Iterator[None]:
        """Change weights, adapters or their strength inside: requests in hand finish first, and nothing cached before outlives it.

        Raises EnvironmentFault when they do not finish; nothing is changed then.
        """
        with self._changes, self._changing(reason):
            yield

    @contextmanager
    def _changing(self, reason: str) -> Iterator[None]:
        with self._door.changing():
            self._drain()
            with paused(self._manager):
                try:
                    yield
                finally:
                    self._seen = self._watch.look()
                    with self._ledger:
                        self.prefixes.change(identify(self.text, self.weights).digest, reason)
                    self._evict()

    def _drain(self) -> None:
        until = time.perf_counter() + DRAIN_S
        while True:
            with self._door.gate:
                self._door.check_open()
                if not self._manager.is_running():
                    self._recover()
                if not self._tickets and not self._manager.batch_processor.has_pending_requests():  # the latter: those cancelled
                    return
            if time.perf_counter() > until:
                raise EnvironmentFault(say("text engine", f"requests still running after {DRAIN_S} s", "an idle engine", "cancel them"))
            time.sleep(POLL_S / 10)

    def _evict(self) -> None:
        """Empty the paged cache; where that cannot be asked for, another loop begins with an empty one."""
        if can_evict(self._manager):
            cache_of(self._manager).evict_cached_blocks()
            return
        with self._door.gate:  # the collector must not take it for a loop that died
            self._manager.destroy()
            self._manager = self._start()

    def _check(self, look: Look, ask: Ask) -> None:
        """Hold the cached pages against a full prefill; after a miss nothing cached is left, requests in hand finish first."""
        with self._changes:
            is_good = self._stands(look, ask)
        if not is_good:
            logger.warning("text engine: cached pages failed their check; all were dropped")
            with self.changing("missed check"):
                pass

    def _stands(self, look: Look, ask: Ask) -> bool:
        """How far the first greedy token through cached pages lies behind the likeliest of a full prefill, by the policy's own bound."""
        probe = Ticket(replace(ask, limit=1, temperature=0.0, ends=frozenset()), is_probe=True)
        self._send(probe)
        probe.done.wait()
        if not probe.tokens or not can_pause(self._manager):  # without a pause the loop is at work on the same model
            with self._ledger:
                self.prefixes.unchecked(look)
            return True
        with paused(self._manager), torch.no_grad():
            forward = Forward(self.text.model, self.paging.prefill)
            forward.forget_pictures()
            exact, _ = forward.prefill(ask.tokens, None)
            assert exact is not None
            spread = float((exact - exact.mean()).abs().max())
            behind = float(exact.max() - exact[probe.tokens[0]]) / spread if spread else 0.0
            with self._ledger:
                return self.prefixes.checked(look, behind)

    def record(self) -> dict[str, Any]:
        """Counters, and the prefix cache's record."""
        return {"engine": self.name, "requests": dict(sorted(self.counts.items())), "waiting": len(self._tickets)} | self.prefixes.record()

    def close(self) -> None:
        """Stop, and give the model its attention back; requests in hand fail."""
        self._door.shut(CLOSED)
        self._collector.join()
        if self._manager.is_running():
            self._manager.stop(block=True, hard_stop=True)
        self._manager.destroy()
        set_attention(self._attention)
