"""Both engines answer as `generate()` does, whatever was cached; no cached state outlives its weights; no request is lost."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from caches.policy import Budget
from caches.prefix_hook import PrefixCache
from tests.videogen.text.models import answer, prompts, text_model
from videogen.errors import RequestError
from videogen.text.asks import AnswerFault, Ask, Busy, Ticket
from videogen.text.batching import BatchingEngine
from videogen.text.choose import BATCHING, SNAPSHOTS, choose
from videogen.text.loop import Paging
from videogen.text.model import TextModel
from videogen.text.shapes import FAMILIES
from videogen.text.snapshots import SnapshotEngine

LIMIT = 3
PAGED = ("qwen3", "qwen3_vl")


@pytest.fixture(autouse=True)
def _without_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping a loop collects garbage: half a second in a process that holds a test suite."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


@contextmanager
def batching(text: TextModel, **options: Any) -> Iterator[BatchingEngine]:
    engine = BatchingEngine(text, "weights", **({"paging": Paging(page=16, pages=64, prefill=64)} | options))
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def snapshots(text: TextModel, **options: Any) -> Iterator[SnapshotEngine]:
    engine = SnapshotEngine(text, "weights", **({"chunk": 24} | options))
    try:
        yield engine
    finally:
        engine.close()


Open = Callable[..., Any]
both = pytest.mark.parametrize("open_engine", [batching, snapshots])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_as_generate_does_from_snapshots(family: str) -> None:
    text = text_model(family)
    assert choose(text.model.config).engine == choose(text.model.config.to_dict()).engine == (BATCHING if family in PAGED else SNAPSHOTS)
    asked = prompts(4, shared=60, own=8)
    with snapshots(text) as engine:
        tickets = [engine.submit(Ask(tokens, LIMIT)).result(30) for tokens in asked[:3]]
        tickets.append(engine.submit(Ask(asked[3], LIMIT, shared=66)).result(30))  # goes on from 60, keeps 66
        tickets.append(engine.submit(Ask(asked[3], LIMIT)).result(30))
    assert [ticket.tokens for ticket in tickets] == [*(answer(text.model, tokens, LIMIT) for tokens in asked), tickets[3].tokens]
    assert [ticket.cached for ticket in tickets] == [0, 0, 60, 60, 66]


@pytest.mark.parametrize("family", PAGED)
def test_paged_models_answer_as_generate_does_in_one_batch(family: str) -> None:
    text = text_model(family)
    asked = prompts(6, shared=100)
    with batching(text, paging=Paging(page=16, pages=30, prefill=64)) as engine:  # room for two and a half of them
        first = engine.submit(Ask(asked[0], LIMIT)).result(30)
        tickets = [first, *[ticket.result(30) for ticket in [engine.submit(Ask(tokens, LIMIT)) for tokens in asked[1:]]]]
        assert [ticket.tokens for ticket in tickets] == [answer(text.model, tokens, LIMIT) for tokens in asked]
        assert first.cached == 0 and max(ticket.cached for ticket in tickets) == 96
        ended = engine.submit(Ask(asked[0], LIMIT, ends=frozenset({first.tokens[1]}))).result(30)
        assert ended.tokens == first.tokens[:2] and ended.ttft_s is not None and ended.queued_s >= 0
    assert text.model.config._attn_implementation == "sdpa"


def test_without_reuse_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("videogen.text.snapshots.duplicate", lambda cache: 1 / 0)
    text, (tokens, _) = text_model(), prompts(2, shared=40)
    for options in ({"budget": Budget()}, {"max_bytes": 100}):
        with snapshots(text, **options) as engine:
            assert [engine.submit(Ask(tokens, 1, shared=40)).result(30).cached for _ in range(2)] == [0, 0]


def adapted() -> tuple[TextModel, Any]:
    """A model with two large adapters, off."""
    text = text_model()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft = get_peft_model(text.model, config, adapter_name="A")
        peft.add_adapter("B", config)
    peft.base_model.disable_adapter_layers()
    return text, peft.base_model


def switch(peft: Any, name: str) -> None:
    if name == "off":
        peft.disable_adapter_layers()
    else:
        peft.enable_adapter_layers()
        peft.set_adapter(name)


def through_changes(open_engine: Open, *, announced: bool) -> tuple[list[list[int]], list[list[int]], Any]:
    """Answers of an engine across off, A, off, B, A, and of the model itself."""
    text, peft = adapted()
    (tokens,) = prompts(1, shared=100)
    got, want = [], []
    with open_engine(text) as engine:
        for name in ("off", "A", "off", "B", "A"):
            if announced:
                with engine.changing(name):
                    switch(peft, name)
            else:
                switch(peft, name)
            got.append(engine.submit(Ask(tokens, LIMIT, shared=96)).result(30).tokens)
            assert engine.submit(Ask(tokens, LIMIT)).result(30).tokens == got[-1]
            want.append(answer(text.model, tokens, LIMIT))
        record = engine.record()
    return got, want, record


@both
@pytest.mark.parametrize("announced", [True, False])
def test_no_cached_state_outlives_its_adapter(open_engine: Open, announced: bool) -> None:
    got, want, record = through_changes(open_engine, announced=announced)
    assert got == want and len({tuple(each) for each in want}) == 3
    assert record["prefixes"]["generation"] == (5 if announced else 4) and record["cache"]["reused"] == 5


@both
def test_without_eviction_the_same_changes_answer_wrongly(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would say of an engine that does not evict: it is able to fail."""
    monkeypatch.setattr(PrefixCache, "change", lambda self, identity, reason: None)
    monkeypatch.setattr(BatchingEngine, "_evict", lambda self: None)
    got, want, _ = through_changes(open_engine, announced=True)
    assert got != want and got[0] == want[0]


@both
def test_a_check_finds_what_no_look_at_the_weights_does(open_engine: Open) -> None:
    text = text_model()
    *asked, tokens = prompts(4, shared=96)
    with open_engine(text, budget=Budget(lam=1e-3, max_streak=2, first=16, warm_up=0.0)) as engine:
        for each in asked:
            engine.submit(Ask(each, 1, shared=96)).result(30)
        for parameter in text.model.model.layers.parameters():
            parameter.data.mul_(torch.linspace(0.2, 3, parameter.shape[-1]))  # not counted by torch
        want = answer(text.model, tokens, LIMIT)
        assert engine.submit(Ask(tokens, LIMIT)).result(30).tokens == want
        counts = engine.record()["prefixes"]["counts"]
        assert (counts["checks"], counts["misses"]) == (1, 1) and engine.prefixes.spacing == 1


@both
def test_what_cannot_fit_is_refused_and_what_can_still_answers(open_engine: Open) -> None:
    text = text_model(max_position_embeddings=240)
    (tokens,) = prompts(1, shared=40)
    with open_engine(text, max_queue=3) as engine:
        for ask in (Ask((), 1), Ask(tokens, 0), Ask(tokens, 10_000), Ask(tokens * 9, 1), Ask(tokens, 1, shared=60)):
            with pytest.raises(RequestError, match="expected"):
                engine.submit(ask)
        slow = [engine.submit(Ask(tokens, 150)) for _ in range(3)]
        with pytest.raises(Busy, match="ask again later"):
            for _ in range(9):
                slow.append(engine.submit(Ask(tokens, 150)))
        for ticket in slow:
            ticket.cancel()
        assert all(len(ticket.result(30).tokens) < 150 for ticket in slow[1:])
        assert engine.submit(Ask(tokens, LIMIT)).result(30).tokens == answer(text.model, tokens, LIMIT)
        assert engine.record()["requests"]["busy"] == 1 and engine.record()["requests"]["cancelled"] >= 2


@both
def test_a_hundred_at_once_are_all_answered(open_engine: Open) -> None:
    text = text_model(num_hidden_layers=1)
    asked = prompts(100, shared=32, own=1)
    with open_engine(text) as engine:
        tickets: dict[int, Any] = {}

        def send(start: int) -> None:
            for index in range(start, 100, 10):
                tickets[index] = engine.submit(Ask(asked[index][:50], 2))

        threads = [threading.Thread(target=send, args=(start,)) for start in range(10)]
        [thread.start() for thread in threads]  # type: ignore[func-returns-value]
        [thread.join() for thread in threads]  # type: ignore[func-returns-value]
        assert all(len(ticket.result(60).tokens) == 2 for ticket in tickets.values()) and len(tickets) == 100
        assert engine.record()["requests"]["answered"] == 100
        assert all(tickets[index].tokens == answer(text.model, asked[index][:50], 2) for index in (0, 99))


def test_a_dead_batching_loop_is_replaced_and_its_requests_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_model()
    asked = prompts(3, shared=64)
    with batching(text) as engine:
        broken = engine._manager.batch_processor
        broken.prepare_next_batch = lambda: 1 / 0
        tickets = [engine.submit(Ask(tokens, LIMIT)) for tokens in asked]
        assert [ticket.result(30).tokens for ticket in tickets] == [answer(text.model, tokens, LIMIT) for tokens in asked]
        assert engine.record()["requests"]["restarts"] == 1
        start = engine._start

        def start_broken() -> Any:
            manager = start()
            manager.batch_processor.prepare_next_batch = lambda: 1 / 0
            return manager

        monkeypatch.setattr(engine, "_start", start_broken)
        engine._manager.batch_processor.prepare_next_batch = lambda: 1 / 0
        with pytest.raises(AnswerFault, match="loop died"):  # sent twice, not for ever
            engine.submit(Ask(asked[0], LIMIT)).result(30)


def test_a_dead_thread_is_replaced_and_a_failed_request_is_said_to_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_model()
    asked = prompts(3, shared=64)
    faults: list[type[BaseException]] = [KeyboardInterrupt, RuntimeError]
    with snapshots(text) as engine:
        forward = engine.forward.prefill

        def fails(*args: Any) -> Any:
            if faults:
                raise faults.pop(0)("planted")
            return forward(*args)

        monkeypatch.setattr(engine.forward, "prefill", fails)
        monkeypatch.setattr(threading, "excepthook", lambda args: None)
        tickets = [engine.submit(Ask(tokens, LIMIT)) for tokens in asked]
        for ticket, told in zip(tickets, ("stopped", "planted")):
            with pytest.raises(AnswerFault, match=told):
                ticket.result(30)
        assert tickets[2].result(30).tokens == answer(text.model, asked[2], LIMIT)
        assert engine.record()["requests"]["restarts"] == 1
    with pytest.raises(AnswerFault, match="no answer in"):
        Ticket(Ask(asked[0], LIMIT)).result(0.01)


def test_draws_are_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_model()
    (tokens,) = prompts(1, shared=40)
    drawn = {"limit": 8, "temperature": 2.0, "top_p": 0.9}
    with snapshots(text) as engine:
        answers = [engine.submit(Ask(tokens, **drawn, seed=seed)).result(30).tokens for seed in (1, 1, 2)]  # type: ignore[arg-type]
        assert answers[0] == answers[1] != answers[2]
        assert engine.submit(Ask(tokens, 8, temperature=2.0, top_p=1e-6)).result(30).tokens == answer(text.model, tokens, 8)
    with batching(text, sampling=True) as paged:
        assert paged.submit(Ask(tokens, 8)).result(30).tokens == answer(text.model, tokens, 8)
        assert len({tuple(paged.submit(Ask(tokens, **drawn)).result(30).tokens) for _ in range(3)}) > 1  # type: ignore[arg-type]
