"""The server's answers in OpenAI's shape and its refusals; the measurement's arithmetic; the commands at work."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from tests.videogen.text.models import text_model
from videogen.cli.main import main
from videogen.errors import EnvironmentFault, RequestError
from videogen.serve.auth import Keys
from videogen.text import bench
from videogen.text.asks import Ask, Ticket
from videogen.text.bench import Load, arithmetic, arrivals, check_settings, cold_and_warm, flood, open_loop, prefills
from videogen.text.context import ceiling, needle, supported_context
from videogen.text.metrics import Requests, Sample, percentile, sample_of, summary
from videogen.text.model import load_text
from videogen.text.opening import chosen, open_engine, open_text
from videogen.text.server import TextService, make_text_app
from videogen.text.snapshots import SnapshotEngine
from videogen.text.source import find_text_source

CPU = torch.device("cpu")
CHAT = {"model": "pocket", "messages": [{"role": "user", "content": "two red circles"}], "temperature": 0}


@pytest.fixture(scope="module")
def service() -> Iterator[TextService]:
    text = load_text(find_text_source("pocket"), CPU, torch.float32)
    engine = SnapshotEngine(text, "pocket", max_queue=2)
    yield TextService(text, engine, "pocket", Keys(()), Requests())
    engine.close()


def test_a_chat_is_answered_whole_and_in_pieces_with_its_usage(service: TextService) -> None:
    with TestClient(make_text_app(service)) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "pocket"
        whole = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 7}).json()
        content = whole["choices"][0]["message"]["content"]
        assert len(content.split()) > 4 and whole["choices"][0]["finish_reason"] == "length"
        streamed = client.post(
            "/v1/chat/completions", json=CHAT | {"max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}}
        ).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]) == content
        assert events[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] and streamed.endswith("data: [DONE]\n\n")
        plain = client.post("/v1/completions", json={"prompt": "a large red", "max_tokens": 2, "temperature": 0.5, "seed": 1}).json()
        assert plain["object"] == "text_completion" and plain["usage"]["completion_tokens"] == 2
        assert "videogen_text_answered_total 3" in client.get("/metrics").text


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", CHAT | {"model": "other"}, "model"),
        ("chat/completions", CHAT | {"max_tokens": 5000}, "at most 4096 in all"),
        ("chat/completions", CHAT | {"max_tokens": "5"}, "max_tokens"),
        ("chat/completions", CHAT | {"temperature": -1}, "temperature"),
        ("chat/completions", CHAT | {"n": 2}, "n: got 2"),
        ("chat/completions", CHAT | {"stop": ["x"]}, "stop"),
        ("chat/completions", CHAT | {"tools": []}, "tools"),
        ("completions", {"prompt": ["a"]}, "prompt"),
        ("completions", [], "JSON object"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_field(service: TextService, path: str, body: Any, told: str) -> None:
    answer = TestClient(make_text_app(service)).post(f"/v1/{path}", json=body)
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]


def test_a_full_queue_is_429_and_a_wrong_key_401(service: TextService) -> None:
    client = TestClient(make_text_app(service))
    engine: Any = service.engine
    with engine._model:
        held = [engine.submit(Ask((5, 6, 7), 1))]
        while engine._waiting.qsize():  # until the thread has taken it
            time.sleep(0.01)
        held += [engine.submit(Ask((5, 6, 7), 1)) for _ in range(2)]
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 429
    [ticket.result(30) for ticket in held]  # type: ignore[func-returns-value]
    locked = TestClient(make_text_app(TextService(service.text, service.engine, "pocket", Keys((("me", "k" * 16),)), Requests())))
    assert locked.get("/v1/models").status_code == locked.post("/v1/completions", json={"prompt": "a"}).status_code == 401
    assert locked.get("/v1/models", headers={"Authorization": f"Bearer {'k' * 16}"}).status_code == 200


def test_the_arithmetic_on_a_made_up_clock() -> None:
    ticket = Ticket(Ask((1,) * 100, 3), arrived=10.0)
    assert sample_of(ticket) is None
    ticket.began, ticket.cached, ticket.tokens, ticket.times = 11.0, 60, [1, 2, 3], [12.0, 12.5, 13.5]
    sample = sample_of(ticket)
    assert sample == Sample(1.0, 2.0, 100, 60, 3, 0.75, "")
    told = summary([sample, sample])
    assert (told["prefill_tokens_per_s_computed"], told["prefill_tokens_per_s_effective"]) == (40, 100)
    assert told["decode_tokens_per_s"] == pytest.approx(4 / 3) and summary([])["n"] == 0
    assert told["ttft_p95_s"] == {"value": 2.0, "low": None, "high": None, "n": 2, "is_max": True}
    many = percentile([float(each) for each in range(100)], 95)
    assert many["value"] == pytest.approx(94.05) and many["low"] < 94.05 < many["high"] and not many["is_max"]
    moments = arrivals(2000, 4.0, 0)
    assert moments[0] == 0 and moments == sorted(moments) and moments[-1] == pytest.approx(500, rel=0.1) and len(moments) == 2000


def test_a_measurement_reads_back_what_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_model(max_position_embeddings=1024)
    with pytest.raises(RequestError, match="--engine"):
        chosen(text_model("qwen3_next"), "batching")
    engine = open_engine(text, "w", "snapshots", chunk=32)
    try:
        found = check_settings(engine, {"engine": "prefix snapshots", "dtype": "float32", "prefill": 32, "reuse": True})
        assert found["layers"] == 3
        with pytest.raises(EnvironmentFault, match="run is discarded"):
            check_settings(engine, {"attention": "flash_attention_3"})
        pair = cold_and_warm(engine, Load(shared=64, own=8, write=2), pairs=2)
        assert pair["cached_tokens"] == [64] and pair["cold"]["cached_tokens"] == 0 and pair["warm"]["n"] == 2
        rates: list[float] = []
        monkeypatch.setattr(bench, "arrivals", lambda count, rate, seed: rates.append(rate) or [0.0] * count)
        load = open_loop(engine, Load(64, 8, 2, requests=6, mix=0.5, concurrency=2), one_s=0.01)
        assert rates == [200.0] and load["n"] == 6 and 0 < load["cached_tokens"] < 6 * 64 and load["cached_tokens"] % 64 == 0
        rows = prefills(engine, [40, 5000], 2, runs=1, flops_per_s=1e12)
        assert rows[0]["prompt_tokens"] == 40 and "at most 1024" in rows[1]["refused"]
        layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48  # q, k and v, o, feed-forward
        assert arithmetic(text.model) == (2 * 3 * layer, 2 * 3 * 32)
        assert rows[0]["tflop"] == (2 * 3 * layer * 40 + 2 * 3 * 32 * 1600) / 1e12
        assert flood(engine, 10, 8, 1)["answered"] == 10
        assert ceiling(engine, 170, 2000)["tokens"] == 1020  # 680 and not 1360; 1020, not 1190, 1105, 1062
        assert supported_context(engine, [100])["tokens"] == 0  # nothing to read with: no needle was found
    finally:
        engine.close()


def test_a_needle_is_asked_for_at_its_depth_and_read_from_the_answer(service: TextService) -> None:
    asked: list[str] = []

    def submit(ask: Ask) -> Any:
        asked.append(service.text.tokenizer.decode(ask.tokens))
        number = next(word for word in asked[-1].split() if word.strip(".").isdigit())
        return SimpleNamespace(result=lambda _: SimpleNamespace(tokens=service.text.tokenizer(f"It is {number}")["input_ids"]))

    engine: Any = SimpleNamespace(text=service.text, submit=submit)
    assert needle(engine, 600, 0.5)
    assert 0.3 < asked[0].index("envelope") / len(asked[0]) < 0.7
    engine.submit = lambda ask: SimpleNamespace(result=lambda _: SimpleNamespace(tokens=[5]))
    assert not needle(engine, 600, 0.5)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["text", "info", "--json"]) == 0 and json.loads(capsys.readouterr().out)["engine"] == "continuous batching"
    assert main(["text", "expand", "a fox", "--seed", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "template"
    small = [
        "--shared",
        "64",
        "--own",
        "8",
        "--write",
        "2",
        "--requests",
        "2",
        "--pairs",
        "1",
        "--concurrency",
        "1",
        "--lengths",
        "32",
        "--flood",
        "5",
    ]
    out = tmp_path / "report.json"
    assert main(["text", "bench", "random:qwen3_next", *small, "--device", "cpu", "--out", str(out)]) == 0
    told, report = capsys.readouterr().out, json.loads(out.read_text())
    assert "prefix snapshots" in told and "5 of 5 answered" in told and "computed" in told and "effective" in told
    assert report["schema"] == "videogen.text_bench/1" and [(row["reuse"], row["loop"]) for row in report["loads"]] == [
        (r, loop) for r in (False, True) for loop in ("open", "closed")
    ]
    for wrong in (
        ["serve", "random:qwen3"],
        ["serve", "--host", "0.0.0.0"],
        ["bench", "template"],
        ["bench", "--page", "1"],
        ["bench", "--own", "0"],
    ):
        assert main(["text", *wrong]) == 2, wrong
    assert threading.active_count() < 50 and isinstance(open_text("random:qwen3", CPU, torch.float32)[1], str)
