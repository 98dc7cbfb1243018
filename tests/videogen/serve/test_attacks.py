"""Attacks tried and refused: by path, upload, size, address, header, markup, pickle, another's id, foreign page, key timing."""

import asyncio
import hmac
import io
import pickle
import socket
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image, PngImagePlugin

from tests.videogen.serve.fakes import CLIP, services_in, serving, working
from videogen.adapters import settle
from videogen.cli.serve import list_adapters
from videogen.config import Adapters, AdapterUse, Recipe
from videogen.errors import RequestError
from videogen.serve import auth, html
from videogen.serve.api import Services
from videogen.serve.auth import Keys, Links
from videogen.serve.gate import Gate
from videogen.serve.options import ServeOptions, parse_keys
from videogen.serve.uploads import store_picture
from videogen.source import find_model

ALICE, BOB = "alice-secret-0123456789", "bob-secret-0123456789"
SECRET_FILE, INSIDE = "secret.txt", "what nobody may read"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Services:
    root = tmp_path_factory.mktemp("guarded")
    (root / SECRET_FILE).write_text(INSIDE)
    keys = (("alice", ALICE), ("bob", BOB))
    return services_in(root, keys=keys, max_body_bytes=300_000, max_bad_keys_per_minute=60)


@pytest.fixture(scope="module")
def address(guarded: Services) -> Any:
    with working(guarded.options.root), serving(guarded) as url:
        yield url


def as_(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def raw(address: str, request: bytes) -> bytes:
    """One answer to bytes that no client library would send."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as stream:
        stream.sendall(request)
        return stream.recv(65_536)


def png(width: int, height: int, extra: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def test_another_users_job_does_not_exist(address: str, guarded: Services) -> None:
    url = f"{address}/v1/videos"
    job = httpx.post(url, json={"prompt": "hers"}, headers=as_(ALICE)).json()["id"]
    while httpx.get(f"{url}/{job}", headers=as_(ALICE)).json()["status"] != "completed":
        pass
    assert httpx.get(f"{url}/{job}/content", headers=as_(ALICE)).content == CLIP + job.encode()
    for path in (f"/{job}", f"/{job}/content", f"/{job}/events", f"?after={job}"):
        assert httpx.get(url + path, headers=as_(BOB)).status_code == 404, path
        assert httpx.get(url + path).status_code == 401, path
    assert httpx.delete(f"{url}/{job}", headers=as_(BOB)).status_code == 404
    assert httpx.get(url, headers=as_(BOB)).json()["data"] == []
    link = guarded.links.url(job, "video")
    assert httpx.get(address + link).content == CLIP + job.encode()
    forged = [
        link.replace("variant=video", "variant=sidecar"),
        link[:-1] + ("0" if link[-1] != "0" else "1"),
        link.replace("until=1", "until=9"),
    ]
    forged += [link.replace("sign=", "sign=%ff"), Links().url(job, "video"), link.replace("until=", "until=x")]
    assert [httpx.get(address + each).status_code for each in forged] == [403] * len(forged)
    assert [httpx.get(f"{address}{path}").status_code for path in ("/metrics", "/v1/models", "/health")] == [401, 401, 200]


@pytest.mark.parametrize("name", ["..%2f..%2fsecret.txt", "../secret.txt", "%2e%2e/secret.txt", "..%5csecret.txt", "video_%00", "a" * 9000])
def test_ids_lead_nowhere(address: str, name: str) -> None:
    path = f"/v1/videos/{name}/content".encode()
    answer = raw(address, b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer " + ALICE.encode() + b"\r\n\r\n")
    assert answer.split(b" ")[1] in (b"404", b"400", b"414") and INSIDE.encode() not in answer


def test_uploads_that_are_bombs_or_something_else(address: str, tmp_path: Path) -> None:
    def send(data: bytes, **more: Any) -> httpx.Response:
        files = {"input_reference": ("x.png", data, "image/png")}
        return httpx.post(f"{address}/v1/videos", data={"prompt": "x"}, files=files, headers=as_(ALICE) | more)

    before = sorted(path.name for path in tmp_path.parent.rglob("*.png"))
    for data in (png(50_000, 50_000), png(9_000, 9_000), b"<svg onload=alert(1)>", b"%!PS-Adobe\n", b"", pickle.dumps([1])):
        answer = send(data)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_reference"), data[:20]
    zipped = httpx.post(f"{address}/v1/videos", content=zlib.compress(b"{}"), headers=as_(ALICE) | {"content-encoding": "gzip"})
    assert zipped.status_code == 415
    assert send(b"x" * 400_000).status_code == 413
    json_type = {"content-type": "application/json"}
    endless = httpx.post(f"{address}/v1/videos", content=(b"x" * 50_000 for _ in range(20)), headers=as_(ALICE) | json_type)
    assert endless.status_code == 413
    assert sorted(path.name for path in tmp_path.parent.rglob("*.png")) == before


def test_nothing_of_a_polyglot_but_its_pixels_is_stored(tmp_path: Path) -> None:
    info, buffer = PngImagePlugin.PngInfo(), io.BytesIO()
    info.add_text("comment", "<script>alert('text')</script>")
    Image.new("RGB", (8, 8), (1, 2, 3)).save(buffer, "PNG", pnginfo=info, icc_profile=b"<script>alert('icc')</script>")
    data = buffer.getvalue() + b"<script>alert('tail')</script>PK\x03\x04" + pickle.dumps(print)
    stored = store_picture(data, tmp_path, field="image", max_pixels=100).read_bytes()
    assert b"script" not in stored and b"PK\x03" not in stored and b"print" not in stored
    with Image.open(io.BytesIO(stored)) as image:
        assert image.getpixel((0, 0)) == (1, 2, 3) and not image.info
    with pytest.raises(RequestError, match=r"image: got '8x8', expected at most 63 pixels"):
        store_picture(data, tmp_path, field="image", max_pixels=63)


def test_a_link_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    links, now = Links(), time.time()
    job, _, rest = links.url("video_1", "video").removeprefix("/v1/videos/").partition("/content?variant=video&until=")
    until, _, sign = rest.partition("&sign=")
    assert links.is_good(job, "video", until, sign) and not links.is_good("video_2", "video", until, sign)
    monkeypatch.setattr(auth.time, "time", lambda: now + auth.LINK_S + 3600)
    assert not links.is_good(job, "video", until, sign)


@pytest.mark.parametrize("value", ["http://127.0.0.1:1/x", "file:///etc/passwd", "/etc/passwd", {"image_url": "http://10.0.0.1"}, ["x"]])
def test_no_address_and_no_path_is_ever_opened(address: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for field in ("input_reference", "image", "references"):
        answer = httpx.post(f"{address}/v1/videos", json={"prompt": "x", field: value}, headers=as_(ALICE))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert "not taken" in answer.json()["error"]["message"]


def test_prompts_reach_neither_headers_nor_markup(address: str, guarded: Services) -> None:
    prompt = "x\r\nX-Evil: 1\r\n\r\n<script>alert(1)</script>\"'><img src=x onerror=alert(2)> \u202e"
    answer = httpx.post(f"{address}/v1/videos", json={"prompt": prompt}, headers=as_(ALICE) | {"Idempotency-Key": "a" * 200})
    assert answer.status_code == 200 and "x-evil" not in answer.headers and answer.json()["prompt"] == prompt
    job = guarded.store.get(answer.json()["id"])
    assert job is not None
    while not job.is_over:
        job = guarded.store.get(job.id)
        assert job is not None
    content = httpx.get(f"{address}/v1/videos/{job.id}/content", headers=as_(ALICE))
    assert "x-evil" not in content.headers and content.headers["x-content-type-options"] == "nosniff"
    links, pair = guarded.links, (job, job)
    for text in (html.progress(job), html.player(job, links, True), html.queue([job], False, 1.0), html.gallery(pair, links)):
        assert "<script>alert" not in text and "<img src=x" not in text and "onerror=alert(2)>" not in text.replace("&gt;", "")
    assert "<script>alert" not in html.compare(job, job, links) and "<b>" not in html.table(["<b>"], [["<b>"]])


def test_adapters_are_safetensors_the_server_lists(tmp_path: Path, address: str) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(marker), "w")

    for name in ("a.pt", "b.bin", "c.ckpt", "d.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Evil()))
    (tmp_path / "e.safetensors").symlink_to("/etc/passwd")
    assert list(list_adapters(str(tmp_path))) == ["d.safetensors"]
    with pytest.raises(RequestError):
        settle(Recipe(adapters=Adapters((AdapterUse(str(tmp_path / "d.safetensors")),))), find_model("pocket"))
    assert not marker.exists()
    answer = httpx.post(f"{address}/v1/videos", json={"prompt": "x", "lora": str(tmp_path / "a.pt")}, headers=as_(ALICE))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora"


def test_other_sites_and_other_names_are_refused(tmp_path: Path) -> None:
    with serving(services_in(tmp_path)) as url:
        own = url.removeprefix("http://")
        posts = [
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site"},
            {"origin": f"http://{own}.evil.example"},
        ]
        assert [httpx.post(f"{url}/v1/videos", data={"prompt": "x"}, headers=each).status_code for each in posts] == [403] * len(posts)
        assert httpx.post(f"{url}/v1/videos", json={"prompt": "x"}, headers={"origin": url}).status_code == 200
        assert httpx.get(f"{url}/health", headers={"host": "evil.example"}).status_code == 421
        answer = raw(url, b"GET /health HTTP/1.1\r\nHost: " + own.encode() + b"\r\nContent-Length: -5\r\n\r\n")
        assert answer.split(b" ")[1] in (b"400", b"413")


async def _closed(origin: str, host: str) -> list[Any]:
    sent: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        sent.append("reached")

    async def send(message: Any) -> None:
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/", "headers": [(b"host", host.encode()), (b"origin", origin.encode())], "client": ("1", 1)}
    await Gate(inner, ServeOptions(root=Path("/tmp")))(scope, send, send)
    return sent


@pytest.mark.parametrize(
    ("origin", "expected"),
    [("http://evil.example", ["websocket.close"]), ("null", ["websocket.close"]), ("http://127.0.0.1:8000", ["reached"])],
)
def test_a_websocket_of_another_site_is_closed(origin: str, expected: list[str]) -> None:

    assert asyncio.run(_closed(origin, "127.0.0.1:8000")) == expected


def test_the_key_check_compares_every_key_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, calls = Keys((("a", ALICE), ("b", BOB))), []
    real = hmac.compare_digest

    def counting(left: bytes, right: bytes) -> bool:
        calls.append((len(left), len(right)))
        return real(left, right)

    monkeypatch.setattr(auth.hmac, "compare_digest", counting)
    assert [keys.owner(secret) for secret in (ALICE, BOB, "", "x" * 10_000, ALICE[:-1], "\ud800")] == ["a", "b", None, None, None, None]
    assert calls == [(32, 32)] * 12 and keys.login("a", ALICE) and not keys.login("b", ALICE) and not keys.login("", "x")


def test_wrong_keys_run_out_and_addresses_need_a_key(tmp_path: Path) -> None:
    with serving(services_in(tmp_path, keys=(("a", ALICE),), max_bad_keys_per_minute=9)) as url:
        codes = [httpx.get(f"{url}/v1/videos", headers=as_(f"wrong{k}")).status_code for k in range(5)]
        assert codes == [401, 401, 401, 429, 429]
        assert httpx.get(f"{url}/v1/videos", headers=as_(ALICE)).status_code == 429  # a guess that fits is not told apart either
    with pytest.raises(RequestError, match="--host"):
        ServeOptions(root=tmp_path, host="0.0.0.0")
    with pytest.raises(RequestError, match="16"):
        ServeOptions(root=tmp_path, keys=parse_keys("short"))
    assert parse_keys(f"a:{ALICE}, b:{BOB}") == (("a", ALICE), ("b", BOB)) and parse_keys("") == ()
