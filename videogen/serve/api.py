"""`/v1/videos` and its neighbours over the desk and the store; every answer says what is really so."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from videogen.errors import RequestError, say
from videogen.jobs.database import COMPLETED, QUEUED, Job
from videogen.jobs.store import Conflict, NoSuchJob, QueueFull, Store
from videogen.serve.auth import ANYONE, Bucket, Keys, Links
from videogen.serve.desk import ALIASES, FIELDS, PICTURES, Desk
from videogen.serve.gate import Gate, client_of, error_body
from videogen.serve.options import ServeOptions
from videogen.serve.views import prometheus, video_object

logger = logging.getLogger(__name__)

VARIANTS = {"video": ("mp4", "video/mp4"), "thumbnail": ("jpg", "image/jpeg"), "sidecar": ("json", "application/json")}
PREVIEW = {"preview": ("preview.webp", "image/webp")}
POLL_S, KEEPALIVE_S = 0.2, 15.0
MAX_FILES = 16


class ApiError(Exception):
    """An answer of 4xx or 5xx: its status, and OpenAI's error fields."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_s: int = 0) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_s = status, param, code, retry_s

    def response(self) -> Response:
        """As JSON."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        headers = {"Retry-After": str(self.retry_s)} if self.retry_s else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return JSONResponse(error_body(str(self), kind=kind, param=self.param, code=self.code), self.status, headers)


@dataclass(slots=True)
class Services:
    """What the routes stand on. `workers` says how many worker processes are alive."""

    options: ServeOptions
    store: Store
    desk: Desk
    keys: Keys
    links: Links
    workers: Callable[[], int] = lambda: 0
    listeners: int = 0


def field_of(message: str) -> str | None:
    """The field an error of the desk begins with, for OpenAI's `param`."""
    word = message.partition(":")[0].partition(" ")[0]
    known = {"length": "seconds", "width": "size", "height": "size", "adapter": "lora", "picture": "image"}
    return word if word in (*FIELDS, *PICTURES, *ALIASES, "model") else known.get(word, word or None)


class Api:
    """The routes. Each finds out who asks, then reads or changes that owner's jobs only."""

    def __init__(self, services: Services) -> None:
        self.services, self.store, self.desk = services, services.store, services.desk
        self.bad_keys = Bucket(services.options.max_bad_keys_per_minute)

    def owner(self, request: Request) -> str:
        """Whose key came with the request. Raises ApiError 401, or 429 after too many wrong ones."""
        keys = self.services.keys
        if keys.is_open:
            return ANYONE
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        client = client_of(request.scope)
        wait_s = self.bad_keys.wait_s(client, cost=0.0)
        if wait_s:
            raise ApiError(429, "Authorization: got too many wrong keys, expected fewer; wait", retry_s=max(1, round(wait_s)))
        found = keys.owner(secret.strip()) if scheme.lower() == "bearer" else None
        if found is None:
            self.bad_keys.wait_s(client)
            raise ApiError(401, say("Authorization", "no valid key", "Bearer KEY", "send the key"), code="invalid_api_key")
        return found

    async def create(self, request: Request) -> Response:
        """`POST /v1/videos`: accept a job; it is on the disk when this answers."""
        owner, key = self.owner(request), request.headers.get("idempotency-key", "")
        if len(key) > 200:
            raise ApiError(400, say("Idempotency-Key", f"{len(key)} characters", "at most 200", "shorten it"), param="Idempotency-Key")
        fields, uploads = await _read_fields(request)
        job, is_new = await run_in_threadpool(self.desk.submit, owner, fields, uploads, key=key)
        return JSONResponse(video_object(job), 200, {} if is_new else {"Idempotent-Replay": "true"})

    def _job(self, job_id: str, owner: str | None) -> Job:
        job = self.store.get(job_id, owner)
        if job is None:
            raise ApiError(404, say("video", repr(job_id[:60]), "one of your videos", "list them with GET /v1/videos"), param="video_id")
        return job

    def retrieve(self, video_id: str, request: Request) -> Response:
        """`GET /v1/videos/{id}`."""
        return JSONResponse(video_object(self._job(video_id, self.owner(request))))

    def list(self, request: Request) -> Response:
        """`GET /v1/videos?limit=&after=&order=`."""
        owner, query = self.owner(request), request.query_params
        limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after", "")
        if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= 100):
            raise ApiError(400, say("limit", repr(limit[:20]), "1 to 100", "change limit"), param="limit")
        if order not in ("asc", "desc"):
            raise ApiError(400, say("order", repr(order[:20]), "asc or desc", "change order"), param="order")
        if after:
            self._job(after, owner)
        found = self.store.jobs(owner, limit=int(limit) + 1, after=after, is_newest_first=order == "desc")
        data = [video_object(job) for job in found[: int(limit)]]
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return JSONResponse({"object": "list", "data": data, "has_more": len(found) > len(data)} | ends)

    async def delete(self, video_id: str, request: Request) -> Response:
        """`DELETE /v1/videos/{id}`: stop it if it waits or runs (its record stays), forget it and its files if it is over."""
        owner = self.owner(request)
        job = await run_in_threadpool(self._job, video_id, owner)
        is_aborted = not job.is_over
        if is_aborted:
            job = await run_in_threadpool(self.store.cancel, video_id, owner)
            deadline = time.monotonic() + self.services.options.abort_wait_s
            while not job.is_over and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
                job = await run_in_threadpool(self._job, video_id, owner)
        else:
            await run_in_threadpool(self.desk.remove, owner, video_id)
        told = {"aborted": is_aborted, "stopped": job.is_over, "status": video_object(job)["status"]}
        return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": job.is_over} | told)

    def content(self, video_id: str, request: Request) -> Response:
        """`GET /v1/videos/{id}/content?variant=`, with Range; 409 until the clip is complete."""
        query = request.query_params
        variant = query.get("variant", "video")
        if "sign" in query and not self.services.links.is_good(video_id, variant, query.get("until", ""), query["sign"]):
            raise ApiError(403, say("link", "not a valid one", "one that this server made lately", "reload the page"))
        job = self._job(video_id, None if "sign" in query else self.owner(request))
        if variant not in VARIANTS | PREVIEW:
            raise ApiError(400, say("variant", repr(variant[:30]), ", ".join(VARIANTS | PREVIEW), "change variant"), param="variant")
        ending, kind = (VARIANTS | PREVIEW)[variant]
        path = self.services.options.clips / f"{job.id}.{ending}"
        if job.state != COMPLETED and variant not in PREVIEW:
            raise ApiError(409, say("status", job.state, COMPLETED, "ask again when it is"), param="video_id", code="not_ready")
        if not path.is_file():
            raise ApiError(404, say(variant, "no file", "one that was kept", "render it again"), param="variant")
        name = f"{job.id}.{ending}" if variant != "video" or "sign" not in query else None
        return FileResponse(path, media_type=kind, filename=name, headers={"Cache-Control": "private, no-cache"})

    def events(self, video_id: str, request: Request) -> Response:
        """`GET /v1/videos/{id}/events`: server-sent events, one per change, until the job is over."""
        owner = self.owner(request)
        self._job(video_id, owner)
        if self.services.listeners >= self.services.options.max_listeners:
            raise ApiError(429, say("events", "too many listeners", "fewer", "poll instead"), retry_s=5)
        return StreamingResponse(self._stream(video_id), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def _stream(self, video_id: str) -> AsyncIterator[str]:
        self.services.listeners += 1
        try:
            version, said = 0, time.monotonic()
            while True:
                job = await run_in_threadpool(self.store.get, video_id)
                if job is None:
                    yield f"event: deleted\ndata: {json.dumps({'id': video_id})}\n\n"
                    return
                if job.version != version:
                    version, said = job.version, time.monotonic()
                    yield f"event: status\nid: {version}\ndata: {json.dumps(video_object(job))}\n\n"
                if job.is_over:
                    return
                if time.monotonic() - said > KEEPALIVE_S:
                    said = time.monotonic()
                    yield ": still there\n\n"
                await asyncio.sleep(POLL_S)
        finally:
            self.services.listeners -= 1

    def models(self, request: Request) -> Response:
        """`GET /v1/models`: the one model of this server and what it accepts."""
        self.owner(request)
        desk = self.desk
        entry = {"id": desk.source.name, "object": "model", "created": 0, "owned_by": "videogen", "label": desk.source.label}
        return JSONResponse({"object": "list", "data": [entry | {"recipes": desk.recipes(), "adapters": sorted(desk.adapters)}]})

    def health(self, request: Request) -> Response:
        """`GET /health`: 200 when jobs are accepted and a worker is there to render them, else 503; no key needed."""
        workers = self.services.workers()
        self.store.counts()
        return JSONResponse({"status": "ok" if workers else "no worker", "workers": workers}, 200 if workers else 503)


async def _read_fields(request: Request) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Fields and files of a JSON or multipart body. Raises ApiError for anything else."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        try:
            fields = json.loads(await request.body())
        except (ValueError, RecursionError):
            raise ApiError(400, say("body", "no JSON", "one JSON object", "correct it"), param="body") from None
        if not isinstance(fields, dict):
            raise ApiError(400, say("body", type(fields).__name__, "one JSON object", "correct it"), param="body")
        return fields, {}
    if kind not in ("multipart/form-data", "application/x-www-form-urlencoded"):
        raise ApiError(415, say("Content-Type", repr(kind[:60]), "application/json or multipart/form-data", "send one of them"))
    fields = {}
    uploads: dict[str, list[bytes]] = {}
    async with request.form(max_files=MAX_FILES, max_fields=64) as form:
        for given, value in form.multi_items():
            name = given.removesuffix("[]")
            if isinstance(value, UploadFile):
                uploads.setdefault(name, []).append(await value.read())
            elif name == "lora":
                fields.setdefault(name, []).append(value)
            elif name in fields:
                raise ApiError(400, say(name[:60], "two values", "one", "remove one"), param=name[:60])
            else:
                fields[name] = value
    return fields, uploads


def build_api(services: Services) -> tuple[FastAPI, Callable[[Any], Gate]]:
    """The application, and what puts the gate around it (after a page was mounted on it)."""
    app, api = FastAPI(title="videogen", docs_url=None, redoc_url=None, openapi_url=None), Api(services)
    holder: dict[str, Gate] = {}

    def metrics(request: Request) -> Response:
        api.owner(request)
        counts = services.store.counts()
        gauges = {
            "queue_length": counts[QUEUED],
            "workers": services.workers(),
            "stored_bytes": services.store.used_bytes(),
            "quota_bytes": services.options.limits.quota_bytes,
        }
        requests = holder["gate"].counts if "gate" in holder else {}
        return PlainTextResponse(prometheus(counts, requests, gauges), media_type="text/plain; version=0.0.4")

    routes: tuple[tuple[str, str, Callable[..., Any]], ...] = (
        ("POST", "/v1/videos", api.create),
        ("GET", "/v1/videos", api.list),
        ("GET", "/v1/videos/{video_id}", api.retrieve),
        ("DELETE", "/v1/videos/{video_id}", api.delete),
        ("GET", "/v1/videos/{video_id}/content", api.content),
        ("GET", "/v1/videos/{video_id}/events", api.events),
        ("GET", "/v1/models", api.models),
        ("GET", "/health", api.health),
        ("GET", "/metrics", metrics),
    )
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    _add_handlers(app)

    def gated(inner: Any) -> Gate:
        holder["gate"] = Gate(inner, services.options)
        return holder["gate"]

    return app, gated


def _add_handlers(app: FastAPI) -> None:
    def answer(error: ApiError) -> Response:
        return error.response()

    app.add_exception_handler(ApiError, lambda _r, e: answer(e))
    app.add_exception_handler(RequestError, lambda _r, e: answer(ApiError(400, str(e), param=field_of(str(e)), code="invalid_value")))
    app.add_exception_handler(Conflict, lambda _r, e: answer(ApiError(409, str(e), code="conflict")))
    app.add_exception_handler(QueueFull, lambda _r, e: answer(ApiError(429, str(e), code="queue_full", retry_s=30)))
    app.add_exception_handler(NoSuchJob, lambda _r, _e: answer(ApiError(404, "video: got none, expected one of yours; list them")))
    app.add_exception_handler(HTTPException, lambda _r, e: answer(ApiError(e.status_code, str(e.detail))))
