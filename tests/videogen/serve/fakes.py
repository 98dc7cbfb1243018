"""A server over a stand-in that takes milliseconds, in this process or in its own.

`python -m tests.videogen.serve.fakes server ROOT PORT` serves with a worker process of its own; `... worker ROOT GROUP` is that worker.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from videogen.config import Recipe
from videogen.jobs.claims import group_lock
from videogen.jobs.database import Job
from videogen.progress import Event, OnEvent, StopFlag
from videogen.serve.api import Services
from videogen.serve.assemble import make_app, make_services
from videogen.serve.desk import Desk
from videogen.serve.options import ServeOptions
from videogen.serve.supervisor import Supervisor, WorkerCommand
from videogen.serve.worker import ClipFailed, Made, Worker, run_worker
from videogen.source import find_model, open_family

CLIP = b"\0\0\0\x18ftypisom" + bytes(range(256)) * 8


@dataclass(slots=True)
class StandIn:
    """Three steps and a file; a prompt that begins with `fail` fails, one that begins with `slow` takes two minutes."""

    step_s: float = 0.002

    def make(self, job: Job, folder: Path, on_event: OnEvent, stop: StopFlag) -> Made:
        """As `Maker` says."""
        prompt = job.summary["prompt"]
        total = 1200 if prompt.startswith("slow") else 3
        for step in range(total + 1):
            on_event(Event("denoise", step, total))
            stop.check()
            time.sleep(0.1 if total > 3 else self.step_s)
        if prompt.startswith("fail"):
            raise ClipFailed("no luck")
        record = {"status": "completed", "forwards": total, "stages_s": {"denoise": 1.0}, "cache": {"steps": []}}
        files = {"clip.mp4": CLIP + job.id.encode(), "clip.jpg": b"\xff\xd8\xff", "clip.json": json.dumps(record).encode()}
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return Made(tuple(folder / name for name in files), record)


def make_desk(options: ServeOptions, **parts: Any) -> Any:
    """A function that makes a desk over the shipped model's configs."""
    source = find_model("pocket")

    def settled(recipe: Recipe) -> Recipe:
        return recipe

    return lambda store: Desk(store, source, open_family(source), options, parts.get("read_adapters", settled), parts.get("adapters", {}))


@contextmanager
def working(root: Path, group: str = "0") -> Iterator[None]:
    """A stand-in worker in a thread."""
    stop = StopFlag()

    def work() -> None:
        with group_lock(root, group, wait_s=5):
            Worker(root, group, StandIn(), retention_s=1000.0, stop=stop).run()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def serving(services: Services, page: Any = None) -> Iterator[str]:
    """The address of a server in a thread."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(services, page), log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join()


def services_in(root: Path, **options: Any) -> Services:
    """Services in a folder, without workers."""
    settled = ServeOptions(root=root, **options)
    services = make_services(settled, make_desk(settled))
    services.workers = lambda: 1
    return services


def _serve(root: Path, port: int) -> None:
    options = ServeOptions(root=root, port=port, max_submits_per_minute=10**6, max_requests_per_minute=10**7)
    command = (sys.executable, "-m", "tests.videogen.serve.fakes", "worker", str(root), "0")
    supervisor = Supervisor(root, [WorkerCommand("0", command, dict(os.environ))])
    app = make_app(make_services(options, make_desk(options), supervisor), None, supervisor)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", ws="none")


def serve_alone(root: Path, port: int) -> None:
    """A server without workers, for a process of its own."""
    options = ServeOptions(root=root, port=port, max_submits_per_minute=10**6, max_requests_per_minute=10**7)
    uvicorn.run(make_app(make_services(options, make_desk(options))), host="127.0.0.1", port=port, log_level="error", ws="none")


def work_alone(root: Path) -> None:
    """A worker that only a kill ends, for a process of its own."""
    run_worker(root, "0", StandIn(0.01), retention_s=10_000.0, stop=StopFlag(), wait_s=60)


def _work(root: Path, group: str) -> None:
    stop = StopFlag()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def watch() -> None:
        while os.read(0, 4096):
            pass
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    run_worker(root, group, StandIn(0.005), retention_s=10_000.0, stop=stop, wait_s=60)


if __name__ == "__main__":
    if sys.argv[1] == "server":
        _serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        _work(Path(sys.argv[2]), sys.argv[3])
