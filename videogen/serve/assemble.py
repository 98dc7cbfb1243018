"""Puts a server together: store, desk, keys, routes, gate, and what runs while it is up."""

import logging
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from videogen.jobs.store import Store
from videogen.serve.api import Services, build_api
from videogen.serve.auth import Keys, Links
from videogen.serve.desk import Desk
from videogen.serve.gate import Gate
from videogen.serve.options import ServeOptions
from videogen.serve.supervisor import Supervisor
from videogen.serve.worker import tidy

logger = logging.getLogger(__name__)

SWEEP_S = 60.0
Page = Callable[[FastAPI, Services], Any]


def make_services(options: ServeOptions, make_desk: Callable[[Store], Desk], supervisor: Supervisor | None = None) -> Services:
    """The parts of a server; `make_desk` gives the desk its store."""
    store = Store(options.root, options.limits)
    workers = supervisor.alive if supervisor is not None else lambda: 0
    return Services(options, store, make_desk(store), Keys(options.keys), Links(), workers)


def make_app(services: Services, page: Page | None = None, supervisor: Supervisor | None = None) -> Gate:
    """The whole application behind its gate; its lifespan starts and stops the workers and removes what has expired."""
    api, gated = build_api(services)
    inner = page(api, services) if page is not None else api
    mounted = inner.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        ended = threading.Event()
        await run_in_threadpool(tidy, services.options.root)
        threading.Thread(target=_sweep, args=(services.desk, ended), daemon=True).start()
        if supervisor is not None:
            supervisor.start()
        try:
            async with mounted(app):
                yield
        finally:
            ended.set()
            if supervisor is not None:
                await run_in_threadpool(supervisor.stop)

    inner.router.lifespan_context = lifespan
    return gated(inner)


class SteadyClock:
    """Seconds since the epoch, but no further on than time has really gone by since the start: a jump ends no clip's time."""

    def __init__(self) -> None:
        self._began = time.time() - self._gone_by()

    @staticmethod
    def _gone_by() -> float:
        return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))  # sleep counts where it can be told

    def now(self) -> float:
        """The earlier of the two."""
        return min(time.time(), self._began + self._gone_by())


def _sweep(desk: Desk, ended: threading.Event) -> None:
    clock = SteadyClock()
    while not ended.wait(SWEEP_S):
        try:
            gone = desk.sweep(clock.now())
        except (OSError, sqlite3.Error) as error:
            logger.warning("sweep: got %s, expected a disk that can be written; tried again in %g s", error, SWEEP_S)
            continue
        if gone:
            logger.info("removed %d clips whose time was over", gone)
