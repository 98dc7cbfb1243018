"""What the batching engine outlives, and what it must not serve: changes under way, failed starts and restarts, listeners that raise."""

import gc
import threading
import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Phi3Config

from caches.policy import Budget
from tests.videogen.text.models import answer, prompts, text_model
from tests.videogen.text.test_engines import LIMIT, batching, snapshots
from videogen.errors import EnvironmentFault, RequestError
from videogen.text import batching as module
from videogen.text import loop, varlen
from videogen.text.asks import AnswerFault, Ask, Busy
from videogen.text.model import TextModel

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _without_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


@pytest.mark.parametrize("config", [MistralConfig, Phi3Config])
def test_a_window_for_every_layer_is_kept(config: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config(**SMALL, vocab_size=128, sliding_window=16, pad_token_id=0)).eval()
    text = TextModel(model, text_model().tokenizer)
    (tokens,) = prompts(1, shared=40)
    wanted = answer(model, tokens, 6)
    assert not varlen.suits(model)
    with batching(text) as engine:
        assert engine.submit(Ask(tokens, 6)).result(30).tokens == wanted


def test_what_a_model_sees_with_keeps_its_attention() -> None:
    text = text_model("qwen3_vl")
    with batching(text):
        assert text.model.config.get_text_config()._attn_implementation in (varlen.NAME, varlen.PAGED_NAME)
        assert text.model.config.vision_config._attn_implementation == "sdpa"
    assert text.model.config.get_text_config()._attn_implementation == "sdpa"


def test_what_would_change_the_answer_is_refused() -> None:
    rows = torch.zeros(1, 2, 3, 8)
    with pytest.raises(RequestError, match="sliding_window"):
        varlen.attend(None, rows, rows, rows, sliding_window=4)


def test_a_start_that_fails_gives_the_attention_back(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_model()
    monkeypatch.setattr(loop, "START_S", -1.0)
    with pytest.raises(EnvironmentFault, match="a loop that starts"), batching(text):
        pass
    assert text.model.config._attn_implementation == "sdpa"


def test_a_listener_that_raises_fails_its_own_request_alone() -> None:
    text = text_model()
    first, second = prompts(2, shared=20)

    def listener(_token: int) -> None:
        raise ValueError("planted")

    with batching(text) as engine:
        with pytest.raises(AnswerFault, match="planted"):
            engine.submit(Ask(first, LIMIT), listener).result(30)
        assert engine.submit(Ask(second, LIMIT)).result(30).tokens == answer(text.model, second, LIMIT)


def test_a_restart_that_fails_is_told_to_all_who_wait_and_to_those_who_come(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_model()
    (tokens,) = prompts(1, shared=20)

    def fails() -> Any:
        raise EnvironmentFault("no memory, planted")

    with batching(text) as engine:
        monkeypatch.setattr(engine, "_start", fails)
        engine._manager.batch_processor.prepare_next_batch = lambda: 1 / 0
        with pytest.raises(AnswerFault, match="planted"):
            engine.submit(Ask(tokens, LIMIT)).result(30)
        with pytest.raises(EnvironmentFault, match="start it again"):
            engine.submit(Ask(tokens, LIMIT))
        assert "planted" in engine.fault


def test_whoever_is_sending_is_waited_for_before_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_model()
    (tokens,) = prompts(1, shared=40)
    with batching(text) as engine:
        hand_over, is_sending = engine._hand_over, threading.Event()

        def slow(ticket: Any) -> None:
            is_sending.set()
            time.sleep(0.1)
            hand_over(ticket)

        monkeypatch.setattr(engine, "_hand_over", slow)
        sender = threading.Thread(target=lambda: engine.submit(Ask(tokens, LIMIT)))
        sender.start()
        assert is_sending.wait(5)
        with engine.changing("test"):
            assert not engine._tickets  # the one that was sent is answered
            with pytest.raises(RequestError, match="leave the change"):
                engine.submit(Ask(tokens, LIMIT))
        sender.join()
        assert engine.record()["requests"]["answered"] == 1


def test_those_who_wait_for_a_change_fill_the_queue() -> None:
    text = text_model()
    (tokens,) = prompts(1, shared=40)
    with batching(text, max_queue=1) as engine:
        sender = threading.Thread(target=lambda: engine.submit(Ask(tokens, LIMIT)))
        with engine.changing("test"):
            sender.start()
            until = time.perf_counter() + 5
            while not engine._door._arriving and time.perf_counter() < until:
                time.sleep(0.005)
            told: list[type[Exception]] = []

            def another() -> None:
                try:
                    engine.submit(Ask(tokens, LIMIT))
                except Busy:
                    told.append(Busy)

            threads = [threading.Thread(target=another)]
            threads[0].start()
            threads[0].join(5)
            assert told == [Busy]
        sender.join()


@pytest.mark.parametrize("open_engine", [batching, snapshots])
def test_a_closed_engine_takes_nothing(open_engine: Any) -> None:
    text = text_model()
    (tokens,) = prompts(1, shared=20)
    with open_engine(text) as engine:
        pass
    with pytest.raises(EnvironmentFault, match="closed"):
        engine.submit(Ask(tokens, LIMIT))


def checked_often(text: TextModel) -> Any:
    return batching(text, budget=Budget(lam=1e-3, max_streak=2, first=16, warm_up=0.0))


def test_a_missed_check_is_a_change() -> None:
    text = text_model()
    *asked, last = prompts(4, shared=96)
    with checked_often(text) as engine:
        for each in asked:
            engine.submit(Ask(each, 1, shared=96)).result(30)
        for parameter in text.model.model.layers.parameters():
            parameter.data.mul_(torch.linspace(0.2, 3, parameter.shape[-1]))  # not counted by torch
        engine.submit(Ask(last, 1, shared=96)).result(30)
        assert engine.record()["prefixes"]["counts"]["misses"] == 1 and engine.prefixes.generation == 1


def test_a_check_that_could_not_be_made_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_pause", lambda _manager: False)
    with checked_often(text_model()) as engine:
        for each in prompts(4, shared=96):
            engine.submit(Ask(each, 1, shared=96)).result(30)
        counts = engine.record()["prefixes"]["counts"]
        assert counts["checks not possible"] == 1 and "checks" not in counts and engine.prefixes.spacing == 2


def test_one_unannounced_change_is_one_change() -> None:
    text = text_model()
    asked = prompts(6, shared=40)
    with batching(text) as engine:
        with torch.no_grad():
            next(iter(text.model.parameters())).mul_(1.5)
        threads = [threading.Thread(target=lambda t=each: engine.submit(Ask(t, 1)).result(30)) for each in asked]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert engine.counts["unannounced changes"] == 1 and engine.counts["answered"] == 6
