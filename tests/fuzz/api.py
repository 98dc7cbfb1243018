"""The server's own application, asked without a socket: bodies, uploads, addresses, headers that no client library would send."""

import asyncio
import json
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

from tests.fuzz import jobfiles, pictures
from tests.fuzz.box import ADAPTER, Box, Broken, must_be_finite
from tests.fuzz.values import as_text, broken_bytes, mixed, text, value
from tests.videogen.serve.fakes import make_desk
from videogen.config import Recipe
from videogen.errors import RequestError
from videogen.jobs.files import RawJob
from videogen.jobs.plan import make_drafts
from videogen.jobs.store import Limits
from videogen.serve.assemble import make_app, make_services
from videogen.serve.desk import FIELDS, PICTURES
from videogen.serve.options import ServeOptions

Ask = dict[str, Any]  # method, path, query, headers, body
GOOD = {key: jobfiles.GOOD[key] for key in FIELDS if key != "lora"} | {
    "lora": (ADAPTER, [ADAPTER], f"{ADAPTER}:0.5"),
    "model": ("pocket", ""),
}
PATHS = ("/v1/videos", "/v1/videos/{id}", "/v1/videos/{id}/content", "/v1/videos/{id}/events", "/v1/models", "/health", "/metrics")
ODD_PATHS = (
    "/",
    "/v1/videos/",
    "/v1/videos/..%2f..%2fetc",
    "/v1//videos",
    "/v1/videos/%00",
    "/v1/videos/%ff%fe",
    "/docs",
    "/openapi.json",
    "/v1/videos/a/b/c",
)
METHODS = ("GET", "POST", "DELETE", "GET", "HEAD", "PUT", "PATCH", "OPTIONS", "TRACE", "\u00e9")
QUERIES = ("limit", "after", "order", "variant", "sign", "until")
QUERY_VALUES = ("1", "100", "0", "0001" + "9" * 60, "asc", "video", "sidecar", "preview", "../x", "\x00", "²", "9" * 5000)
HEADERS = (
    *((b"content-length", each) for each in (b"9" * 5000, b"-1", b"x", b"\xb2", b"")),
    *((b"range", each) for each in (b"bytes=0-", b"bytes=9-1", b"bytes=" + b"0-1," * 2000, b"x=1", b"bytes=-" + b"9" * 5000)),
    *((b"origin", each) for each in (b"null", b"http://[", b"http://127.0.0.1:8000")),
    *((b"host", each) for each in (b"evil.example", b"[::1", b"", b"127.0.0.1:99999999")),
    *((b"idempotency-key", each) for each in (b"k", b"k" * 300, b"\xff\xfe", b"")),
    *(
        (b"content-encoding", b"gzip"),
        (b"authorization", b"Bearer \xff"),
        (b"if-range", b"x"),
        (b"transfer-encoding", b"chunked"),
        (b"cookie", b"a=\xff"),
    ),
)
BODIES = (
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"",
    b"null",
    b"[]",
    b"NaN",
    b'{"prompt":"x","seed":' + b"9" * 5000 + b"}",
    b'{"prompt":"x","seconds":NaN}',
)
BODIES += (
    b'{"\\ud800":1}',
    b'{"prompt":"x","recipe":"\\ud800"}',
    b'{"prompt":"\\ud800"}',
    b'{"prompt":"x","lora":["\\ud800"]}',
    b"\xff",
    b'{"prompt":"x","prompt":5}',
)


@dataclass
class Server:
    """The application over a folder, with the jobs it accepted."""

    root: Path
    app: Any = None
    services: Any = None
    ids: list[str] = field(default_factory=list)

    def ask(self, given: Ask) -> tuple[int, bytes]:
        """One request: status and body."""
        return asyncio.run(_call(self.app, given))


def open_server(box: Box) -> Server:
    """A server on a folder of its own, without workers."""
    root = Path(tempfile.mkdtemp(dir=box.root, prefix="server-"))
    limits = Limits(max_waiting=10**6, max_waiting_per_owner=10**6, quota_bytes=10**15)
    options = ServeOptions(
        root, limits=limits, max_body_bytes=500_000, max_submits_per_minute=10**8, max_requests_per_minute=10**8, abort_wait_s=0.3
    )
    services = make_services(options, make_desk(options, read_adapters=box.reader, adapters={ADAPTER: box.inputs / ADAPTER}))
    services.workers = lambda: 1
    return Server(root, make_app(services), services)


async def _call(app: Any, given: Ask) -> tuple[int, bytes]:
    sent: list[Any] = []
    waiting: list[dict[str, Any]] = [{"type": "http.request", "body": part, "more_body": True} for part in _parts(given["body"])]
    waiting.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop(0)
        await asyncio.sleep(0.01)  # a client that leaves: event streams end
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    path = unquote(given["path"])
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": given["method"],
        "scheme": "http",
    }
    scope |= {
        "path": path,
        "raw_path": given["path"].encode(),
        "query_string": given["query"],
        "root_path": "",
        "headers": given["headers"],
    }
    await app(scope | {"client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8000)}, receive, send)
    status = next((int(each["status"]) for each in sent if each["type"] == "http.response.start"), 0)
    return status, b"".join(each.get("body", b"") for each in sent if each["type"] == "http.response.body")


def _parts(body: bytes) -> list[bytes]:
    return [body[at : at + 65_536] for at in range(0, len(body), 65_536)]


def _multipart(rng: random.Random, fields: dict[str, Any]) -> tuple[bytes, bytes]:
    boundary = rng.choice([b"b", b"b" * 70, b"b"])
    parts = [
        f'Content-Disposition: form-data; name="{key}"\r\n\r\n{as_text(item)}'.encode("utf-8", "surrogatepass")
        for key, item in fields.items()
    ]
    for _ in range(rng.choice([0, 1, 1, 2])):
        name = rng.choice([*PICTURES, "input_reference", "references[]", "x"]).encode()
        parts.append(
            b'Content-Disposition: form-data; name="%s"; filename="../a\x00.png"\r\nContent-Type: image/png\r\n\r\n' % name
            + pictures.make(rng)[1]
        )
    body = b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"
    kind = b"multipart/form-data; boundary=" + boundary
    return (
        (kind, body)
        if rng.random() < 0.9
        else (rng.choice([b"multipart/form-data", kind + b"; charset=nope", b"multipart/form-data; boundary="]), body)
    )


def _body(rng: random.Random) -> tuple[bytes, bytes]:
    fields = {"prompt": mixed(rng, GOOD["prompt"], 0.9)}
    fields |= {key: mixed(rng, GOOD[key], 0.7) for key in rng.sample(sorted(GOOD), rng.choice([0, 1, 1, 2, 3]))}
    if rng.random() < 0.08:
        fields[text(rng)] = value(rng)
    kind = rng.random()
    if kind < 0.5:
        data = json.dumps(fields).encode() if rng.random() < 0.9 else rng.choice(BODIES)
        return rng.choice([b"application/json"] * 8 + [b"application/json; charset=x", b"text/plain"]), data
    if kind < 0.85:
        return _multipart(rng, fields)
    plain = {key: as_text(item).encode("utf-8", "replace") for key, item in fields.items()}
    return b"application/x-www-form-urlencoded", urlencode({key.encode("utf-8", "replace"): item for key, item in plain.items()}).encode()


def make(rng: random.Random) -> Ask:
    """One request; most of them submit."""
    headers = [(b"host", b"127.0.0.1:8000")]
    if rng.random() < 0.7:
        kind, body = _body(rng)
        body = broken_bytes(rng, body) if rng.random() < 0.2 else body
        asked = {"method": "POST", "path": "/v1/videos", "query": b"", "body": body}
        headers += [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    else:
        path = rng.choice(PATHS) if rng.random() < 0.8 else rng.choice(ODD_PATHS)
        pairs = [(rng.choice(QUERIES), mixed(rng, QUERY_VALUES, 0.8)) for _ in range(rng.choice([0, 1, 2]))]
        query = urlencode([(key, as_text(item).encode("utf-8", "replace")) for key, item in pairs]).encode()
        query = broken_bytes(rng, query) if rng.random() < 0.1 else query
        asked = {"method": rng.choice(METHODS), "path": path, "query": query, "body": b""}
    if rng.random() < 0.15:
        extra = rng.choice(HEADERS)
        headers = [pair for pair in headers if pair[0] != extra[0]] + [extra]
    return asked | {"headers": headers, "pick": rng.randrange(100)}


def check(asked: Ask, box: Box) -> None:
    """The answer is one of ours: no 5xx, no path, OpenAI's form; what was accepted can be rendered by a worker."""
    server: Server = box.lend("server", lambda: open_server(box))
    job = server.ids[asked["pick"] % len(server.ids)] if server.ids and asked["pick"] < 80 else "video_" + "0" * 32
    status, body = server.ask(asked | {"path": asked["path"].replace("{id}", job)})
    if not 200 <= status < 500:
        raise Broken(f"status {status}: {body[:500]!r}")
    if str(box.root).encode() in body or b"Traceback" in body:
        raise Broken(f"an answer that shows too much: {body[:500]!r}")
    if status >= 400:
        if asked["method"] != "HEAD":
            _check_error(body)
        raise RequestError(f"api: got {status}, expected 200; see the answer")
    if status == 200 and asked["method"] == "POST":
        _check_job(server, json.loads(body, parse_constant=_refuse)["id"], box)


def _refuse(name: str) -> None:
    raise Broken(f"{name} in an answer")


def _check_error(body: bytes) -> None:
    error = json.loads(body, parse_constant=_refuse)["error"]
    if set(error) != {"message", "type", "param", "code"} or not isinstance(error["message"], str) or not error["message"]:
        raise Broken(f"an error in another form: {body[:300]!r}")


def _check_job(server: Server, job_id: str, box: Box) -> None:
    job = server.services.store.get(job_id)
    (draft,) = make_drafts([RawJob(job.settings, "job", server.root)], box.family, Recipe(), box.reader)
    must_be_finite([job.settings, job.summary, draft.resolved, draft.recipe])
    outside = [
        path
        for name in PICTURES
        for path in _listed(job.settings.get(name, []))
        if (server.root / path).resolve().parent != server.root / "uploads"
    ]
    if outside:
        raise Broken(f"pictures outside the folder of uploads: {outside}")
    server.ids.append(job_id)
    if len(server.ids) > 40:
        old = server.ids.pop(0)
        if server.services.store.get(old) is not None:
            server.services.store.cancel(old)
            server.services.desk.remove(None, old)


def _listed(item: Any) -> list[str]:
    return list(item) if isinstance(item, list) else [item]
