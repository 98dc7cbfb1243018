"""Text over HTTP in OpenAI's shape, in front of one engine: admission, cancel on disconnect, cached tokens told, counters.

Only what the engines answer: chat and plain completions of text. `videogen text serve --engine transformers` runs transformers' own
server instead, which has more endpoints and none of the policy.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from videogen.errors import EnvironmentFault, RequestError, bad
from videogen.serve.auth import Keys
from videogen.serve.gate import error_body
from videogen.text.asks import Ask, Busy, TextEngine, Ticket
from videogen.text.metrics import Requests
from videogen.text.model import TextModel

DEFAULT_TOKENS = 256
_KNOWN = {
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "seed",
    "stream",
    "stream_options",
    "n",
}
_IGNORED = {"user", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "metadata", "store"}


@dataclass(slots=True)
class TextService:
    """What the endpoints share."""

    text: TextModel
    engine: TextEngine
    name: str
    keys: Keys
    requests: Requests

    def ask(self, body: Any, *, is_chat: bool) -> Ask:
        """A request's tokens and settings. Raises RequestError naming the field."""
        if not isinstance(body, dict):
            raise bad("body", type(body).__name__, "a JSON object", "send one")
        if body.get("model") not in (None, "", self.name):
            raise bad("model", body["model"], self.name, "ask /v1/models")
        if unknown := sorted(body.keys() - _KNOWN - _IGNORED):
            raise bad("field", unknown[0], f"one of {', '.join(sorted(_KNOWN))}", "leave it out")
        if any(body.get(name) for name in ("stop", "presence_penalty", "frequency_penalty", "logit_bias")):
            raise bad("stop or penalties", "a value", "none: the engines have no such processing", "leave them out")
        if body.get("n", 1) != 1:
            raise bad("n", body["n"], "1", "send several requests")
        limit = body.get("max_completion_tokens", body.get("max_tokens", DEFAULT_TOKENS))
        return Ask(
            tokens=tuple(self._tokens(body, is_chat=is_chat)),
            limit=_number("max_tokens", limit, 1, 2**31, whole=True),
            ends=frozenset(self.text.ends()),
            temperature=_number("temperature", body.get("temperature", 1.0), 0, 100),
            top_p=_number("top_p", body.get("top_p", 1.0), 1e-6, 1),
            seed=_number("seed", body.get("seed") or 0, 0, 2**63 - 1, whole=True),
        )

    def _tokens(self, body: dict[str, Any], *, is_chat: bool) -> list[int]:
        if is_chat:
            messages = body.get("messages")
            is_good = isinstance(messages, list) and messages and all(map(_is_message, messages))
            if not is_good:
                raise bad("messages", messages, "a list of {role, content} with text", "correct it (pictures are not taken here)")
            text = self.text.prompt_text([{"role": m["role"], "content": m["content"]} for m in body["messages"]])
        else:
            given = body.get("prompt")
            if not isinstance(given, str) or not given:
                raise bad("prompt", given, "one text", "send a text")
            text = given
        ids: list[int] = self.text.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def usage(self, ticket: Ticket) -> dict[str, Any]:
        """OpenAI's usage object."""
        counts = {"prompt_tokens": len(ticket.ask.tokens), "completion_tokens": len(ticket.tokens)}
        details = {"cached_tokens": ticket.cached}
        return counts | {"total_tokens": sum(counts.values()), "prompt_tokens_details": details}


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> Any:
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise bad(name, value, f"{'a whole number' if whole else 'a number'} from {low:g} to {high:g}", f"change {name}")
    return value


def make_text_app(service: TextService) -> FastAPI:
    """The application; `videogen.serve.gate.Gate` goes around it."""
    app = FastAPI(title="videogen text", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        if fault := service.engine.fault:
            return JSONResponse({"status": "failed", "reason": fault}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if refusal := _refusal(service, request):
            return refusal
        return PlainTextResponse(service.requests.prometheus(service.engine))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        if refusal := _refusal(service, request):
            return refusal
        return JSONResponse({"object": "list", "data": [{"id": service.name, "object": "model", "owned_by": "videogen"}]})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _complete(service, request, is_chat=True)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await _complete(service, request, is_chat=False)

    return app


def _refusal(service: TextService, request: Request) -> Response | None:
    secret = request.headers.get("authorization", "").removeprefix("Bearer ")
    if service.keys.is_open or service.keys.owner(secret) is not None:
        return None
    return _error(401, "key: got none that fits, expected one of the server's; send Authorization: Bearer KEY", "authentication_error")


def _error(status: int, message: str, kind: str = "invalid_request_error") -> JSONResponse:
    return JSONResponse(error_body(message, kind=kind), status_code=status)


async def _complete(service: TextService, request: Request, *, is_chat: bool) -> Response:
    if refusal := _refusal(service, request):
        return refusal
    loop, words = asyncio.get_running_loop(), asyncio.Queue[int | None]()

    def tell(token: int | None) -> None:
        loop.call_soon_threadsafe(words.put_nowait, token)

    try:
        body = await request.json()
        ask = service.ask(body, is_chat=is_chat)
        ticket = await asyncio.to_thread(service.engine.submit, ask, tell)
    except (RequestError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        return _error(400, str(error))
    except Busy as error:
        return _error(429, str(error), "rate_limit_error")
    except EnvironmentFault as error:
        return _error(503, str(error), "server_error")
    waiting = asyncio.create_task(_watch(ticket, tell))
    head = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex[:24]}", "created": int(time.time()), "model": service.name}
    if body.get("stream"):
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        lines = _stream(service, request, ticket, words, waiting, head, is_chat=is_chat, with_usage=with_usage)
        return StreamingResponse(lines, media_type="text/event-stream")
    await _until_done(request, ticket, waiting)
    service.requests.enter(ticket)
    if ticket.error:
        return _error(500, f"text request: got {ticket.error}, expected an answer; ask again", "server_error")
    content = service.text.tokenizer.decode(ticket.tokens, skip_special_tokens=True)
    told = {"message": {"role": "assistant", "content": content}} if is_chat else {"text": content}
    choice = {"index": 0, "finish_reason": _reason(ticket)} | told
    kind = "chat.completion" if is_chat else "text_completion"
    return JSONResponse(head | {"object": kind, "choices": [choice], "usage": service.usage(ticket)})


def _reason(ticket: Ticket) -> str:
    return "stop" if ticket.tokens and ticket.tokens[-1] in ticket.ask.ends else "length"


async def _watch(ticket: Ticket, tell: Any) -> None:
    """Ends the words of a request when it is over; an engine whose thread died is looked after meanwhile."""
    while not ticket.done.is_set():
        if ticket.tend is not None:
            ticket.tend()
        await asyncio.sleep(0.005)
    tell(None)


async def _until_done(request: Request, ticket: Ticket, waiting: asyncio.Task[None]) -> None:
    while not waiting.done():
        await asyncio.wait([waiting], timeout=0.2)
        if not waiting.done() and await request.is_disconnected():
            ticket.cancel()


async def _stream(
    service: TextService,
    request: Request,
    ticket: Ticket,
    words: "asyncio.Queue[int | None]",
    waiting: asyncio.Task[None],
    head: dict[str, Any],
    *,
    is_chat: bool,
    with_usage: bool,
) -> AsyncIterator[str]:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    tokens: list[int] = []
    told = ""

    def line(body: dict[str, Any]) -> str:
        return f"data: {json.dumps(head | {'object': kind} | body, ensure_ascii=False)}\n\n"

    def choice(text: str, reason: str | None) -> dict[str, Any]:
        said = {"delta": {"content": text} if text else {}} if is_chat else {"text": text}
        return {"choices": [{"index": 0, "finish_reason": reason} | said]}

    try:
        while (token := await words.get()) is not None:
            tokens.append(token)
            whole = service.text.tokenizer.decode(tokens, skip_special_tokens=True)
            if whole != told and not whole.endswith("�"):  # a character may take several tokens
                yield line(choice(whole[len(told) :], None))
                told = whole
            if await request.is_disconnected():
                ticket.cancel()
        if ticket.error:
            yield f"data: {json.dumps(error_body(ticket.error, kind='server_error'))}\n\n"
        else:
            yield line(choice("", _reason(ticket)))
            if with_usage:
                yield line({"choices": [], "usage": service.usage(ticket)})
        yield "data: [DONE]\n\n"
    finally:
        if not ticket.done.is_set():
            ticket.cancel()
        await waiting
        service.requests.enter(ticket)
