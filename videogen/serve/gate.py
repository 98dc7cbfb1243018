"""What every request passes before any code of ours reads it: host, origin, size, encoding, rate. Pure ASGI."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from videogen.serve.auth import Bucket
from videogen.serve.options import LOOPBACK_NAMES, ServeOptions

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"x-frame-options", b"SAMEORIGIN"), (b"referrer-policy", b"no-referrer"))


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape; `param` is the field at fault."""
    shown = message.encode("utf-8", "backslashreplace").decode()  # half a character of a client's text has no bytes
    named = None if param is None else param.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": shown, "type": kind, "param": named, "code": code}}


def client_of(scope: Scope) -> str:
    """Who is counted for rates: the address of the connection, never a header."""
    return str((scope.get("client") or ("unknown",))[0])


class Refusal(Exception):
    """An answer given before the application is asked."""

    def __init__(self, status: int, message: str, retry_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_s = status, message, retry_s


class Gate:
    """Wraps the whole application, page included. `counts` are requests by method and class of status."""

    def __init__(self, app: App, options: ServeOptions) -> None:
        self.app, self.options = app, options
        self.requests, self.submits = Bucket(options.max_requests_per_minute), Bucket(options.max_submits_per_minute)
        self.logins = Bucket(options.max_bad_keys_per_minute)
        self.counts: Counter[tuple[str, str]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = {bytes(name).decode("latin-1").lower(): bytes(value).decode("latin-1") for name, value in scope["headers"]}
        try:
            self._check(scope, headers)
        except Refusal as refusal:
            self.counts[(str(scope.get("method", "WS")), f"{refusal.status // 100}xx")] += 1
            await (_close(send) if scope["type"] == "websocket" else refuse(send, refusal))
            return
        if scope["type"] == "websocket":
            await self.app(scope, receive, send)
            return
        meter = _Meter(receive, send, self.options.max_body_bytes)
        try:
            await self.app(scope, meter.receive, meter.send)
        finally:
            self.counts[(scope["method"], f"{meter.status // 100}xx")] += 1

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if self.options.is_loopback and _name(host) not in (*LOOPBACK_NAMES, self.options.host):
            raise Refusal(421, "host: got another name, expected this machine's own; open the address the server printed")
        is_safe = scope["type"] == "http" and scope["method"] in SAFE_METHODS
        if not is_safe and not _is_same_origin(headers, host):
            raise Refusal(403, "origin: got another site, expected this server's own page; requests from other sites are refused")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise Refusal(415, "content-encoding: got a compressed body, expected none; send it uncompressed")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 20 or int(length) > self.options.max_body_bytes:
            raise Refusal(413, f"body: got {length[:20]} bytes, expected at most {self.options.max_body_bytes}; send less")
        if not bytes(scope.get("query_string", b"")).isascii():
            raise Refusal(400, "query: got bytes beyond ASCII, expected percent-encoded ones; encode them")
        is_submit = not is_safe and str(scope["path"]).startswith("/v1/")
        is_login = not is_safe and str(scope["path"]).rstrip("/").endswith("/login")
        for bucket in (self.requests, *([self.submits] if is_submit else []), *([self.logins] if is_login else [])):
            wait_s = bucket.wait_s(client_of(scope))
            if wait_s:
                raise Refusal(429, "rate: got too many requests, expected fewer; wait as long as Retry-After says", wait_s)


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_same_origin(headers: Mapping[str, str], host: str) -> bool:
    """Whether the request comes from our own page or from no page at all (a program sends no origin)."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        return False


class _Meter:
    """Counts a body as it comes and answers 413 in place of the application once it is too large."""

    def __init__(self, receive: Receive, send: Send, most: int) -> None:
        self._receive, self._send, self._most = receive, send, most
        self._got, self._is_over, self._has_begun = 0, False, False
        self.status = 500

    async def receive(self) -> Message:
        """The next message, or the end of the connection when there was too much."""
        message = await self._receive()
        self._got += len(message.get("body", b""))
        if self._got > self._most and not self._has_begun:
            self._is_over = self._has_begun = True
            self.status = 413
            await refuse(self._send, Refusal(413, f"body: got more than {self._most} bytes, expected at most that; send less"))
        return {"type": "http.disconnect"} if self._is_over else message

    async def send(self, message: Message) -> None:
        """Pass the answer on, with headers that every answer has."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self._has_begun, self.status = True, int(message["status"])
            known = {bytes(name).lower() for name, _ in message.get("headers", [])}
            message["headers"] = [*message.get("headers", []), *(pair for pair in _HEADERS if pair[0] not in known)]
        await self._send(message)


async def refuse(send: Send, refusal: Refusal) -> None:
    """Send a refusal as JSON."""
    kind = "rate_limit_error" if refusal.status == 429 else "invalid_request_error"
    body = json.dumps(error_body(refusal.message, kind=kind)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close"), *_HEADERS]
    if refusal.retry_s:
        headers.append((b"retry-after", str(max(1, round(refusal.retry_s))).encode()))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _close(send: Send) -> None:
    await send({"type": "websocket.close", "code": 1008})
