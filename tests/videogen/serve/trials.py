"""The long trials, over a stand-in of milliseconds: `python -m tests.videogen.serve.trials clients|kills|latency|form`; not part of CI.

`clients`: 50 clients, 200 jobs, two states a second watched. `kills`: the server, sometimes its worker too, killed with -9 at 20 random
moments; then every accepted job must have ended exactly once. `latency`: form to queued, and status at 1,000 stored jobs, as figures.
"""

import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from tests.videogen.serve.fakes import CLIP, services_in
from videogen.jobs.claims import Claims
from videogen.jobs.database import COMPLETED, ENDS
from videogen.jobs.store import Store

ORDER = ("queued", "in_progress", "completed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(root: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.videogen.serve.fakes", "server", str(root), str(port)]
    process = subprocess.Popen(command, start_new_session=True)
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=1)
            return process
        except httpx.HTTPError:
            time.sleep(0.05)


def check(root: Path, accepted: list[str]) -> dict[str, Any]:
    """What became of every job in the store; raises when one was lost, is not over, or ended more than once."""
    store = Store(root)
    ends = {job.id: [state for state in store.history(job.id) if state in ENDS] for job in store.jobs(limit=100_000)}
    lost = [each for each in accepted if each not in ends]
    wrong = {each: states for each, states in ends.items() if len(states) != 1}
    assert not lost and not wrong, (lost, wrong)
    done = [each for each, states in ends.items() if states == [COMPLETED]]
    assert all((root / "clips" / f"{each}.mp4").read_bytes() == CLIP + each.encode() for each in done)
    attempts = Counter(job.attempt for job in store.jobs(limit=100_000))
    states = Counter(states[0] for states in ends.values())
    return {"accepted": len(accepted), "in_store": len(ends), "ends": dict(states), "attempts": dict(sorted(attempts.items()))}


def clients(number: int = 50, jobs: int = 200) -> dict[str, Any]:
    root, port = Path(tempfile.mkdtemp()), free_port()
    process, ids, faults, submit_s, status_s = start(root, port), [], [], [], []

    def visit(index: int) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as visitor:
            mine = {}
            for k in range(jobs // number):
                began = time.perf_counter()
                answer = visitor.post("/v1/videos", json={"prompt": f"{index} {k}"}, headers={"Idempotency-Key": f"{index}-{k}"})
                submit_s.append(time.perf_counter() - began)
                mine[answer.json()["id"]] = 0
            ids.extend(mine)
            while any(state < 2 for state in mine.values()):
                for each, before in mine.items():
                    began = time.perf_counter()
                    state = ORDER.index(visitor.get(f"/v1/videos/{each}").json()["status"])
                    status_s.append(time.perf_counter() - began)
                    faults.extend([each] if state < before else [])
                    mine[each] = state
                time.sleep(0.5)

    began = time.perf_counter()
    threads = [threading.Thread(target=visit, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    process.terminate()
    process.wait()
    assert not faults and len(set(ids)) == jobs
    told = {"seconds": round(seconds, 1), "submit_ms_median": _ms(submit_s), "status_ms_median": _ms(status_s), "went_back": len(faults)}
    return check(root, ids) | told


def kills(trials: int = 20) -> dict[str, Any]:
    """The server killed at random moments while three clients submit, its worker too every other time; then all must have ended once."""
    root, port, rng = Path(tempfile.mkdtemp()), free_port(), random.Random(time.time_ns())
    accepted: list[str] = []
    killed_workers = 0
    for trial in range(trials):
        killed_workers += trial % 2
        _flood_and_kill(root, port, rng, accepted, 0.1 + rng.random() * 4, is_worker_too=bool(trial % 2))
    process = start(root, port)
    store, deadline = Store(root), time.monotonic() + 240
    while store.waiting() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    process.wait()
    return {"trials": trials, "workers_killed_too": killed_workers} | check(root, accepted)


def _flood_and_kill(root: Path, port: int, rng: random.Random, accepted: list[str], after_s: float, *, is_worker_too: bool) -> None:
    process, over, pauses = start(root, port), threading.Event(), [rng.random() * 0.05 for _ in range(100)]

    def flood() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5) as visitor:
            for pause in itertools.cycle(pauses):
                if over.is_set():
                    return
                try:
                    answer = visitor.post("/v1/videos", json={"prompt": f"{time.time_ns()}"})
                    accepted.extend([answer.json()["id"]] if answer.status_code == 200 else [])
                except httpx.HTTPError:
                    return
                time.sleep(pause)

    threads = [threading.Thread(target=flood) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(after_s)
    if is_worker_too:
        os.killpg(process.pid, signal.SIGKILL)  # server and worker, which share its session
    else:
        process.kill()
    process.wait()
    over.set()
    for thread in threads:
        thread.join()


def latency(stored: int = 1000) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp())
    services = services_in(root, max_submits_per_minute=10**6)
    for index in range(stored):
        services.store.submit("local", {"prompt": str(index)}, {"prompt": str(index), "seconds": 1, "size": "16x16"})
        if index % 5:
            claims = Claims(services.store.database, "0", retention_s=1e6)
            taken = claims.claim()
            assert taken is not None
            claims.complete(taken, {}, 1)
    submit_s, status_s, port = [], [], free_port()
    process = start(root, port)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as visitor:
        for index in range(50):
            began = time.perf_counter()
            job_id = visitor.post("/v1/videos", json={"prompt": f"new {index}"}).json()["id"]
            submit_s.append(time.perf_counter() - began)
            began = time.perf_counter()
            visitor.get(f"/v1/videos/{job_id}")
            status_s.append(time.perf_counter() - began)
    process.terminate()
    process.wait()
    worst = {"submit_ms_worst": round(max(submit_s) * 1e3, 1), "status_ms_worst": round(max(status_s) * 1e3, 1)}
    return {"stored": stored, "submit_ms_median": _ms(submit_s), "status_ms_median": _ms(status_s), "n": 50} | worst


def form(times: int = 20) -> dict[str, Any]:
    """From the click on Add to queue until the page says it is in the queue, in Chromium; between two of them a refused form."""
    from playwright.sync_api import sync_playwright

    root, port, spent = Path(tempfile.mkdtemp()), free_port(), []
    command = [sys.executable, "-m", "videogen", "serve", "--no-workers", "--port", str(port), "--root", str(root)]
    process = subprocess.Popen(command)
    while not _answers(f"http://127.0.0.1:{port}/config"):
        time.sleep(0.1)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        for index in range(times + 2):
            page.fill("#vg-prompt textarea", "")
            page.click("#vg-submit")
            page.wait_for_selector("#vg-message [role=alert]", timeout=60_000)
            page.fill("#vg-prompt textarea", f"clip {index}")
            page.keyboard.press("Tab")
            page.wait_for_timeout(600)
            spent.append(page.evaluate(_CLICK))
        browser.close()
    process.terminate()
    process.wait()
    spent = sorted(spent[2:])  # the first two warm up
    assert Store(root).counts()["queued"] == times + 2
    return {"form_ms_median": round(median(spent), 1), "form_ms_worst": round(spent[-1], 1), "n": times}


_CLICK = """() => new Promise(done => {
  const box = document.querySelector('#vg-message'), began = performance.now();
  const seen = new MutationObserver(() => {
    if (box.innerText.includes('1 in the queue')) { seen.disconnect(); done(performance.now() - began); } });
  seen.observe(box, {childList: true, subtree: true, characterData: true});
  document.querySelector('#vg-submit').click(); })"""


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _ms(values: list[float]) -> float:
    return round(median(values) * 1e3, 1)


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"clients": clients, "kills": kills, "latency": latency, "form": form}[sys.argv[1]]()) + "\n")
