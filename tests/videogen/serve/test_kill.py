"""Server and worker killed with -9 in the middle of it: what was accepted ends exactly once. `trials kills` does it 20 times, over 4 s."""

import multiprocessing
import random
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx

from tests.videogen.serve.fakes import serve_alone, work_alone
from tests.videogen.serve.trials import check, free_port
from videogen.jobs.database import RUNNING
from videogen.jobs.store import Store


def test_what_was_accepted_before_kills_ends_exactly_once(tmp_path: Path) -> None:
    rng, port, accepted = random.Random(10), free_port(), []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.videogen.serve.fakes"])
    running: list[BaseProcess] = []

    def kill() -> None:
        for process in running:
            process.kill()
            process.join()
        running.clear()

    try:
        for _ in range(3):
            running += [context.Process(target=serve_alone, args=(tmp_path, port)), context.Process(target=work_alone, args=(tmp_path,))]
            for process in running:
                process.start()
            accepted += submit_for(f"http://127.0.0.1:{port}/v1/videos", 0.2 + 0.3 * rng.random())
            wait_until(lambda: any(job.state == RUNNING for job in Store(tmp_path).waiting()))
            kill()
        running.append(context.Process(target=work_alone, args=(tmp_path,)))
        running[0].start()
        wait_until(lambda: not Store(tmp_path).waiting())
    finally:
        kill()
    told = check(tmp_path, accepted)
    assert told["ends"] == {"completed": told["in_store"]} and len(accepted) >= 3 and max(told["attempts"]) > 1, told


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "nothing happens any more"
        time.sleep(0.01)


def submit_for(url: str, seconds: float) -> list[str]:
    """Jobs accepted in this time, counted from the first one."""
    found: list[str] = []
    began = time.monotonic()
    while time.monotonic() - began < (seconds if found else 60):
        try:
            found.append(httpx.post(url, json={"prompt": str(time.time_ns())}, timeout=5).json()["id"])
        except httpx.HTTPError:
            began = time.monotonic() if found else began
            time.sleep(0.02)
    return found
