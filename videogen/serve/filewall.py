"""Lets no client name a file or an address to the page: a file in a form must be one that was just uploaded.

Gradio checks this itself only when it was launched, not when it is mounted (6.31: `_check_allowed` asks `has_launched`), and it
fetches addresses. So the check is ours, on every JSON body before Gradio reads it. Pure ASGI.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from videogen.serve.gate import SAFE_METHODS, App, Message, Receive, Refusal, Scope, Send, refuse

MAX_FORM_BYTES = 4_000_000
_KEYS = ("path", "url", "orig_path")


class FileWall:
    """Wraps the page. `folder` is where its uploads lie."""

    def __init__(self, app: App, folder: Path) -> None:
        self.app, self.folder = app, folder.resolve()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call; everything but JSON to the page passes untouched."""
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS or str(scope["path"]).startswith("/v1/") or _is_multipart(scope):
            await self.app(scope, receive, send)
            return
        body = await _read(receive)
        if len(body) > MAX_FORM_BYTES:
            await refuse(send, Refusal(413, f"form: got more than {MAX_FORM_BYTES} bytes, expected at most that; upload files as files"))
            return
        if not self._is_fine(body):
            await refuse(send, Refusal(403, "file: got a path or an address, expected an uploaded file; upload it"))
            return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    def _is_fine(self, body: bytes) -> bool:
        try:
            value = json.loads(body or b"null")
        except RecursionError:
            return False
        except ValueError:
            return True  # no JSON, such as a login form: Gradio's own reading of it, by the same parser, finds no file either
        return all(self._is_uploaded(each) for each in _files(value))

    def _is_uploaded(self, entry: dict[str, Any]) -> bool:
        path, url = entry.get("path"), entry.get("url")
        if not isinstance(path, str) or not path or "\0" in path:
            return False
        if isinstance(url, str) and not url.startswith(("/", "http://", "https://")):
            return False
        place = Path(path)
        return place.is_absolute() and place.resolve().is_relative_to(self.folder) and place.is_file()


def _files(value: Any) -> Iterator[dict[str, Any]]:
    """Everything in a form that could be taken for a file."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            meta = each.get("meta")
            if any(key in each for key in _KEYS) or (isinstance(meta, dict) and "_type" in meta):
                yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _is_multipart(scope: Scope) -> bool:
    kinds = [bytes(value) for name, value in scope["headers"] if bytes(name).lower() == b"content-type"]
    return len(kinds) == 1 and kinds[0].lower().startswith(b"multipart/form-data")


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    total = 0
    while total <= MAX_FORM_BYTES:
        message = await receive()
        if message["type"] != "http.request":
            break
        parts.append(message.get("body", b""))
        total += len(parts[-1])
        if not message.get("more_body"):
            break
    return b"".join(parts)
